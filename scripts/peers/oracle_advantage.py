"""The slow oracle of the advantages, rollout by rollout in plain floats. A flag does one thing as a peer does it."""

from __future__ import annotations

import math

import torch

from peers.batch import GROUP_SIZE, Batch, Result
from peers.oracle import Flags


def advantage(
    batch: Batch, *, baseline: str, scale: str = "none", group: str = "drawn", only_valid: bool, flags: Flags
) -> Result:
    """(r - baseline) / sample std, rollout by rollout; 0 for invalid and lone ones."""
    rewards, valid = batch.rewards_B.tolist(), batch.valid_B.tolist() if only_valid else [True] * len(batch.valid_B)
    groups = batch.group_B.tolist() if group == "drawn" else [i // GROUP_SIZE for i in range(len(rewards))]
    result: list[float] = []
    for i in range(len(rewards)):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        if not valid[i]:
            result.append(0.0)
            continue
        if len(members) < 2:
            result.append(rewards[i] if "lone_rollout_keeps_reward" in flags else 0.0)
            continue
        mean = sum(rewards[j] for j in members) / len(members)
        others = [rewards[j] for j in members if j != i]
        deviation = rewards[i] - (sum(others) / len(others) if baseline == "leave_one_out" else mean)
        result.append(_scaled(deviation, [rewards[j] for j in members], flags) if scale == "group_std" else deviation)
    if scale == "batch_reward_std":
        pool = [r for r, is_valid in zip(rewards, valid, strict=True) if is_valid]
        result = [_scaled(x, pool, flags) for x in result]
    if scale == "batch_std":
        result = _whitened(batch, result, flags)
    return Result(0.0, torch.tensor(result, dtype=torch.float64))


def _scaled(deviation: float, pool: list[float], flags: Flags) -> float:
    """deviation / std of the pool, 0 / 0 = 0; peers add an epsilon to the std."""
    std = _sample_std(pool)
    for flag, epsilon in (("std_plus_1e_4", 1e-4), ("std_plus_1e_6", 1e-6)):
        if flag in flags:
            return deviation / (std + epsilon)
    return deviation / std if std > 1e-12 else 0.0


def _whitened(batch: Batch, deviations: list[float], flags: Flags) -> list[float]:
    """Over the spread of the batch's deviations, each counted once; verl counts it once a token and centers again."""
    if "token_whitening" not in flags:
        std = _sample_std(deviations)
        return [x / std if std > 1e-12 else 0.0 for x in deviations]
    lengths = batch.length_B.tolist()
    pool = [x for x, n in zip(deviations, lengths, strict=True) for _ in range(n)]
    mean, std = sum(pool) / len(pool), math.sqrt(_sample_std(pool) ** 2 + 1e-8)
    return [(x - mean) / std for x in deviations]


def _sample_std(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
