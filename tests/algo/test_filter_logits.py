"""The learner's support against a slow loop over one token's vocabulary, and against vLLM's own filters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stream_grpo.algo.filter_logits import filter_logits

LOGITS = st.lists(st.floats(-6, 6, width=32), min_size=1, max_size=9, unique=True)


def slow_support(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that can be sampled: min-p of the whole, then top-k, then top-p of what is left, renormalised."""
    total = sum(math.exp(x) for x in logits)
    probs = [math.exp(x) / total for x in logits]
    kept = [i for i, p in enumerate(probs) if p >= min_p * max(probs)]
    if top_k > 0:
        kept = sorted(kept, key=lambda i: logits[i], reverse=True)[:top_k]
    left = sum(probs[i] for i in kept)
    support, below = set(kept), 0.0
    for i in sorted(kept, key=lambda i: logits[i])[:-1]:
        below += probs[i] / left
        if below <= 1 - top_p:
            support.discard(i)
    return support


def is_borderline(logits: list[float], top_p: float, min_p: float) -> bool:
    """Whether rounding to float32 may decide: sums from below or ratios to the largest within 1e-5 of a bound."""
    total = sum(math.exp(x) for x in logits)
    probs = sorted(math.exp(x) / total for x in logits)
    near_min_p = any(abs(p - min_p * probs[-1]) < 1e-5 for p in probs[:-1])
    # The bound of top-p is on what the other filters leave, whichever smallest tokens they took.
    for first in range(len(probs)):
        rest = probs[first:]
        sums = [sum(rest[: n + 1]) / sum(rest) for n in range(len(rest))]
        if any(abs(x - (1 - top_p)) < 1e-5 for x in sums):
            return True
    return near_min_p


@settings(deadline=None)
@given(LOGITS, st.sampled_from([-1, 0, 1, 2, 5, 20]), st.sampled_from([1.0, 0.95, 0.7, 0.3]), st.floats(0, 0.5))
def test_the_support_equals_its_slow_loop(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    assume(not is_borderline(logits, top_p, min_p))
    tensor = torch.tensor([[logits]], dtype=torch.float64)
    got = filter_logits(tensor, top_k=top_k, top_p=top_p, min_p=min_p)[0, 0]
    support = slow_support(logits, top_k, top_p, min_p)
    assert set(got.isfinite().nonzero().flatten().tolist()) == support
    assert all(float(got[i]) == logits[i] for i in support)


def test_top_p_on_one_side_only_is_a_ratio_below_1() -> None:
    # Report C14: probabilities .6, .3, .1 and top-p .9. The sampler's support is the first two; it samples token 0
    # with .6 / .9 = 2/3. A learner with whole logits says .6: ratio .9. One with the same support says 2/3: ratio 1.
    logits = torch.tensor([[[0.6, 0.3, 0.1]]], dtype=torch.float64).log()
    behavior = math.log(0.6 / 0.9)
    whole = float(logits.log_softmax(dim=-1)[0, 0, 0])
    alike = filter_logits(logits, top_p=0.9)
    assert math.exp(whole - behavior) == pytest.approx(0.9, rel=1e-12)
    assert alike[0, 0].isfinite().tolist() == [True, True, False]
    assert math.exp(float(alike.log_softmax(dim=-1)[0, 0, 0]) - behavior) == pytest.approx(1.0, rel=1e-12)


def test_the_gradient_is_that_of_the_renormalised_distribution() -> None:
    # d log softmax_0 / d logits = 1 - p_0, -p_1 over the support (2/3, 1/3), and 0 outside it.
    logits = torch.tensor([[[0.6, 0.3, 0.1]]], dtype=torch.float64).log().requires_grad_()
    (gradient,) = torch.autograd.grad(filter_logits(logits, top_k=2).log_softmax(dim=-1)[0, 0, 0], logits)
    assert gradient[0, 0].tolist() == pytest.approx([1 / 3, -1 / 3, 0.0], abs=1e-12)


def test_full_support_is_left_as_it_is() -> None:
    logits = torch.randn(2, 3, 7)
    assert filter_logits(logits) is logits
    assert filter_logits(logits, top_k=0, top_p=1.0, min_p=0.0) is logits
    assert filter_logits(logits, top_k=7) is logits


def test_ties_with_the_last_of_the_top_k_stay() -> None:
    logits = torch.tensor([[[1.0, 2.0, 2.0, 0.0]]])
    assert filter_logits(logits, top_k=1)[0, 0].isfinite().tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    "settings", [{"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": math.nan}]
)
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected -1 or more, "):
        filter_logits(torch.zeros(1, 1, 3), **settings)  # type: ignore[arg-type]


@pytest.mark.engine
@pytest.mark.slow
def test_the_support_is_vllms() -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50, generator=generator) * 3
    for top_k, top_p in ((5, 1.0), (50, 0.9), (10, 0.8), (1, 0.1)):
        k, p = torch.full((200,), top_k), torch.full((200,), top_p)
        theirs = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, None if top_p == 1 else p)
        assert torch.equal(filter_logits(logits[:, None], top_k=top_k, top_p=top_p)[:, 0], theirs)
