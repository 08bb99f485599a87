"""An item-response model whose ability moves with the policy, learned group by group.

Of problem x at policy step t, with phi_x its features (1, its domain, its numbers):

    logit p_x(t) = z_x(t) = phi_x . m(t) + beta_x(t),    m ~ N(m, C) shared by all problems,  beta_x ~ N(mu_x, s_x^2)
    drift:       m(t + d) = m(t) + N(0, Q d),            beta_x(t + d) = beta_x(t) + N(0, q d), held below own_variance

A group of n scored rollouts with k passes at step v <= t shows k ~ Bin(n, sigmoid(z_v)). Seen from the present, z_v is
z_x(t) and noise of variance D = (phi . Q phi + q)(t - v): a group that comes late says less. With S = phi . C phi + s^2
the variance of z_x(t), T = S + D that of z_v and z_0 = phi . m + mu their mean, Laplace's approximation of the
posterior of z_v is

    z* = argmax k log sigmoid(z) + (n - k) log sigmoid(-z) - (z - z_0)^2 / (2 T),   T* = 1 / (1/T + n p* (1 - p*))

Everything else is jointly normal with z_v, so its posterior follows by regression on it (the Kalman update; Minka 2001,
"A family of algorithms for approximate Bayesian inference", 3.2, for the one-dimensional projection):

    m  += C phi (z* - z_0) / T        C   -= C phi phi^T C (1 - T* / T) / T
    mu += s^2   (z* - z_0) / T        s^2 -= s^4           (1 - T* / T) / T

Only the correlation of beta_x with m after the update is dropped: so the state is two numbers a problem and one small
matrix. Graded rewards enter as k = their sum, a quasi-likelihood. One group thus moves all problems that share
something with it, those not visited lately and those never seen among them. Rasch 1960 for the model; Glickman 1999,
"Parameter estimation in large dynamic paired comparison experiments", for one-step updates of moving abilities.

Pure numpy. P: problems; K: domains; X: numbers; F = 1 + K + X: features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from curator.estimators.belief import LogitNormal
from curator.estimators.features import Features

MAX_NEWTON_STEPS, MAX_NEWTON_MOVE = 12, 1.5
_CONVERGED = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Variances of logits: what is believed before the first group, and how fast it moves, per policy step."""

    bias_variance: float = 4.0
    domain_variance: float = 1.5
    number_variance: float = 1.5
    own_variance: float = 3.0
    """Of what is a problem's own; it never grows beyond this."""
    shared_drift: float = 4e-3
    """Of the bias and of each domain."""
    number_drift: float = 2e-4
    own_drift: float = 1e-2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value}: a variance is finite and not negative")


