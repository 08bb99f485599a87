"""Estimators against slow loops and dense algebra: memory, drift, late groups, problems never seen."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from curator.estimators.features import Features, fourier, make_features
from curator.estimators.item_response import ItemResponse, Prior, laplace
from curator.estimators.memory import DiscountedBeta, LastMean
from curator.estimators.scored import rates_of_counts
from curator.estimators.value import mixed_K

PRIOR = Prior(bias_variance=2.0, number_variance=0.7, own_variance=0.8, shared_drift=0.02, number_drift=0.01)


def make_world(num_problems: int = 12, num_numbers: int = 3, seed: int = 0) -> Features:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((num_problems, num_numbers)).astype(np.float32)
    return Features(rng.integers(0, 3, num_problems), numbers, np.zeros(num_numbers, np.bool_))


def make_groups(num_problems: int, num: int, seed: int = 1) -> list[tuple[int, int, int, float]]:
    """(problem, passes, scored, step); some come late."""
    rng = np.random.default_rng(seed)
    steps = np.maximum(0, np.arange(num) * 0.5 - rng.integers(0, 4, num))
    return [(int(rng.integers(num_problems)), int(rng.integers(5)), 4, float(step)) for step in steps]


def test_the_last_mean_is_that_of_the_newest_policy() -> None:
    state = LastMean(2, unseen_rate=0.4)
    state.observe(0, 3, 4, step=5)
    state.observe(0, 0, 4, step=4)
    assert state.predict().mean_P.tolist() == [0.75, 0.4]
    with pytest.raises(ValueError, match="unseen_rate"):
        LastMean(1, unseen_rate=1.5)


def test_discounted_counts_equal_the_sum_over_all_groups() -> None:
    keep = 0.9
    groups = make_groups(4, 60)
    state = DiscountedBeta(4, keep=keep, prior_a=1.0, prior_b=2.0)
    for group in groups:
        state.observe(*group)
    now = max(step for *_, step in groups)
    belief = state.predict(np.array([2, 0]))
    for place, problem in enumerate((2, 0)):
        own = [group for group in groups if group[0] == problem]
        a = 1.0 + sum(keep ** (now - step) * passed for _, passed, _, step in own)
        b = 2.0 + sum(keep ** (now - step) * (scored - passed) for _, passed, scored, step in own)
        assert belief.a_P[place] == pytest.approx(a, rel=1e-12)
        assert belief.b_P[place] == pytest.approx(b, rel=1e-12)


def test_before_the_first_group_a_posterior_is_its_prior() -> None:
    assert DiscountedBeta(2).predict().mean_P.tolist() == [0.5, 0.5]
    for settings in ({"keep": 0.0}, {"prior_a": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            DiscountedBeta(2, **settings)


class Dense:
    """The model as one Gaussian over m and all beta, by dense matrices; their correlations are dropped each time."""

    def __init__(self, features: Features, prior: Prior) -> None:
        self.prior, self.now = prior, math.nan
        problems, domains = len(features.domain_P), features.num_domains
        one_hot = np.eye(domains)[features.domain_P]
        phi = np.concatenate([np.ones((problems, 1)), one_hot, features.number_PX.astype(np.float64)], axis=1)
        self.rows = np.concatenate([phi, np.eye(problems)], axis=1)
        numbers = features.number_PX.shape[1]
        sizes = (1, domains, numbers, problems)
        self.num_shared = 1 + domains + numbers
        variances = (prior.bias_variance, prior.domain_variance, prior.number_variance, prior.own_variance)
        drifts = (prior.shared_drift, prior.shared_drift, prior.number_drift, prior.own_drift)
        self.covariance = np.diag(np.repeat(variances, sizes))
        self.drift = np.repeat(drifts, sizes)
        self.mean = np.zeros(sum(sizes))

    def observe(self, index: int, passed: float, scored: int, step: float) -> None:
        if math.isnan(self.now):
            self.now = step
        if step > self.now:
            self.covariance += np.diag(self.drift) * (step - self.now)
            own = np.arange(self.num_shared, len(self.mean))
            self.covariance[own, own] = np.minimum(self.covariance[own, own], self.prior.own_variance)
            self.now = step
        row = self.rows[index]
        spread = row @ self.covariance @ row + (self.drift * row**2).sum() * (self.now - step)
        start = row @ self.mean
        z = start
        for _ in range(200):  # Gradient by bisection-free damped Newton steps, to the end.
            p = 1 / (1 + math.exp(-z))
            z += 0.5 * (passed - scored * p - (z - start) / spread) / (scored * p * (1 - p) + 1 / spread)
        p = 1 / (1 + math.exp(-z))
        after = 1 / (1 / spread + scored * p * (1 - p))
        gain = self.covariance @ row
        self.mean += gain * (z - start) / spread
        self.covariance -= np.outer(gain, gain) * (1 - after / spread) / spread
        shared = self.covariance[: self.num_shared, : self.num_shared].copy()
        self.covariance = np.diag(np.diag(self.covariance))
        self.covariance[: self.num_shared, : self.num_shared] = shared

    def logits(self) -> NDArray[np.float64]:
        return np.asarray(self.rows @ self.mean)

    def variances(self) -> NDArray[np.float64]:
        return np.asarray(np.einsum("pf,fg,pg->p", self.rows, self.covariance, self.rows))


def test_the_model_equals_dense_algebra_with_drift_and_late_groups() -> None:
    features = make_world()
    model, dense = ItemResponse(features, PRIOR), Dense(features, PRIOR)
    for group in make_groups(12, 80):
        model.observe(*group)
        dense.observe(*group)
    belief = model.predict()
    # Numbers are float32 where all problems are predicted at once.
    np.testing.assert_allclose(belief.logit_P, dense.logits(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(belief.variance_P, dense.variances(), rtol=0, atol=2e-6)
    some = model.predict(np.array([7, 3]))
    np.testing.assert_allclose(some.logit_P, belief.logit_P[[7, 3]], rtol=1e-6)


@pytest.mark.parametrize(("passed", "scored"), [(0, 4), (2, 4), (8, 8), (2.5, 4)])
def test_laplace_is_near_the_exact_posterior(passed: float, scored: int) -> None:
    mean, variance = 0.5, 1.2
    z = np.linspace(-10, 10, 20_001)
    log_density = passed * z - scored * np.logaddexp(0, z) - (z - mean) ** 2 / (2 * variance)
    density = np.exp(log_density - log_density.max())
    exact = (z * density).sum() / density.sum()
    mode, spread = laplace(passed, scored, mean=mean, variance=variance)
    assert mode == pytest.approx(z[log_density.argmax()], abs=1e-3)
    # The mode is not the mean: the posterior of an unmixed group is skewed.
    assert mode == pytest.approx(exact, abs=0.2)
    assert spread == pytest.approx(((z - exact) ** 2 * density).sum() / density.sum(), rel=0.25)


def test_a_group_moves_the_problems_that_are_like_it_and_no_others_much() -> None:
    numbers = np.zeros((4, 0), np.float32)
    model = ItemResponse(Features(np.array([0, 0, 1, 1]), numbers, np.zeros(0, np.bool_)), Prior(bias_variance=0.01))
    for _ in range(5):
        model.observe(0, 8, 8, 0.0)
    own, sibling, other, _ = model.predict().mean_P
    assert own > sibling > 0.7
    assert other == pytest.approx(0.5, abs=0.02)
    assert model.predict_from_others().mean_P[0] == pytest.approx(sibling, abs=1e-6)


def test_a_late_group_says_less_and_one_of_long_ago_is_forgotten() -> None:
    def spread_after(step: float) -> float:
        model = ItemResponse(make_world(), PRIOR)
        model.observe(0, 2, 4, 100.0)
        model.observe(1, 2, 4, step)
        return float(model.predict().variance_P[1])

    assert spread_after(100.0) < spread_after(80.0) < spread_after(0.0)
    model = ItemResponse(make_world(), PRIOR)
    model.observe(0, 4, 4, 0.0)
    fresh = float(model.predict().variance_P[0])
    model.observe(1, 2, 4, 500.0)
    assert float(model.predict().variance_P[0]) > fresh


def test_a_graded_group_counts_the_sum_of_its_rewards() -> None:
    graded, passed = ItemResponse(make_world(), PRIOR), ItemResponse(make_world(), PRIOR)
    graded.observe(0, 2.0, 4, 0.0)
    passed.observe(0, 2, 4, 0.0)
    np.testing.assert_array_equal(graded.predict().logit_P, passed.predict().logit_P)


def test_a_fold_gives_the_same_bits_however_often_it_was_asked() -> None:
    first, second = ItemResponse(make_world(), PRIOR), ItemResponse(make_world(), PRIOR)
    for group in make_groups(12, 40):
        first.observe(*group)
        first.predict()
        second.observe(*group)
    np.testing.assert_array_equal(first.predict().logit_P, second.predict().logit_P)
    np.testing.assert_array_equal(first.predict().variance_P, second.predict().variance_P)


def test_offline_rates_and_missing_ones_become_numbers() -> None:
    features = make_features(["b", "a", "a"], offline_rate_PA=[0.0, 1.0, np.nan], num_characters_P=[3, 3, 3])
    # The more frequent domain first. (8 r + 1) / 10 is 0.1 and 0.9: logits that differ in sign, made -1 and 1.
    assert features.domain_P.tolist() == [1, 0, 0]
    np.testing.assert_allclose(features.number_PX[:, 0], 0.0)
    np.testing.assert_allclose(features.number_PX[:, 1], [-1, 1, 0], atol=1e-6)
    # Known or not: 1, 1, 0, made to mean 0 and deviation 1.
    np.testing.assert_allclose(features.number_PX[:, 2], [math.sqrt(0.5), math.sqrt(0.5), -math.sqrt(2)], rtol=1e-6)
    with pytest.raises(ValueError, match="offline pass rate"):
        make_features(["a"], offline_rate_PA=[1.5])
    with pytest.raises(ValueError, match="columns of 1"):
        make_features(["a"], num_characters_P=[1, 2])


def test_fourier_features_have_the_kernel_as_inner_product() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((6, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    features = fourier(vectors, 20_000)
    squares = ((vectors[:, None] - vectors[None]) ** 2).sum(-1)
    np.testing.assert_allclose(features @ features.T, np.exp(-squares / (2 * 0.7**2)), atol=0.05)


def test_counts_with_features_tell_of_problems_without_any() -> None:
    features = make_features(["easy"] * 20 + ["hard"] * 20)
    passed = np.array([8] * 19 + [0] + [1] * 19 + [0])
    scored = np.array([8] * 19 + [0] + [8] * 19 + [0])
    alone, joint = rates_of_counts(passed, scored), rates_of_counts(passed, scored, features)
    assert alone.mean_P[[19, 39]].tolist() == [0.5, 0.5]
    easy, hard = joint.mean_P[[19, 39]]
    assert easy > 0.85
    assert hard < 0.25
    assert joint.group_value_P(mixed_K(8))[38] > joint.group_value_P(mixed_K(8))[0]
    assert joint.quantile_P(0.05)[38] < 1 / 8 < joint.quantile_P(0.95)[38]


def test_before_any_group_problems_are_as_hard_as_for_the_weakest_of_the_offline_models() -> None:
    rates = np.array([[0.25, 0.75], [0.5, 0.75], [0.75, 0.75]])
    belief = ItemResponse(make_features(["a"] * 3, offline_rate_PA=rates)).predict()
    # With n = 8 rollouts 1/4 is 3/10 and 3/4 is 7/10, whose logits are -l and l, l = ln 7/3. The first model is the
    # weaker one, with the mean logit 0; the models' deviations from their means are -l, 0, l and 0, 0, 0.
    half = math.log(7 / 3) / 2
    np.testing.assert_allclose(belief.logit_P, [-half, 0.0, half], atol=1e-6)
    # One without a rate is expected to be as the others are on average.
    belief = ItemResponse(make_features(["a"] * 3, offline_rate_PA=[0.25, np.nan, 1.0])).predict()
    np.testing.assert_allclose(belief.logit_P[1], (math.log(3 / 7) + math.log(9)) / 2, atol=1e-6)
