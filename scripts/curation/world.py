"""A learner that is simulated: problems of hidden difficulty, skills that grow from mixed groups, and nothing else.

    p_x = c + (1 - c) link(1.7 (a_x . theta + d_x - b_x))

a_x: which of K skills a problem asks for (few, summing to 1); b_x: its difficulty, from its domain, its cluster and
itself; 5% are out of reach. d_x: what is remembered of the problem itself, seen in training alone, fading. A group of
G rollouts has k ~ Bin(G, p_x) passes at the skills of `lag` steps ago. A step adds the leave-one-out gradients of the
batch, each k (G - k) / (G (G - 1)) 1.7 a_x, to noise in NUISANCE other directions whose variance goes with the squared
advantages, and moves a fixed distance along the sum: progress is limited by signal over noise. Skills decay slowly.
No language model has this form; which method is better by little here says little.

N: problems; K: skills; V: numbers of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_SKILLS, NUM_DOMAINS, NUM_CLUSTERS, NUM_TEST, VECTOR = 8, 8, 60, 1000, 16
NUISANCE, NOISE = 200, 1.5
STEP_SIZE, DECAY, MEMORY_GAIN, MEMORY_KEPT = 0.05, 1e-3, 0.6, 0.98
SLOPE = 1.7


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Which world; the variations are each of one field."""

    num_problems: int = 2000
    lag: int = 4
    group_size: int = 8
    batch: int = 64
    link: Literal["logistic", "cauchy"] = "logistic"
    guessing: float = 0.0
    """Pass rate without any skill."""
    jumps: float = 0.0
    """Probability, per problem and step, that its difficulty changes."""
    wrong_domains: float = 0.0
    """Share of problems labelled with a domain drawn at random."""
    verifier_noise: float = 0.0
    """Share of rewards that are turned round."""
    useless_vectors: bool = False


WORLDS = {
    **{f"{n // 1000}k_lag{lag}": World(num_problems=n, lag=lag) for n in (2000, 12000) for lag in (4, 16)},
    "100k": World(num_problems=100_000),
    "link": World(link="cauchy"),
    "guessing": World(guessing=0.2),
    "jumps": World(jumps=0.002),
    "wrong_domains": World(wrong_domains=0.6),
    "lag64": World(lag=64),
    "verifier_noise": World(verifier_noise=0.05),
    "useless_vectors": World(useless_vectors=True),
}
CORE = ("2k_lag4", "2k_lag16", "12k_lag4", "12k_lag16")
VARIATIONS = ("link", "guessing", "jumps", "wrong_domains", "lag64", "verifier_noise", "useless_vectors")