class ItemResponse:
    """The model's state: a fold over observations, two numbers a problem and one small covariance."""

    folded = ("_mean_F", "_covariance_FF", "_own_mean_P", "_own_variance_P", "_step_P", "_now")

    def __init__(self, features: Features, prior: Prior = Prior()) -> None:
        num_problems, num_domains = len(features.domain_P), features.num_domains
        num_numbers = features.number_PX.shape[1]
        self._features, self._prior = features, prior
        self._first_number = 1 + num_domains
        sizes = (1, num_domains, num_numbers)
        self._mean_F = np.zeros(sum(sizes))
        self._mean_F[0] = features.expected_bias
        if features.expected_weight_X is not None:
            self._mean_F[self._first_number :] = features.expected_weight_X
        variances = (prior.bias_variance, prior.domain_variance, prior.number_variance)
        self._covariance_FF = np.diag(np.repeat(np.array(variances, np.float64), sizes))
        self._drift_F = np.repeat(np.array([prior.shared_drift, prior.shared_drift, prior.number_drift]), sizes)
        self._own_mean_P = np.zeros(num_problems)
        self._own_variance_P = np.full(num_problems, prior.own_variance)
        self._step_P = np.zeros(num_problems)
        """Step to which a problem's own variance has grown."""
        self._now: float | None = None
        self._diagonal_F = self._covariance_FF.reshape(-1)[:: sum(sizes) + 1]
        """The covariance's diagonal, in place."""
        self._change_FF = np.empty_like(self._covariance_FF)

    def observe(self, index: int, num_passed: float, num_scored: int, step: float) -> None:
        """See Estimator."""
        self.advance(step)
        assert self._now is not None
        phi_F = self._features_of(index)
        own_variance = self._own_variance(index)
        gain_F = self._covariance_FF @ phi_F
        drift = float(self._drift_F @ np.square(phi_F)) + self._prior.own_drift
        spread = float(gain_F @ phi_F) + own_variance + drift * (self._now - step)
        if spread <= 0:
            return
        start = float(self._mean_F @ phi_F) + float(self._own_mean_P[index])
        mode, posterior = laplace(num_passed, num_scored, mean=start, variance=spread)
        moved, shrunk = (mode - start) / spread, max(0.0, 1.0 - posterior / spread) / spread
        self._mean_F += moved * gain_F
        # Both factors alike, so that the covariance stays symmetric to the bit.
        root_F = math.sqrt(shrunk) * gain_F
        self._covariance_FF -= np.multiply.outer(root_F, root_F, out=self._change_FF)
        self._own_mean_P[index] += moved * own_variance
        self._own_variance_P[index] = own_variance - shrunk * own_variance**2
        self._step_P[index] = self._now

    def _features_of(self, index: int) -> NDArray[np.float64]:
        phi_F = np.zeros(len(self._mean_F))
        phi_F[0] = phi_F[1 + self._features.domain_P[index]] = 1.0
        phi_F[self._first_number :] = self._features.number_PX[index]
        return phi_F

    def advance(self, step: float) -> None:
        """See Estimator."""
        if self._now is None:
            self._now = step
            self._step_P.fill(step)
        elif step > self._now:
            self._diagonal_F += self._drift_F * (step - self._now)
            self._now = step

    def _own_variance(self, index: int) -> float:
        assert self._now is not None
        grown = self._own_variance_P[index] + self._prior.own_drift * (self._now - self._step_P[index])
        return min(float(grown), self._prior.own_variance)

    def predict(self, index_P: NDArray[np.int64] | None = None) -> LogitNormal:
        """See Estimator."""
        return self._belief(index_P, with_own=True)

    def predict_from_others(self, index_P: NDArray[np.int64] | None = None) -> LogitNormal:
        """What features alone say, as of a problem never sampled: neighbours, domain, offline rates."""
        return self._belief(index_P, with_own=False)

    def _belief(self, index_P: NDArray[np.int64] | None, *, with_own: bool) -> LogitNormal:
        chosen = slice(None) if index_P is None else index_P
        first, domain_P = self._first_number, 1 + self._features.domain_P[chosen]
        number_PX = self._features.number_PX[chosen]
        mean_F, covariance_FF = self._mean_F, self._covariance_FF
        logit_P = mean_F[0] + mean_F[domain_P] + number_PX @ mean_F[first:].astype(np.float32)
        # phi . C phi by blocks: what depends on the domain alone, its products with the numbers, the numbers alone.
        alone_F = covariance_FF[0, 0] + 2 * covariance_FF[0] + self._diagonal_F
        crossed_FX = (2 * (covariance_FF[0, first:] + covariance_FF[:, first:])).astype(np.float32)
        within_XX = covariance_FF[first:, first:].astype(np.float32)
        quadratic_P = np.einsum("px,px->p", number_PX @ within_XX + crossed_FX[domain_P], number_PX)
        variance_P = np.maximum(alone_F[domain_P] + quadratic_P, 0.0)
        if not with_own:
            return LogitNormal(logit_P.astype(np.float64), variance_P + self._prior.own_variance)
        elapsed_P = 0.0 if self._now is None else self._now - self._step_P[chosen]
        grown_P = self._own_variance_P[chosen] + self._prior.own_drift * elapsed_P
        own_variance_P = np.minimum(grown_P, self._prior.own_variance)
        return LogitNormal(logit_P + self._own_mean_P[chosen], variance_P + own_variance_P)


def laplace(num_passed: float, num_scored: float, *, mean: float, variance: float) -> tuple[float, float]:
    """Mode and variance of z after k passes of n, each with probability sigmoid(z), where z ~ N(mean, variance).

    z* = argmax k log sigmoid(z) + (n - k) log sigmoid(-z) - (z - mean)^2 / (2 variance), by Newton's steps of bounded
    length: the log density is concave. The variance is the inverse of its curvature there.
    """
    z = mean
    for _ in range(MAX_NEWTON_STEPS):
        p = _sigmoid(z)
        gradient = num_passed - num_scored * p - (z - mean) / variance
        move = gradient / (num_scored * p * (1.0 - p) + 1.0 / variance)
        z += max(-MAX_NEWTON_MOVE, min(MAX_NEWTON_MOVE, move))
        if abs(move) < _CONVERGED:
            break
    p = _sigmoid(z)
    return z, 1.0 / (1.0 / variance + num_scored * p * (1.0 - p))


def _sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else 1.0 - 1.0 / (1.0 + math.exp(z))
