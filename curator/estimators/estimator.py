"""What every estimator does: take what groups scored, in order, and say what is believed of each problem now."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from curator.estimators.belief import Belief


class Estimator(Protocol):
    """A fold over observations: the same ones in the same order give the same state, bit for bit.

    A problem is known by its index. A step is a policy version as a number that need not be whole: of a group of
    several versions, their token-weighted mean. The present is the newest step seen.
    """

    @property
    def folded(self) -> tuple[str, ...]:
        """Attributes that hold its state, see `snapshot`."""

    def observe(self, index: int, num_passed: float, num_scored: int, step: float) -> None:
        """Learn that `num_scored` rollouts of the policy at `step` have `num_passed` passes, or a sum of graded
        rewards between 0 and `num_scored`. An unscored rollout is in neither number; `num_scored` is at least 1."""

    def predict(self, index_P: NDArray[np.int64] | None = None) -> Belief:
        """Pass rates of the present policy, of some problems or of all."""

    def advance(self, step: float) -> None:
        """The policy has come to `step`, and no group has shown it yet: what is known is that much older."""
