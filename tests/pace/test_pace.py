"""Who waits for whom in words, and the fold that finds it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stream_grpo.pace.bottleneck import Shares, bottleneck
from stream_grpo.pace.panel import clock, panel
from stream_grpo.pace.watch import PaceWatch
from stream_grpo.registry.status import STATUS

BUSY = {"policy": 0.0, "buffer": 0.0, "curator": 0.0, "rewards": 0.0}


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        (
            Shares(learner_waited=0.61, sampler_idle=BUSY),
            "sampling is the bottleneck: the learner waited 61% of the last minute",
        ),
        (
            Shares(learner_waited=0.05, sampler_idle=BUSY | {"buffer": 0.45}),
            "the learner is the bottleneck: the samplers waited 45% of the last minute for the permission to begin "
            "groups",
        ),
        (
            Shares(learner_waited=0.61, sampler_idle=BUSY | {"rewards": 0.4}),
            "scoring is the bottleneck: the samplers waited 40% of the last minute for scores, the learner 61% for a "
            "batch",
        ),
        (
            Shares(learner_waited=0.3, sampler_idle=BUSY | {"curator": 0.2, "rewards": 0.1}),
            "the curator is the bottleneck: the samplers waited 30% of the last minute for problems, the learner 30% "
            "for a batch",
        ),
        (
            Shares(learner_waited=0.04, sampler_idle=BUSY | {"buffer": 0.02}),
            "nothing is held up: in the last minute the learner waited 4% and the samplers 2%",
        ),
        (
            Shares(learner_waited=0.5, sampler_idle=BUSY, slots_taken=0.2),
            "sampling is the bottleneck: the learner waited 50% of the last minute, with 20% of the samplers' slots "
            "taken: a larger stream.max_policy_age lets them do more at once",
        ),
        (
            Shares(learner_waited=0.55, sampler_idle=BUSY | {"buffer": 0.4}),
            "the two sides wait for each other: the learner 55% of the last minute for a batch, the samplers 40% for "
            "the permission to begin groups; a larger stream.max_policy_age lets them work at once",
        ),
        (
            Shares(learner_waited=0.0, learner_published=0.7, sampler_idle=BUSY | {"buffer": 0.6}),
            "publishing is the bottleneck: it took 70% of the last minute, and the samplers waited 60% of the last "
            "minute for the permission to begin groups",
        ),
        (
            Shares(learner_waited=0.6, sampler_idle=BUSY, sampler_stalled=0.4),
            "taking up weights is the bottleneck: the samplers did that 40% of the last minute, and the learner waited "
            "60%; a larger stream.publish_interval costs less",
        ),
    ],
)
def test_the_bottleneck_in_words(shares: Shares, sentence: str) -> None:
    assert bottleneck(shares) == sentence


def test_there_are_words_for_all_that_a_sampler_may_wait_for() -> None:
    causes = [figure.name.removeprefix("idle_s/") for figure in STATUS if figure.name.startswith("idle_s/")]
    assert "environment" in causes
    for cause in causes:
        assert "the samplers waited 40% of" in bottleneck(Shares(sampler_idle={cause: 0.4}))


share = st.floats(0, 1)


@given(share, share, st.dictionaries(st.sampled_from([*BUSY]), share), share, share, st.floats(0.1, 100))
def test_there_is_a_sentence_for_every_run(
    waited: float, published: float, idle: dict[str, float], stalled: float, taken: float, span_s: float
) -> None:
    shares = Shares(
        learner_waited=waited, learner_published=published, sampler_idle=idle, sampler_stalled=stalled,
        slots_taken=taken,
    )  # fmt: skip
    sentence = bottleneck(shares, span_s)
    is_held_up = max(waited, sum(idle.values())) >= 0.1
    assert ("is the bottleneck" in sentence or "wait for each other" in sentence) == is_held_up


def lines_of(until_s: int, *, start: int = 0) -> list[dict[str, Any]]:
    """A second a line of each part: the learner waits 0.6 of it, two samplers are idle 0.1 and 0.3 for tickets.

    100 tokens a second are sampled and 50 trained; every 2 s is a learner step.
    """
    found: list[dict[str, Any]] = []
    for at in range(start, until_s):
        now = {"time_s": float(at), "event": "status"}
        for number, idle in enumerate((0.1, 0.3)):
            counts = {"busy_s": at * (1 - idle), "idle_s": BUSY | {"buffer": at * idle}, "stall_s": 0.0}
            found.append({**now, "part": f"sampler-{number}", "num_slots": 8, "num_running": 4, **counts})
        tokens = {"generated": 100 * at, "trained": 50 * at}
        queue = {"in_flight": 5, "buffered": 2, "leased": 4}
        found.append({**now, "part": "buffer", "ledger": {"tokens": tokens}, **queue})
        seconds = {"busy_s": at * 0.3, "waited_s": at * 0.6, "publish_s": at * 0.1, "checkpoint_s": 0.0}
        found.append({**now, "part": "learner", **seconds})
        if at % 2 == 0 and at:
            found.append({"time_s": float(at), "event": "step", "step": at // 2, "age_mean": 1.5, "age_max": 3})
    return found


def watch_of(lines: list[dict[str, Any]]) -> PaceWatch:
    watch = PaceWatch(num_steps=100)
    for line in lines:
        watch.take(line)
    return watch


def test_rates_are_those_of_the_last_minute() -> None:
    watch = watch_of(lines_of(100))
    pace, shares = watch.now(), watch.shares()
    assert pace is not None
    assert (pace.sampled_per_s, pace.trained_per_s) == (pytest.approx(100.0), pytest.approx(50.0))
    assert shares.learner_waited == pytest.approx(0.6)
    assert shares.learner_published == pytest.approx(0.1)
    assert shares.sampler_idle["buffer"] == pytest.approx(0.2)
    assert shares.slots_taken == 0.5
    # 49 steps by 98 s, one every 2 s: 51 are left.
    assert (pace.step, pace.left_s) == (49, pytest.approx(102.0))
    assert pace.queue == {"in_flight": 5, "buffered": 2, "leased": 4}
    assert pace.bottleneck == "sampling is the bottleneck: the learner waited 60% of the last minute"


def test_what_was_before_the_last_minute_is_forgotten() -> None:
    # The learner waited all the time for 200 s, and then no more.
    lines = [{"time_s": float(at), "event": "status", "part": "learner", "waited_s": min(at, 200)} for at in range(290)]
    assert watch_of(lines).shares().learner_waited == 0.0


def test_a_part_that_was_started_again_counts_from_0() -> None:
    again = [{**line, "time_s": line["time_s"] + 50} for line in lines_of(10) if line["event"] == "status"]
    watch = watch_of([*lines_of(50), *again])
    assert watch.shares().learner_waited == pytest.approx(0.6)
    assert watch.shares().sampler_idle["buffer"] == pytest.approx(0.2)


def test_a_line_that_lacks_figures_breaks_nothing_and_is_passed_over() -> None:
    # What a part that is being built again may leave: its name alone.
    bare = [
        {"time_s": 50.5, "event": "status", "part": part} for part in ("sampler-0", "sampler-1", "buffer", "learner")
    ]
    assert watch_of([*lines_of(50), *bare]).now() is not None
    watch = watch_of([*lines_of(50), *bare, *lines_of(100, start=51)])
    pace, shares = watch.now(), watch.shares()
    assert pace is not None
    assert pace.sampled_per_s == pytest.approx(100.0)
    assert shares.slots_taken == 0.5
    assert shares.sampler_idle["buffer"] == pytest.approx(0.2)


def test_with_a_budget_of_tokens_the_nearer_end_counts() -> None:
    # 100 tokens a second, 9,900 by now, 20 a second of them of evaluations: 80 a second and 7,920 count.
    lines = lines_of(100)
    for line in lines:
        if line.get("part") == "buffer":
            line["ledger"]["tokens"]["evaluation"] = 20 * int(line["time_s"])
    ends = {10_000: 26.0, 7_000: 0.0, 1_000_000: 102.0}  # (10,000 - 7,920) / 80; spent; the 51 steps of 2 s are nearer
    for budget, left_s in ends.items():
        watch = PaceWatch(num_steps=100, max_tokens=budget)
        for line in lines:
            watch.take(line)
        pace = watch.now()
        assert pace is not None
        assert pace.num_tokens == 7_920
        assert pace.left_s == pytest.approx(left_s)
        assert pace.share_done == pytest.approx(min(1.0, max(0.49, 7_920 / budget)))
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(panel(pace, 100))
        assert f"49 of at most 100 steps, 7,920 of {budget:,} tokens" in console.export_text()


def test_there_is_no_pace_before_the_first_step_and_little_before_the_second() -> None:
    assert watch_of(lines_of(2)).now() is None
    pace = watch_of(lines_of(3)).now()
    assert pace is not None
    assert pace.left_s is None
    assert "last 2 s" in pace.bottleneck


def test_the_panel_shows_what_it_is_given() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(panel(None, 100))
    watch = watch_of(lines_of(100))
    watch.take({"event": "alarm", "name": "entropy", "sentence": "entropy [fell] fast", "cause": "c", "step": 3})
    console.print(panel(watch.now(), 100))
    text = console.export_text()
    shown = ("0 of 100 steps", "49 of 100 steps", "100 sampled, 50 trained a second", "5 in flight, 2 buffered")
    for part in (*shown, "1.5 steps in the mean", "1:42 left", "sampling is the bottleneck", "entropy [fell] fast"):
        assert part in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(41.6, "42 s"), (187, "3:07"), (3729, "1:02:09"), (86400, "24:00:00"), (3 * 86400 + 4 * 3600, "3 days 4 h")],
)
def test_a_span_of_time_as_people_read_it(seconds: float, words: str) -> None:
    assert clock(seconds) == words


def test_a_recorded_run_has_a_pace() -> None:
    path = Path(__file__).parents[1] / "data" / "metrics_run.jsonl"
    watch = watch_of([json.loads(line) for line in path.read_text().splitlines()])
    pace = watch.now()
    assert pace is not None
    assert pace.sampled_per_s > pace.trained_per_s > 0
