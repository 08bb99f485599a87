"""Reading what an engine gives, and keeping an engine full."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from stream_grpo.sampler.generation import end_reason, generate, logprobs_of_sampled, versions_of_spans
from stream_grpo.types import EndReason, GenerationRequest, PolicyVersion
from tests.fakes import FakeEngine


def entry(logprob: float | None, rank: int = 1) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_c15_the_logprob_is_that_of_the_sampled_token_whatever_the_order_of_the_table() -> None:
    top, sampled = (382, entry(-0.7, 1)), (13, entry(-4.2, 4))
    for table in (dict([top, sampled]), dict([sampled, top])):
        logprobs = logprobs_of_sampled([13], [table])
        assert logprobs is not None
        assert logprobs.tolist() == pytest.approx([-4.2])


@pytest.mark.parametrize("broken", [None, {}, {1: entry(None)}, {1: entry(math.nan)}, {1: entry(-math.inf)}])
def test_c16_a_missing_logprob_is_never_filled_in(broken: object) -> None:
    good = {1: entry(-0.1)}
    assert logprobs_of_sampled([1, 1, 1], [good, broken, good]) is None  # type: ignore[list-item]
    assert logprobs_of_sampled([1, 1], [good]) is None
    assert logprobs_of_sampled([1], None) is None


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("stop", 2, EndReason.EOS),
        ("stop", None, EndReason.EOS),
        ("stop", 9, EndReason.STOP),
        ("stop", "###", EndReason.STOP),
        ("length", None, EndReason.LENGTH),
        ("abort", None, EndReason.ABORT),
        ("error", None, EndReason.ERROR),
        ("repetition", "repetition_detected", EndReason.ERROR),
        (None, None, EndReason.ERROR),
    ],
)
def test_end_reasons(finish: str | None, stop: int | str | None, expected: EndReason) -> None:
    assert end_reason(finish, stop, frozenset({2})) is expected


def test_spans_give_every_token_its_version_or_nothing() -> None:
    v4, v5 = PolicyVersion(0, 4), PolicyVersion(1, 5)
    assert versions_of_spans([("0.4", 0, 2), ("1.5", 2, 3)], 3) == (v4, v4, v5)
    assert versions_of_spans([], 0) == ()
    assert versions_of_spans([("0.4", 0, 2)], 3) is None
    assert versions_of_spans([("0.4", 1, 3)], 3) is None
    assert versions_of_spans([("default", 0, 3)], 3) is None


def requests(num: int) -> list[GenerationRequest]:
    return [GenerationRequest(request_id=f"r/{i}", prompt_ids=(1,), seed=i, max_new_tokens=2) for i in range(num)]


def test_generate_gives_everything_and_never_runs_more_than_there_are_slots() -> None:
    engine = FakeEngine(num_slots=2)
    names = [g.request_id for g in generate(engine, requests(5))]
    assert names == [f"r/{i}" for i in range(5)]
    assert [event for event in engine.events if event[0] == "step"] == [("step", n) for n in (2, 2, 2, 2, 1, 1)]


def test_generate_leaves_nothing_behind_when_it_is_given_up() -> None:
    engine = FakeEngine(num_slots=3)
    stream = generate(engine, requests(5))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.num_unfinished == 0
