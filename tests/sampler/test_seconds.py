"""Where a sampler's seconds go, on a clock that a test sets."""

from __future__ import annotations

from stream_grpo.sampler.seconds import Seconds


class Clock:
    """Stands still until it is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_wait_counts_as_its_cause_and_without_one_not_at_all() -> None:
    clock = Clock()
    seconds = Seconds(clock)
    for cause, until_s in (("buffer", 2.0), ("", 5.0), ("rewards", 6.5), ("buffer", 7.0)):
        with seconds.idle(cause):
            clock.now_s = until_s
    # The buffer from 0 to 2 and from 6.5 to 7, rewards from 5 to 6.5; from 2 to 5 something ran.
    assert seconds.as_fields()["idle_s"] == {"policy": 0.0, "buffer": 2.5, "curator": 0.0, "rewards": 1.5}


def test_a_group_waits_for_its_score_from_its_last_response_on() -> None:
    clock = Clock()
    seconds = Seconds(clock)
    for at_s, group in ((0.0, "a"), (1.0, "b"), (3.0, "a"), (4.0, "c")):
        clock.now_s = at_s
        seconds.given_out(group)
    seconds.forget("c")
    clock.now_s = 10.0
    for group in ("a", "b", "c", "d"):
        seconds.scored(group)
        seconds.scored(group)
    # `a` from 3 on, `b` from 1 on; of `c` and `d` nothing is out.
    fields = seconds.as_fields()
    assert (fields["score_wait_s"], fields["num_groups_scored"]) == (7.0 + 9.0, 2)
