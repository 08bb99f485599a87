"""What a critic does in a learner step: it judges a batch before the first gradient, and learns beside the policy.

B sequences, T tokens, K of them from the token before the first target on, N trained tokens of a whole batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stream_grpo.algo.gae import Estimates, explained_variance, gae, value_loss, whitening
from stream_grpo.algo.recipe import Recipe, given
from stream_grpo.learner.batching import Microbatch, Minibatch, TrainBatch
from stream_grpo.learner.figures import ADVANTAGE_PERCENTILES, percentiles
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import Targets


class ValueModel(Protocol):
    """What a learner step asks of a critic."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def num_bytes(self) -> int:
        """Of its weights, their gradients, and what its optimizer keeps."""

    def values(self, targets: Targets) -> Tensor:
        """[B, K] what stands before each target is worth; 0 for the first of a sequence."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a part of its loss."""

    def update(self, learning_rate: float) -> float:
        """Clip, change the weights, clear. Returns the norm before clipping."""


class _Judged(NamedTuple):
    """A microbatch as the critic sees it at the start of the learner step, in float64 on the CPU."""

    value_BK: Tensor
    mask_BK: Tensor
    estimates: Estimates


class CriticStep:
    """One critic, one batch after the other. Its own figures are those of the batch judged last."""

    def __init__(self, model: ValueModel, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._judged: dict[int, _Judged] = {}
        """By the identity of the microbatch that was given out."""
        self._updates: list[dict[str, float]] = []
        self._figures: dict[str, float | None] = {}
        self._num_clipped = self._num_learnt = 0
        self._seconds = 0.0

    @torch.no_grad()
    def judged(self, batch: TrainBatch) -> TrainBatch:
        """The batch with an advantage for each trained token, made of values and of the rewards that it holds.

        What stands in its place in `advantages_B` is taken for the reward: under `advantage = gae` nothing was taken
        from it.
        """
        self._judged, self._updates, self._seconds = {}, [], 0.0
        self._num_clipped = self._num_learnt = 0
        with self._timed():
            found = {id(m): self._judge(m) for minibatch in batch.minibatches for m in minibatch.microbatches}
            flat, mean, scale = list(found.values()), 0.0, 1.0
            if self._recipe.gae_whiten:
                mean, scale = whitening(_trained((judged.estimates.advantage_BT for judged in flat), flat))
            minibatches = tuple(
                replace(
                    minibatch,
                    microbatches=tuple(self._given_out(m, found[id(m)], mean, scale) for m in minibatch.microbatches),
                )
                for minibatch in batch.minibatches
            )
            self._figures = _figures(flat, mean, scale)
        return replace(batch, minibatches=minibatches)

    def _judge(self, microbatch: Microbatch) -> _Judged:
        tensors = tensors_of(microbatch, self._model.device)
        value_BK = self._model.values(tensors.targets).double().cpu()
        mask_BK = tensors.mask_BK.cpu()
        gamma, lambda_ = given(self._recipe.gae_gamma), given(self._recipe.gae_lambda)
        rewards_B = torch.from_numpy(microbatch.advantages_B)
        return _Judged(value_BK, mask_BK, gae(rewards_B, value_BK, mask_BK, gamma=gamma, lambda_=lambda_))

    def _given_out(self, microbatch: Microbatch, judged: _Judged, mean: float, scale: float) -> Microbatch:
        advantage_BK = torch.where(judged.mask_BK, (judged.estimates.advantage_BT - mean) / scale, 0.0)
        by_token_BT = np.zeros(microbatch.mask_BT.shape)
        by_token_BT[:, -advantage_BK.shape[1] :] = advantage_BK.numpy()
        none_B = np.zeros_like(microbatch.advantages_B)
        made = replace(microbatch, advantages_B=none_B, token_advantages_BT=by_token_BT)
        self._judged[id(made)] = judged
        return made

    def learn(self, minibatch: Minibatch, learning_rate: float) -> None:
        """One update towards the returns of a minibatch that `judged` gave out.

        Raises FloatingPointError before it where the loss is not finite.
        """
        with self._timed():
            loss_sum, num_clipped = 0.0, 0
            for microbatch in minibatch.microbatches:
                judged, tensors = self._judged[id(microbatch)], tensors_of(microbatch, self._model.device)
                value_BK = self._model.values(tensors.targets)
                start_BK, return_BK = (x_BK.to(value_BK) for x_BK in (judged.value_BK, judged.estimates.return_BT))
                loss, clipped = value_loss(
                    value_BK,
                    start_BK,
                    return_BK,
                    tensors.mask_BK,
                    denominator=minibatch.num_tokens,
                    clip=self._recipe.value_clip,
                )
                loss_sum, num_clipped = loss_sum + loss.item(), num_clipped + int(clipped)
                self._model.backward(loss)
            if not math.isfinite(loss_sum):
                raise FloatingPointError(f"loss {loss_sum} of the critic; restart from a checkpoint")
            norm = self._model.update(learning_rate)
        self._updates.append({"value_loss": loss_sum, "value_grad_norm": norm, "critic_learning_rate": learning_rate})
        self._num_clipped, self._num_learnt = self._num_clipped + num_clipped, self._num_learnt + minibatch.num_tokens

    def metrics(self) -> dict[str, float | None]:
        """Of the batch judged last and of the updates since: means over these."""
        found: dict[str, float | None] = {**self._figures, "critic_s": self._seconds}
        if self._updates:
            for name in self._updates[0]:
                found[name] = sum(update[name] for update in self._updates) / len(self._updates)
            found["critic_bytes"] = float(self._model.num_bytes)
            if self._recipe.value_clip is not None:
                found["value_clip_share"] = self._num_clipped / self._num_learnt
        return found

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun_s = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begun_s


def _trained(parts: Iterable[Tensor], judged: Iterable[_Judged]) -> Tensor:
    """The entries of trained tokens, [N]."""
    chosen = [part_BK[one.mask_BK] for part_BK, one in zip(parts, judged, strict=True)]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *chosen])


def _figures(judged: list[_Judged], mean: float, scale: float) -> dict[str, float | None]:
    """What the critic says of a batch; the figures of advantages are over tokens, and groups have no weights."""
    advantage_N = (_trained((one.estimates.advantage_BT for one in judged), judged) - mean) / scale
    value_N = _trained((one.value_BK for one in judged), judged)
    return_N = _trained((one.estimates.return_BT for one in judged), judged)
    if not value_N.numel():
        return {}
    return {
        "value_mean": float(value_N.mean()),
        "return_mean": float(return_N.mean()),
        "explained_variance": explained_variance(value_N, return_N),
        "advantage_std": float(advantage_N.std(correction=0)),
        **percentiles("advantage", advantage_N.numpy(), ADVANTAGE_PERCENTILES),
        "effective_groups": None,
    }
