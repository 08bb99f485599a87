"""How much of what tells the rollouts of a group apart is their environment's chance. Pure, numpy alone.

G rollouts of a group, M replicas of each: replica r of every rollout has the same seed, so that chance which is common
to all of them moves no rollout past another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MeanSquares(NamedTuple):
    """Of a two-way layout without repetition."""

    rollouts: float
    """M times the variance of the rollouts' means."""
    residual: float
    """Variance that neither rollout nor replica explains: what moves one rollout past another by chance."""


def mean_squares(scores_GM: NDArray[np.float64]) -> MeanSquares:
    """The mean squares of scores [G, M] by rollout and by residual.

    MS_rollouts = M sum_g (s_g. - s..)^2 / (G - 1)
    MS_residual = sum_gm (s_gm - s_g. - s_.m + s..)^2 / ((G - 1)(M - 1))    (Fisher 1925; Scheffe 1959, chapter 4)

    Their expectations are var_e + M var_q and var_e, with var_q the variance of what the policy did and var_e that of
    chance not common to all. Raises ValueError for fewer than 2 rollouts or replicas.
    """
    num_rollouts, num_replicas = scores_GM.shape
    if num_rollouts < 2 or num_replicas < 2:
        raise ValueError(f"scores of {num_rollouts} rollouts x {num_replicas} replicas: needs at least 2 of both")
    mean_G, mean_M, mean = scores_GM.mean(axis=1), scores_GM.mean(axis=0), scores_GM.mean()
    residual_GM = scores_GM - mean_G[:, None] - mean_M[None, :] + mean
    return MeanSquares(
        rollouts=float(num_replicas * ((mean_G - mean) ** 2).sum() / (num_rollouts - 1)),
        residual=float((residual_GM**2).sum() / ((num_rollouts - 1) * (num_replicas - 1))),
    )


def noise_share(total: MeanSquares) -> float:
    """Share of the variance between the rollouts' scores that is chance: MS_residual / MS_rollouts, at most 1.

    The score of a rollout is the mean over its replicas, whose variance within a group is MS_rollouts / M, and the part
    of it that is chance MS_residual / M. 0 where nothing differs.
    """
    if total.rollouts <= 0.0:
        return 1.0 if total.residual > 0.0 else 0.0
    return min(1.0, total.residual / total.rollouts)


def wrong_order_share(gap: float, *, noise_std: float, common: float, num_replicas: int = 1) -> float:
    """How often two rollouts whose expected scores are `gap` apart stand in the wrong order by normal noise.

    Phi(-gap / (noise_std sqrt(2 (1 - common) / M))), with `common` the share of the noise's variance that both have in
    common: 0 where each has a seed of its own, 1 where one seed decides all of it. 0 where no noise is left.
    """
    spread = noise_std * math.sqrt(2 * (1 - common) / num_replicas)
    return 0.0 if spread == 0.0 else 0.5 * math.erfc(gap / spread / math.sqrt(2))
