"""What became of the trajectories of a sampler, in all: ends, success, steps, calls, recovery, chance. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_grpo.environments.noise import MeanSquares, mean_squares, noise_share
from stream_grpo.environments.outcome import PREFIX, REPLICA
from stream_grpo.types import EndReason, Rollout, RolloutGroup


class Tallies:
    """Counts whole groups; written by one thread, read by any."""

    def __init__(self) -> None:
        self._ends: Counter[str] = Counter()
        self._num_groups = self._num_consistent = 0
        self._num_branching = self._sum_of_turns = self._num_tokens = self._num_trunk_tokens = 0
        self._num_steps = self._num_calls = 0
        self._tokens_of_successes = self._calls_of_successes = 0
        self._num_with_errors = self._num_recovered = 0
        self._squares = MeanSquares(0.0, 0.0)

    def add(self, group: RolloutGroup) -> None:
        """Count a finished group; one that was refused or was never sampled has no trajectory."""
        rollouts = [rollout for rollout in group.rollouts if rollout.end_reason is not EndReason.ERROR]
        for rollout in rollouts:
            self._add(rollout, group.num_trunk_tokens)
        ends = {rollout.end_reason for rollout in rollouts if rollout.valid}
        if ends:
            self._num_groups += 1
            self._num_consistent += ends == {EndReason.SUCCESS}
            self._add_trunk(group)
        scores = [_replicas(rollout.reward.components) for rollout in rollouts if rollout.valid]
        if len(scores) >= 2 and len(scores[0]) >= 2 and len({len(row) for row in scores}) == 1:
            found = mean_squares(np.array(scores, np.float64))
            self._squares = MeanSquares(*(a + b for a, b in zip(self._squares, found, strict=True)))

    def _add_trunk(self, group: RolloutGroup) -> None:
        self._num_tokens += group.num_sampled_tokens
        self._num_trunk_tokens += group.num_trunk_tokens
        turns = [int(rollout.turn[trunk].max()) for rollout in group.rollouts if (trunk := _trunk(rollout)).any()]
        if turns:
            self._num_branching += 1
            self._sum_of_turns += turns[0] + 2  # that after the trunk's last, from 1

    def _add(self, rollout: Rollout, num_trunk_tokens: int) -> None:
        self._ends[rollout.end_reason.value] += 1
        components = rollout.reward.components
        num_calls = sum(int(n) for name, n in components.items() if name.startswith(f"{PREFIX}calls."))
        has_errors = components.get(f"{PREFIX}errors", 0.0) > 0
        self._num_steps += int(components.get(f"{PREFIX}steps", 0.0))
        self._num_calls += num_calls
        self._num_with_errors += has_errors
        if rollout.end_reason is EndReason.SUCCESS:
            # The whole history, as calls and costs are: a trunk is part of every trajectory that goes on from it.
            self._tokens_of_successes += num_trunk_tokens + rollout.num_target_tokens
            self._calls_of_successes += num_calls
            self._num_recovered += has_errors

    def as_fields(self) -> dict[str, Any]:
        """Fields of a status; a share of nothing is None."""
        ends = dict(self._ends)
        num, num_env_errors = sum(ends.values()), ends.get(EndReason.ENV_ERROR.value, 0)
        num_valid = num - num_env_errors - ends.get(EndReason.MODEL_TIMEOUT.value, 0)
        num_successes = ends.get(EndReason.SUCCESS.value, 0)
        return {
            "num_trajectories": num,
            "ends": ends,
            "success_share": _share(num_successes, num_valid),
            "consistent_share": _share(self._num_consistent, self._num_groups),
            "env_error_share": _share(num_env_errors, num),
            "steps_mean": _share(self._num_steps, num),
            "calls_mean": _share(self._num_calls, num),
            "tokens_per_success": _share(self._tokens_of_successes, num_successes),
            "calls_per_success": _share(self._calls_of_successes, num_successes),
            "recovery_share": _share(self._num_recovered, self._num_with_errors),
            "branching_share": _share(self._num_branching, self._num_groups),
            "decision_turn_mean": _share(self._sum_of_turns, self._num_branching),
            "trunk_token_share": _share(self._num_trunk_tokens, self._num_tokens),
            "noise_share": noise_share(self._squares) if any(self._squares) else None,
        }


def _trunk(rollout: Rollout) -> NDArray[np.bool_]:
    """[T] what it sampled for all of its group, and is not trained."""
    return rollout.is_sampled & ~rollout.loss_mask


def _replicas(components: Mapping[str, float]) -> list[float]:
    numbers = sorted(int(name.removeprefix(REPLICA)) for name in components if name.startswith(REPLICA))
    return [components[f"{REPLICA}{number}"] for number in numbers]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