class Learner:
    """Problems and the skills that they train, from one seed: the same problems for every method."""

    def __init__(self, world: World, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self.world = world
        self._domain_skills_DK = rng.dirichlet(np.full(NUM_SKILLS, 0.3), NUM_DOMAINS)
        self._domain_level_D = rng.permutation(np.linspace(-0.5, 3.0, NUM_DOMAINS))
        self._cluster_domain_C = np.arange(NUM_CLUSTERS) % NUM_DOMAINS
        self._cluster_level_C = 0.8 * rng.standard_normal(NUM_CLUSTERS)
        self._cluster_vector_CV = rng.standard_normal((NUM_CLUSTERS, VECTOR))
        train, test = self._problems(world.num_problems, rng), self._problems(NUM_TEST, rng)
        self.skills_NK, self.level_N, self.true_domain_N, self.vector_NV = train
        self._test_skills, self._test_level, self._test_domain, _ = test
        self._test_level = np.where(self._test_level > 50, 0.0, self._test_level)
        self.domain_N = self.true_domain_N.copy()
        is_wrong_N = rng.random(world.num_problems) < world.wrong_domains
        self.domain_N[is_wrong_N] = rng.integers(0, NUM_DOMAINS, is_wrong_N.sum())
        if world.useless_vectors:
            self.vector_NV = _unit(rng.standard_normal(self.vector_NV.shape))
        harder = np.minimum(self.level_N, 4.0)
        self.tokens_N = np.exp(5.0 + 0.2 * harder + 0.4 * rng.standard_normal(world.num_problems))
        """Tokens of one rollout."""
        self.theta_K = np.zeros(NUM_SKILLS)
        self._memory_N = np.zeros(world.num_problems)
        self._rng = np.random.default_rng([seed, 1])

    def _problems(self, num: int, rng: np.random.Generator) -> tuple[Floats, Floats, NDArray[np.int64], Floats]:
        cluster_N = rng.integers(0, NUM_CLUSTERS, num)
        domain_N = self._cluster_domain_C[cluster_N]
        own_NK = rng.dirichlet(np.full(NUM_SKILLS, 0.2), num)
        skills_NK = 0.6 * self._domain_skills_DK[domain_N] + 0.4 * own_NK
        level_N = self._domain_level_D[domain_N] + self._cluster_level_C[cluster_N] + 0.7 * rng.standard_normal(num)
        level_N[rng.random(num) < 0.05] = 100.0
        vectors = _unit(self._cluster_vector_CV[cluster_N] + 0.7 * rng.standard_normal((num, VECTOR)))
        return skills_NK, level_N, domain_N, vectors

    def pass_rate(self, index: NDArray[np.int64] | slice = slice(None)) -> Floats:
        """True pass rates of training problems at the present skills."""
        return self._rate(self.skills_NK[index] @ self.theta_K + self._memory_N[index] - self.level_N[index])

    def _rate(self, ability: Floats) -> Floats:
        z = SLOPE * ability
        rate = 0.5 + np.arctan(z) / np.pi if self.world.link == "cauchy" else 0.5 * (1.0 + np.tanh(0.5 * z))
        return self.world.guessing + (1.0 - self.world.guessing) * rate

    def offline_rates(self, num_rollouts: int) -> Floats:
        """Measured pass rates [N, 2] of two other models, a weak and a strong one."""
        rng = np.random.default_rng(self.world.num_problems)
        rates = [self._rate(self.skills_NK.sum(axis=1) * ability - self.level_N) for ability in (0.0, 2.5)]
        return np.stack([rng.binomial(num_rollouts, rate) / num_rollouts for rate in rates], axis=1)

    def sample(self, index: NDArray[np.int64], num: int) -> NDArray[np.int64]:
        """Passes, as the verifier sees them, of `num` rollouts of each of some problems."""
        rate = self.pass_rate(index)
        seen = rate + self.world.verifier_noise * (1.0 - 2.0 * rate)
        return self._rng.binomial(num, seen)

    def train(self, index: NDArray[np.int64], passed: NDArray[np.int64], num: int) -> None:
        """One step on a batch of groups of `num` rollouts."""
        variance = passed * (num - passed) / (num * (num - 1.0))
        gradient_K = SLOPE * variance @ self.skills_NK[index]
        # The sum of squared advantages of a group is num^2 / (num - 1) x its variance: noise of the mean over `num`.
        noise = NOISE * np.sqrt((variance / (num - 1.0)).sum()) * self._rng.standard_normal(NUISANCE)
        length = np.sqrt(gradient_K @ gradient_K + noise @ noise)
        if length > 0:
            self.theta_K = self.theta_K + STEP_SIZE * np.sqrt(NUM_SKILLS) * gradient_K / length
        self.theta_K = self.theta_K * (1.0 - DECAY)
        self._memory_N *= MEMORY_KEPT
        np.add.at(self._memory_N, index, MEMORY_GAIN * variance)
        if self.world.jumps:
            jumped = np.flatnonzero(self._rng.random(self.world.num_problems) < self.world.jumps)
            self.level_N[jumped] += self._rng.standard_normal(len(jumped))

    def accuracy_D(self) -> Floats:
        """Mean pass rate of held-out problems of each domain."""
        rate = self._rate(self._test_skills @ self.theta_K - self._test_level)
        return np.bincount(self._test_domain, rate) / np.bincount(self._test_domain)


def _unit(vectors: Floats) -> Floats:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def smaller(world: World, num_problems: int) -> World:
    """The same world with fewer problems, for tests."""
    return replace(world, num_problems=num_problems)
