"""A sampler that leaves finishes its groups, or hands over what there is of them, and says goodbye."""

from __future__ import annotations

from pathlib import Path

from tests.sampler.loop import Outside, Running, Slow, publish, ticket


def test_one_that_leaves_finishes_its_groups_and_takes_no_more(outside: Outside, tmp_path: Path) -> None:
    outside.blocks, outside.holds_last = [[ticket("g0"), ticket("g1")], [ticket("g2")]], True
    publish(tmp_path / "weights", 0)
    engine = Slow(num_slots=4)
    engine.pauses_at = 1
    running = Running(outside, tmp_path, engine)
    # The question that it asks ahead is on its way when it is told to leave, and answered then.
    running.wait(lambda: engine.num_unfinished == 4 and outside.num_asked == 2)
    assert running.process is not None
    running.process.leave(within_s=20)
    outside.holds_last = False
    running.wait(lambda: not outside.blocks)
    engine.pauses_at = None
    running.wait(lambda: False)  # it ends by itself
    assert running.error is None
    assert sorted(group.group_id for group in outside.groups) == ["g0", "g1"]
    assert outside.partials == []
    assert outside.num_goodbyes == 1
    assert engine.num_unfinished == 0
    assert outside.num_asked == 2


def test_one_whose_time_is_over_hands_over_what_there_is(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 0)
    engine = Slow(num_slots=2)
    engine.pauses_at = 2
    running = Running(outside, tmp_path, engine)
    running.wait(lambda: engine.events.count(("step", 2)) == 2)
    assert running.process is not None
    running.process.leave(within_s=0)
    running.wait(lambda: False)
    assert running.error is None
    assert outside.groups == []
    assert [partial.group_id for partial in outside.partials] == ["g0"]
    assert outside.num_goodbyes == 1
