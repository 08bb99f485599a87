"""One method on one world and one seed: the loop, and the figures of its curve."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from curation.methods import METHODS, Indices, Method, Settings
from curation.world import Learner, World

Floats = NDArray[np.float64]

NUM_ROLLOUTS, FROM_ROLLOUTS = 180_000, 10_000
TARGET = 0.7
MAX_REFILLS = 10
"""Rounds of replacement, as DAPO bounds them."""
BINS = 10


class Account:
    """What was generated, and how well it was predicted."""

    def __init__(self, num_rollouts: int, num_tokens: float) -> None:
        self.num_rollouts, self.num_tokens = num_rollouts, num_tokens
        self.num_groups, self.num_mixed = 0, 0
        self._predicted, self._came = np.zeros(BINS), np.zeros(BINS)
        self._count = np.zeros(BINS)

    def add(self, is_mixed: NDArray[np.bool_], predicted: Floats | None) -> None:
        """Count groups; the prediction was made when they were chosen."""
        self.num_groups += len(is_mixed)
        self.num_mixed += int(is_mixed.sum())
        if predicted is not None:
            place = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
            self._predicted += np.bincount(place, predicted, BINS)
            self._came += np.bincount(place, is_mixed, BINS)
            self._count += np.bincount(place, minlength=BINS)

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error: |predicted - observed| of ten bins, weighted by their groups."""
        total = self._count.sum()
        return float(np.abs(self._predicted - self._came).sum() / total) if total else None


def run(world: World, name: str, seed: int, settings: Settings, num_rollouts: int = NUM_ROLLOUTS) -> dict[str, Any]:
    """The figures of one run; the same arguments give the same ones."""
    learner = Learner(world, seed)
    made, is_charged = METHODS[name]
    method = made(learner, seed, **settings)
    offline = 2 * method.offline_rollouts * world.num_problems if is_charged else 0
    account = Account(offline, offline * float(learner.tokens_N.mean()))
    waiting: deque[tuple[int, Indices, Indices, Floats | None]] = deque()
    curve = [(account.num_rollouts, account.num_tokens, learner.accuracy_D())]
    step = 0
    while account.num_rollouts < num_rollouts:
        waiting.append((step, *_batch(world, learner, method, account, step)))
        if len(waiting) > world.lag:
            _learn(world, learner, method, account, waiting.popleft())
        curve.append((account.num_rollouts, account.num_tokens, learner.accuracy_D()))
        step += 1
    return _figures(curve, account, num_rollouts)


def _batch(
    world: World, learner: Learner, method: Method, account: Account, step: int
) -> tuple[Indices, Indices, Floats | None]:
    """Groups of one batch, sampled at the present skills: problems, passes, predictions."""
    parts: list[tuple[Indices, Indices, Floats | None]] = []
    num_mixed = 0
    for _ in range(MAX_REFILLS if method.refills else 1):
        index = method.choose(world.batch - num_mixed, step)
        predicted = method.mixed(index)
        np.add.at(method.num_in_flight, index, 1)
        first = method.screen or world.group_size
        passed = learner.sample(index, first)
        _charge(account, learner, index, first)
        if method.screen:
            goes_on = (passed > 0) & (passed < first)
            more = learner.sample(index, world.group_size - first)
            # A group that is not continued stands for one without signal.
            passed = np.where(goes_on, passed + more, np.where(passed == 0, 0, world.group_size))
            _charge(account, learner, index[goes_on], world.group_size - first)
        parts.append((index, passed, predicted))
        num_mixed += int(((passed > 0) & (passed < world.group_size)).sum())
        if num_mixed >= world.batch:
            break
    indices, passes, predictions = zip(*parts, strict=True)
    known = None if predictions[0] is None else np.concatenate(predictions)
    return np.concatenate(indices), np.concatenate(passes), known


def _charge(account: Account, learner: Learner, index: Indices, num: int) -> None:
    account.num_rollouts += num * len(index)
    account.num_tokens += num * float(learner.tokens_N[index].sum())


def _learn(
    world: World,
    learner: Learner,
    method: Method,
    account: Account,
    batch: tuple[int, Indices, Indices, Floats | None],
) -> None:
    step, index, passed, predicted = batch
    np.add.at(method.num_in_flight, index, -1)
    account.add((passed > 0) & (passed < world.group_size), predicted)
    method.observe(index, passed, world.group_size, step)
    learner.train(index, passed, world.group_size)


def _figures(curve: list[tuple[int, float, Floats]], account: Account, num_rollouts: int) -> dict[str, Any]:
    rollouts = np.array([point[0] for point in curve], np.float64)
    tokens = np.array([point[1] for point in curve])
    accuracy_TD = np.stack([point[2] for point in curve])
    accuracy = accuracy_TD.mean(axis=1)
    at = np.linspace(FROM_ROLLOUTS, num_rollouts, 100)
    # What was paid before the first step shows the learner as it was.
    seen = np.interp(at, rollouts, accuracy, left=accuracy[0])
    reached = np.flatnonzero(accuracy >= TARGET)
    first = int(reached[0]) if len(reached) else None
    return {
        "auc": float(seen.mean()),
        "accuracy": float(accuracy[-1]),
        "effective_ratio": account.num_mixed / max(1, account.num_groups),
        "calibration_error": account.calibration_error,
        "worst_domain": float(accuracy_TD[-1].min()),
        "forgetting": float((accuracy_TD.max(axis=0) - accuracy_TD[-1]).mean()),
        "rollouts_to_target": None if first is None else float(rollouts[first]),
        "tokens_to_target": None if first is None else float(tokens[first]),
        "curve": [round(float(value), 4) for value in seen[::5]],
    }
