"""A stall is said once with its causes, and ends the run where no part gives up by itself."""

import pytest

from stream_grpo.errors import StallError
from stream_grpo.stall import StallWatch, who_waits

STATUSES = {
    "learner": {"waits_for": ["the batch of step 8 (40 s): waits for group g00000007 of sampler-0 with 0 steps left"]},
    "sampler-0": {"waits_for": ["the curator to choose problems (39 s)", "tickets: 6 groups are live"]},
    "curator": {},
}


def test_everybody_is_named_with_whom_he_waits_for() -> None:
    assert list(who_waits(STATUSES)) == [
        "learner waits for the batch of step 8 (40 s): waits for group g00000007 of sampler-0 with 0 steps left",
        "sampler-0 waits for the curator to choose problems (39 s)",
        "sampler-0 waits for tickets: 6 groups are live",
    ]


def test_a_stall_is_said_once_at_half_of_the_timeout_and_ends_the_run_at_twice_of_it() -> None:
    now = 0.0
    watch = StallWatch(100.0, timer=lambda: now)
    said = []
    for now in range(0, 201, 10):  # noqa: B007
        said.append(watch.look("step 7", ["a waits for b"]))
    assert [(n * 10, sentence) for n, sentence in enumerate(said) if sentence] == [
        (60, "nothing has moved for 60 s: step 7; a waits for b")
    ]
    now = 201.0
    with pytest.raises(StallError, match="nothing has moved for 201 s: step 7; a waits for b"):
        watch.look("step 7", ["a waits for b"])


def test_whatever_moves_begins_the_time_anew() -> None:
    now = 0.0
    watch = StallWatch(100.0, timer=lambda: now)
    for now in (0.0, 49.0, 98.0, 147.0, 196.0, 245.0):
        assert watch.look(f"step {now}", []) == ""
    now = 296.0
    assert watch.look("step 245.0", []) == "nothing has moved for 51 s: step 245.0"
