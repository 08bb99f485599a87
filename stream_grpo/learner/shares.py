"""What each rank of the learner runs of a train batch, and how it gets there: named arrays in safetensors, no pickle.

B sequences, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from stream_grpo.learner.batching import Microbatch, Minibatch, TrainBatch

_HEADER = "header"
_ARRAYS = tuple(field.name for field in fields(Microbatch) if field.name != "rank")
_COUNTS = tuple(field.name for field in fields(Minibatch) if field.name != "microbatches")
_TOTALS = tuple(field.name for field in fields(TrainBatch) if field.name != "minibatches")


def shares(batch: TrainBatch, num_ranks: int) -> list[TrainBatch]:
    """For each rank its microbatches; every count is still that of the whole batch, and so the denominator is.

    All ranks have as many microbatches of a minibatch: the gradients of ZeRO 2 and 3 are reduced at every backward,
    and the weights of ZeRO 3 gathered at every forward, by all ranks together. Ranks with fewer get empty ones.
    """
    return [
        replace(batch, minibatches=tuple(_share(minibatch, rank, num_ranks) for minibatch in batch.minibatches))
        for rank in range(num_ranks)
    ]


def _share(minibatch: Minibatch, rank: int, num_ranks: int) -> Minibatch:
    num_each = np.bincount([m.rank for m in minibatch.microbatches], minlength=num_ranks)
    missing = [empty_microbatch(rank) for _ in range(int(num_each.max() - num_each[rank]))]
    return replace(minibatch, microbatches=(*(m for m in minibatch.microbatches if m.rank == rank), *missing))


def empty_microbatch(rank: int) -> Microbatch:
    """One sequence of two tokens, none of them trained: its loss is 0 and its gradient too."""
    shape = (1, 2)
    return Microbatch(
        token_ids_BT=np.zeros(shape, dtype=np.int64),
        lengths_B=np.full(1, 2, dtype=np.int64),
        num_prompt_B=np.ones(1, dtype=np.int64),
        mask_BT=np.zeros(shape, dtype=np.bool_),
        behavior_logprobs_BT=np.zeros(shape, dtype=np.float32),
        advantages_B=np.zeros(1, dtype=np.float64),
        tokens_B=np.zeros(1, dtype=np.int64),
        problem_tokens_B=np.zeros(1, dtype=np.int64),
        has_signal_B=np.zeros(1, dtype=np.bool_),
        ages_BT=np.zeros(shape, dtype=np.int64),
        differs_BT=np.zeros(shape, dtype=np.bool_),
        rank=rank,
    )


def to_bytes(share: TrainBatch) -> bytes:
    """A share as safetensors: every array under `minibatch.microbatch.name`, the counts in a JSON header."""
    header = {name: getattr(share, name) for name in _TOTALS}
    header["minibatches"] = [_plain(minibatch) for minibatch in share.minibatches]
    arrays = {
        f"{i}.{j}.{name}": np.ascontiguousarray(array)
        for i, minibatch in enumerate(share.minibatches)
        for j, microbatch in enumerate(minibatch.microbatches)
        for name in _ARRAYS
        if (array := getattr(microbatch, name)) is not None
    }
    result: bytes = save(arrays | {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)})
    return result


def _plain(minibatch: Minibatch) -> dict[str, Any]:
    return {
        **{name: getattr(minibatch, name) for name in _COUNTS},
        "ranks": [microbatch.rank for microbatch in minibatch.microbatches],
    }


def from_bytes(data: bytes) -> TrainBatch:
    """What `to_bytes` was given."""
    arrays: dict[str, NDArray[Any]] = load(data)
    header: dict[str, Any] = json.loads(arrays.pop(_HEADER).tobytes())
    return TrainBatch(
        minibatches=tuple(_minibatch(i, plain, arrays) for i, plain in enumerate(header["minibatches"])),
        **{name: header[name] for name in _TOTALS},
    )


def _minibatch(i: int, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Minibatch:
    return Minibatch(
        microbatches=tuple(
            Microbatch(**{name: arrays.get(f"{i}.{j}.{name}") for name in _ARRAYS}, rank=rank)  # type: ignore[arg-type]
            for j, rank in enumerate(plain["ranks"])
        ),
        **{name: plain[name] for name in _COUNTS},
    )
