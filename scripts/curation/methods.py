"""Ways of choosing problems, each as its source describes it, and the settings among which each is tuned.

A method is asked for problems, and told what their groups scored. `probability` of a mixed group is None where a method
predicts none. N: problems; B: groups asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from curation.world import Floats, Learner
from curator.chooser import MAX_CANDIDATES
from curator.difficulty import SlidingRate, expected_signal
from curator.estimators.features import Features, fourier, make_features
from curator.estimators.item_response import ItemResponse, Prior
from curator.estimators.value import VALUES, mixed_K
from curator.selection import Part, Shares, candidates, draw_parts, selection_parts, shared_parts
from curator.standing import retired

Indices = NDArray[np.int64]
Settings = Mapping[str, Any]


class Method:
    """Uniform choice, and the form of all others."""

    trials: ClassVar[tuple[Settings, ...]] = ({},)
    """Settings that are tried on seeds that are not reported."""
    screen = 0
    """Rollouts after which a group goes on only if its rewards differ; 0: all at once."""
    refills = False
    """Groups without signal are replaced until the batch is full."""
    offline_rollouts = 0
    """Of each problem and each of two models, before the first step."""

    def __init__(self, learner: Learner, seed: int, **settings: Any) -> None:
        self.rng = np.random.default_rng([seed, 2])
        self.num, self.group_size = learner.world.num_problems, learner.world.group_size
        self.num_in_flight = np.zeros(self.num, np.int64)
        self.learner = learner
        self.prepare(**settings)

    def prepare(self) -> None:
        """Make what is remembered."""

    def choose(self, num: int, step: int) -> Indices:
        """`num` problems, none in flight as long as there are others."""
        index = draw_parts(self.odds(step), num, self.rng)
        # A pool smaller than a batch is drawn from again.
        return np.resize(index, num)

    def odds(self, step: int) -> list[Part]:
        """How the next problems are drawn."""
        return selection_parts(np.ones(self.num), self.num_in_flight > 0, 0.0)

    def observe(self, index: Indices, passed: Indices, num: int, step: int) -> None:
        """Learn from groups of `num` rollouts each, sampled at `step`."""

    def mixed(self, index: Indices) -> Floats | None:
        """Predicted probability of a mixed group."""
        return None


class Dapo(Method):
    """Yu et al. 2025: uniform; groups without signal are replaced until the batch is full."""

    refills = True


class Speed(Method):
    """Zhang et al. 2025 (SPEED): 4 rollouts to screen, the others where the first differ; refilled."""

    trials = tuple({"screen": screen} for screen in range(2, 8))
    refills = True

    def prepare(self, screen: int = 4) -> None:
        """See Method."""
        self.screen = screen


class Greso(Method):
    """Zheng et al. 2025: skips a problem with probability 1 - p^z after z groups in a row without signal; refilled.

    p, of easy and of hard ones, is steered towards a share of groups without signal, a third easy and two thirds hard.
    """

    trials = tuple({"target": t, "change": c} for t in (0.15, 0.25, 0.4) for c in (0.01, 0.03))
    refills = True

    def prepare(self, target: float = 0.25, change: float = 0.01) -> None:
        """See Method."""
        self._targets, self._change = np.array([target / 3, target * 2 / 3]), change
        self._p = np.array([0.5, 0.5])
        self._run_N = np.zeros(self.num, np.int64)
        self._is_hard_N = np.zeros(self.num, np.int64)

    def odds(self, step: int) -> list[Part]:
        """See Method."""
        keep_N = np.maximum(self._p[self._is_hard_N] ** self._run_N, 0.01)
        return selection_parts(keep_N, self.num_in_flight > 0, 0.0)

    def observe(self, index: Indices, passed: Indices, num: int, step: int) -> None:
        """See Method."""
        is_easy, is_hard = passed == num, passed == 0
        self._run_N[index] = np.where(is_easy | is_hard, self._run_N[index] + 1, 0)
        self._is_hard_N[index] = is_hard
        too_many = np.array([is_easy.mean(), is_hard.mean()]) > self._targets
        self._p = np.clip(self._p + np.where(too_many, -self._change, self._change), 0.05, 0.95)


class Sliding(Method):
    """The sliding success rate with its domain, by expected signal: what the curator does by default."""

    trials = tuple({"rate_step": a, "sharpness": s} for a in (0.3, 0.6) for s in (1.0, 4.0, 8.0))

    def prepare(self, rate_step: float = 0.3, sharpness: float = 4.0) -> None:
        """See Method."""
        self._sharpness = sharpness
        self._rate = SlidingRate(self.learner.domain_N, rate_step=rate_step)

    def odds(self, step: int) -> list[Part]:
        """See Method."""
        signal = expected_signal(self._rate.rate_P, self.group_size)
        return selection_parts(signal, self.num_in_flight > 0, 0.05, self._sharpness)

    def observe(self, index: Indices, passed: Indices, num: int, step: int) -> None:
        """See Method."""
        for problem, k in zip(index.tolist(), passed.tolist(), strict=True):
            self._rate.observe(problem, k, num, step)

    def mixed(self, index: Indices) -> Floats | None:
        """See Method."""
        return np.asarray(expected_signal(self._rate.rate_P[index], self.group_size))


class Mopps(Method):
    """Qu et al. 2025 (MoPPS): Thompson draws of a discounted Beta; those nearest to 1/2 among random candidates."""

    trials = tuple({"keep": k, "pool": c} for k, c in ((0.1, 16), (0.3, 16), (0.5, 16), (0.8, 16), (0.3, 4), (0.3, 32)))

    def prepare(self, keep: float = 0.5, pool: int = 16) -> None:
        """See Method."""
        self._keep, self._pool = keep, pool
        self._a_N, self._b_N = np.ones(self.num), np.ones(self.num)

    def choose(self, num: int, step: int) -> Indices:
        """See Method."""
        free = np.flatnonzero(self.num_in_flight == 0)
        if len(free) < num:
            free = np.arange(self.num)
        among = self.rng.choice(free, min(len(free), self._pool * num), replace=False)
        rate = self.rng.beta(self._a_N[among], self._b_N[among])
        return among[np.argsort(np.square(rate - 0.5))[:num]]

    def observe(self, index: Indices, passed: Indices, num: int, step: int) -> None:
        """See Method."""
        for problem, k in zip(index.tolist(), passed.tolist(), strict=True):
            self._a_N[problem] = self._keep * self._a_N[problem] + (1 - self._keep) + k
            self._b_N[problem] = self._keep * self._b_N[problem] + (1 - self._keep) + num - k

    def mixed(self, index: Indices) -> Floats | None:
        """See Method."""
        return _beta_mixed(self._a_N[index], self._b_N[index], self.group_size)


class Bots(Mopps):
    """BOTS (2510.26374): as MoPPS over all problems, and those not sampled move by two models' offline rates."""

    trials = tuple({"forget": f, "mix": m} for f in (0.05, 0.1, 0.2) for m in (0.1, 0.3))
    offline_rollouts = 16

    def prepare(self, forget: float = 0.1, mix: float = 0.1) -> None:  # type: ignore[override]
        """See Method."""
        super().prepare(1.0, 10**9)
        self._forget, self._mix, self._ability = forget, mix, 0.0
        self._offline = self.learner.offline_rates(self.offline_rollouts)
        count = self._offline[:, 0] * self.offline_rollouts
        self._a_N, self._b_N = 1.0 + count, 1.0 + self.offline_rollouts - count

    def observe(self, index: Indices, passed: Indices, num: int, step: int) -> None:
        """See Method."""
        low, high = self._offline.T
        gap = high[index].mean() - low[index].mean()
        if gap > 1e-3:
            self._ability = 0.9 * self._ability + 0.1 * (passed.mean() / num - low[index].mean()) / gap
        expected_N = np.clip(low + self._ability * (high - low), 0.0, 1.0) * num
        seen_N, mix_N = np.zeros(self.num), np.ones(self.num)
        seen_N[index], mix_N[index] = passed, self._mix
        count_N = (1 - mix_N) * seen_N + mix_N * expected_N
        self._a_N += self._forget * (1.0 - self._a_N) + count_N
        self._b_N += self._forget * (1.0 - self._b_N) + num - count_N


