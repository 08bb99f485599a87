"""Advantages by a critic and its loss against slow loops and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.gae import STD_FLOOR, explained_variance, gae, value_loss, whitening

NAN = float("nan")
Row = tuple[float, list[tuple[float, bool]]]
"""The reward of a sequence, and of each token its value and whether it is trained."""

rows = st.integers(1, 7).flatmap(
    lambda num_tokens: st.lists(
        st.tuples(
            st.floats(-3, 3),
            st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=num_tokens, max_size=num_tokens),
        ),
        min_size=1,
        max_size=4,
    )
)
share = st.sampled_from([0.25, 0.9, 1.0])


def float64(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slow_gae(row: Row, gamma: float, lambda_: float) -> list[float]:
    """The double sum of the paper over the trained tokens of one sequence; 0 elsewhere."""
    reward, tokens = row
    places = [t for t, (_, is_trained) in enumerate(tokens) if is_trained]
    values = [tokens[t][0] for t in places] + [0.0]
    rewards = [0.0] * (len(places) - 1) + [reward]
    result = [0.0] * len(tokens)
    for i, t in enumerate(places):
        result[t] = math.fsum(
            (gamma * lambda_) ** k * (rewards[i + k] + gamma * values[i + k + 1] - values[i + k])
            for k in range(len(places) - i)
        )
    return result


@given(rows, share, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_is_the_sum_of_the_paper(batch: list[Row], gamma: float, lambda_: float) -> None:
    mask_BT = torch.tensor([[is_trained for _, is_trained in tokens] for _, tokens in batch])
    # What lies under the mask is never looked at.
    value_BT = float64([[value if is_trained else NAN for value, is_trained in tokens] for _, tokens in batch])
    reward_B = torch.tensor([reward for reward, _ in batch], dtype=torch.float64)
    found = gae(reward_B, value_BT, mask_BT, gamma=gamma, lambda_=lambda_)
    expected_BT = float64([slow_gae(row, gamma, lambda_) for row in batch])
    assert torch.allclose(found.advantage_BT, expected_BT, rtol=1e-12, atol=1e-12)
    returns_BT = torch.where(mask_BT, expected_BT + value_BT, 0.0)
    assert torch.allclose(found.return_BT, returns_BT, rtol=1e-12, atol=1e-12)


def test_gae_by_hand() -> None:
    # Prompt, two trained tokens, one of context, a last trained one; reward 1, gamma 1/2, lambda 1/2.
    # Values 0.5, 1, 2 of the trained. Deltas from the end: 1 + 0 - 2 = -1; 0 + 2/2 - 1 = 0; 0 + 1/2 - 0.5 = 0.
    # Advantages: -1; 0 + 1/4 x -1 = -0.25; 0 + 1/4 x -0.25 = -0.0625. Returns: 1, 0.75, 0.4375.
    found = gae(
        torch.tensor([1.0], dtype=torch.float64),
        float64([[9.0, 0.5, 1.0, 9.0, 2.0]]),
        torch.tensor([[False, True, True, False, True]]),
        gamma=0.5,
        lambda_=0.5,
    )
    assert found.advantage_BT.tolist() == [[0.0, -0.0625, -0.25, 0.0, -1.0]]
    assert found.return_BT.tolist() == [[0.0, 0.4375, 0.75, 0.0, 1.0]]


def test_with_gamma_and_lambda_of_1_it_is_the_reward_less_the_value() -> None:
    value_BT = float64([[0.2, 0.4, 0.9], [0.0, 0.3, 0.1]])
    found = gae(torch.tensor([1.0, 0.0]), value_BT, torch.ones(2, 3, dtype=torch.bool), gamma=1.0, lambda_=1.0)
    assert torch.allclose(found.advantage_BT, float64([[1.0], [0.0]]) - value_BT, rtol=1e-12, atol=1e-12)
    assert torch.allclose(found.return_BT, float64([[1.0] * 3, [0.0] * 3]), rtol=1e-12, atol=1e-12)


def test_a_reward_for_each_sequence_is_asked_for() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        gae(torch.zeros(3), torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool), gamma=1.0, lambda_=1.0)


@given(
    st.lists(st.tuples(*[st.floats(-2, 2)] * 3, st.booleans()), min_size=1, max_size=8),
    st.sampled_from([None, 0.2, 1.0]),
)
def test_the_value_loss_and_its_gradient_are_those_of_a_loop(
    tokens: list[tuple[float, float, float, bool]], clip: float | None
) -> None:
    loss, gradient, num_clipped = 0.0, [0.0] * len(tokens), 0
    for t, (value, start, target, is_trained) in enumerate(tokens):
        if not is_trained:
            continue
        moved = value - start
        near = value if clip is None or abs(moved) <= clip else start + min(max(moved, -clip), clip)
        free, clipped = (value - target) ** 2, (near - target) ** 2
        loss += max(free, clipped) / 2
        num_clipped += clipped > free
        gradient[t] = 0.0 if clipped > free else value - target
    value_BT = float64([[value if is_trained else NAN for value, _, _, is_trained in tokens]]).requires_grad_()
    start_BT, return_BT = (float64([[token[i] for token in tokens]]) for i in (1, 2))
    mask_BT = torch.tensor([[is_trained for *_, is_trained in tokens]])
    found = value_loss(value_BT, start_BT, return_BT, mask_BT, denominator=5, clip=clip)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert float(found.loss.detach()) == pytest.approx(loss / 5, rel=1e-12, abs=1e-15)
    assert int(found.num_clipped) == num_clipped
    assert value_BT.grad is not None
    near_kink = [abs(abs(v - s) - (clip or 9.0)) < 1e-9 for v, s, _, _ in tokens]
    for t, expected in enumerate(gradient):
        assert near_kink[t] or float(value_BT.grad[0, t]) == pytest.approx(expected / 5, rel=1e-12, abs=1e-15)


def test_whitened_advantages_have_mean_0_and_a_spread_of_1_unless_they_hardly_differ() -> None:
    # 1, 3: mean 2, variance ((-1)^2 + 1^2) / 2 = 1.
    assert whitening(torch.tensor([1.0, 3.0], dtype=torch.float64)) == (2.0, 1.0)
    assert whitening(torch.full((4,), 0.3, dtype=torch.float64)) == (pytest.approx(0.3), STD_FLOOR)
    assert whitening(torch.zeros(0)) == (0.0, 1.0)


def test_explained_variance_is_1_of_a_critic_that_knows_and_0_of_a_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 0.7, dtype=torch.float64), returns) == 0.0
    # Off by -1/2, 0, 0, 1/2: variance 1/8 of the returns' 1/4.
    half = torch.tensor([0.5, 1.0, 1.0, -0.5], dtype=torch.float64)
    assert explained_variance(half, returns) == 0.5
    assert explained_variance(returns, torch.ones(4, dtype=torch.float64)) is None
