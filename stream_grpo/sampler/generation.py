"""What a sampler needs of an engine, and the reading of what an engine gives; knows no engine of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stream_grpo.types import EndReason, Generation, GenerationRequest, PolicyVersion
from stream_grpo.weights.manifest import Fingerprint, TensorSpec


class Engine(Protocol):
    """Samples many sequences at once. Owned by one thread: no method is safe to call from another."""

    @property
    def num_slots(self) -> int:
        """Sequences that run at once; further ones wait inside."""

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and neither given back by `step` nor aborted."""

    def add(self, request: GenerationRequest) -> None:
        """Take a request; it runs from the next step on. Ids of unfinished requests are unique."""

    def step(self) -> list[Generation]:
        """Sample one token of every running sequence; the generations that have finished."""

    def abort(self, request_ids: Iterable[str]) -> list[Generation]:
        """End requests now. What they have so far comes back, as `abort` unless it had finished; unknown ids do not."""

    def progress(self, request_ids: Iterable[str]) -> list[Generation]:
        """What requests have so far, as `partial` unless they had finished; they go on. Unknown ids give nothing."""

    def num_sampled(self, request_ids: Iterable[str]) -> int:
        """Tokens of these requests so far, in all: cheaper than `progress`. Unknown ids count nothing."""

    def expected_tensors(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes of the tensors that `apply_weights` takes, all of them."""

    def apply_weights(self, named_tensors: Mapping[str, Any], version: PolicyVersion, *, recompute_kv: bool) -> float:
        """Replace the weights between two steps; later tokens carry `version`. Returns the seconds it took.

        `recompute_kv`: the KV cache of running sequences is computed again with the new weights; otherwise it is kept
        and their next tokens have a mixed context. Raises WeightsError; the engine lives on, but its weights may then
        be a mix of old and new.
        """

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """At temperature 1, the logprobs of every token of each sequence after its first.

        Running sequences go on meanwhile; what finishes is kept for the next `step` or `abort`.
        """

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[Fingerprint, ...]:
        """What the model's modules give out on each sequence; only between requests.

        Empty where the model has no modules that are known.
        """

    def clear_kv(self) -> None:
        """Forget every KV cache; only between requests. Values that are not finite would outlive their weights."""

    def close(self) -> None:
        """Free what the engine holds."""


def generate(engine: Engine, requests: Iterable[GenerationRequest]) -> Iterator[Generation]:
    """Sample all requests on an engine that nobody else uses, as many at once as it runs; yields as they finish."""
    waiting, running = iter(requests), set[str]()
    try:
        while True:
            for request in islice(waiting, max(0, engine.num_slots - len(running))):
                engine.add(request)
                running.add(request.request_id)
            if not running:
                return
            for generation in engine.step():
                running.discard(generation.request_id)
                yield generation
    finally:
        engine.abort(running)


def logprobs_of_sampled(
    token_ids: Sequence[int], tables: Sequence[Mapping[int, Any] | None] | None
) -> NDArray[np.float32] | None:
    """[R] logprob of each sampled token, looked up by its id: the order of entries in a table means nothing.

    None where the logprob of any token is missing or not finite: such a generation has no behavior policy.
    """
    if tables is None or len(tables) != len(token_ids):
        return None
    logprobs = np.empty(len(token_ids), np.float32)
    for i, (token_id, table) in enumerate(zip(token_ids, tables, strict=True)):
        entry = table.get(token_id) if table is not None else None
        value = entry.logprob if entry is not None else None
        if value is None or not math.isfinite(value):
            return None
        logprobs[i] = value
    return logprobs


def end_reason(finish_reason: str | None, stop_reason: int | str | None, eos_token_ids: frozenset[int]) -> EndReason:
    """vLLM's two reasons as one of ours; a reason we do not know is an error."""
    if finish_reason == "stop":
        is_eos = stop_reason is None or stop_reason in eos_token_ids
        return EndReason.EOS if is_eos else EndReason.STOP
    known = {"length": EndReason.LENGTH, "abort": EndReason.ABORT}
    return known.get(finish_reason or "", EndReason.ERROR)


def versions_of_spans(spans: Iterable[tuple[str, int, int]], num_tokens: int) -> tuple[PolicyVersion, ...] | None:
    """[R] version of each token from (label, start, end) spans; None where they do not cover all tokens in order."""
    versions: list[PolicyVersion] = []
    for label, start, end in spans:
        branch, _, step = label.partition(".")
        if start != len(versions) or not (branch.isdecimal() and step.isdecimal()):
            return None
        versions += [PolicyVersion(int(branch), int(step))] * (end - start)
    return tuple(versions) if len(versions) == num_tokens else None