class Joint(Method):
    """Ours: the item-response model that moves with the policy, and shares by expected worth."""

    trials = (
        {"doubt": 0.5},
        {"doubt": 0.0},
        {"doubt": 1.0},
        {"sharpness": 16.0},
        {"signal": "mixed"},
        {"own_drift": 0.03},
    )

    def prepare(
        self,
        signal: str = "centered",
        sharpness: float = 32.0,
        domain: float = 0.0,
        shared_drift: float = 4e-3,
        own_drift: float = 1e-2,
        own_variance: float = 3.0,
        floor: float = 0.005,
        unseen: float = 0.0,
        doubt: float = 0.5,
    ) -> None:
        """See Method."""
        prior = Prior(shared_drift=shared_drift, own_drift=own_drift, own_variance=own_variance)
        self._model = ItemResponse(self.features(), prior)
        self._value_K, self._mixed_K = VALUES[signal](self.group_size), mixed_K(self.group_size)
        self._shares = Shares(sharpness=sharpness, domain=domain, floor=floor, unseen=unseen)
        self._num_groups_N, self._doubt = np.zeros(self.num, np.int64), doubt

    def features(self) -> Features:
        """Domain and vector, as the pool's columns give them."""
        vectors = fourier(self.learner.vector_NV.astype(np.float32), 32)
        return make_features([str(domain) for domain in self.learner.domain_N], vector_PV=vectors)

    def choose(self, num: int, step: int) -> Indices:
        """See Method. Of a large pool each draw looks at a part, as the curator does."""
        index_C = candidates(self.num, MAX_CANDIDATES, self.rng)
        belief, num_groups_C = self._model.predict(index_C), self._num_groups_N[index_C]
        solved, hopeless = retired(belief, num_groups_C)
        value_C = belief.narrowed(self._doubt).group_value_P(self._value_K)
        worth_C = np.where(solved | hopeless, 0.0, value_C)
        domain_C, in_flight_C = self.learner.domain_N[index_C], self.num_in_flight[index_C] > 0
        parts = shared_parts(worth_C, in_flight_C, num_groups_C == 0, domain_C, self._shares)
        return np.resize(index_C[draw_parts(parts, num, self.rng)], num)

    def observe(self, index: Indices, passed: Indices, num: int, step: int) -> None:
        """See Method."""
        for problem, k in zip(index.tolist(), passed.tolist(), strict=True):
            self._model.observe(problem, k, num, float(step))
        self._num_groups_N[index] += 1

    def mixed(self, index: Indices) -> Floats | None:
        """See Method."""
        return self._model.predict(index).group_value_P(self._mixed_K)


class JointOffline(Joint):
    """Ours with the offline rates that BOTS has."""

    offline_rollouts = 16

    def features(self) -> Features:
        """See Joint."""
        vectors = fourier(self.learner.vector_NV.astype(np.float32), 32)
        rates = self.learner.offline_rates(self.offline_rollouts)
        domains = [str(domain) for domain in self.learner.domain_N]
        return make_features(domains, offline_rate_PA=rates, vector_PV=vectors)


class Oracle(Method):
    """Knows the true pass rates: probabilities by p (1 - p) to a power."""

    trials = tuple({"power": power} for power in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0))

    def prepare(self, power: float = 2.0) -> None:
        """See Method."""
        self._power = power

    def odds(self, step: int) -> list[Part]:
        """See Method."""
        rate = self.learner.pass_rate()
        return selection_parts(rate * (1.0 - rate), self.num_in_flight > 0, 0.02, self._power)

    def mixed(self, index: Indices) -> Floats | None:
        """See Method."""
        return np.asarray(expected_signal(self.learner.pass_rate(index), self.group_size))


METHODS: Mapping[str, tuple[type[Method], bool]] = {
    "uniform": (Method, True),
    "dapo": (Dapo, True),
    "greso": (Greso, True),
    "speed": (Speed, True),
    "sliding_rate": (Sliding, True),
    "mopps": (Mopps, True),
    "bots_free": (Bots, False),
    "bots_charged": (Bots, True),
    "ours": (Joint, True),
    "ours_offline_free": (JointOffline, False),
    "oracle": (Oracle, True),
}
"""By name: the class, and whether its offline rollouts are charged."""


def _beta_mixed(a: Floats, b: Floats, group_size: int) -> Floats:
    all_pass, none = np.ones_like(a), np.ones_like(b)
    for k in range(group_size):
        all_pass, none = all_pass * (a + k) / (a + b + k), none * (b + k) / (a + b + k)
    return 1.0 - all_pass - none
