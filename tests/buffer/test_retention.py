"""What may leave the disk, and when the learner is asked for a checkpoint so that more may."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stream_grpo import config_file
from stream_grpo.buffer.retention import Limits, Retention
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.errors import ConfigError
from stream_grpo.types import PolicyVersion
from tests.buffer.fakes import FakeCurator
from tests.buffer.test_process import Running, eventually, insert, run, tickets_for, train  # noqa: F401
from tests.buffer.test_snapshot import book_of, history

V0 = PolicyVersion(0, 0)
NONE = Limits(num_bytes=0)
"""Nothing is kept for being looked at."""


def segments_of(*sizes: int) -> Retention:
    """A segment of so many bytes each, one group in each, which came in at second 100, 200, ..."""
    retention = Retention()
    for number, size in enumerate(sizes, start=1):
        retention.apply(
            Transition(kind=Kind.ACCEPTED, time_s=100.0 * number, segment=number, offset=0, length=size, crc32=1)
        )
    return retention


def removable(retention: Retention, limits: Limits, *in_use: int, closed_below: int = 100, now: float = 1000.0) -> Any:
    return retention.removable(limits, in_use, closed_below=closed_below, now=now)


def test_nothing_goes_before_a_checkpoint_whatever_the_limits_say() -> None:
    retention = segments_of(10, 10, 10)
    assert removable(retention, NONE) == []
    retention.settle(in_use=[2])
    # Oldest first and no hole: the third waits for the second.
    assert removable(retention, NONE) == [1]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), []),
        (Limits(num_bytes=100), []),
        (Limits(num_bytes=99), [1]),
        (Limits(num_bytes=70), [1, 2]),
        (Limits(num_bytes=0), [1, 2, 3, 4]),
        # 4 groups in 4 segments: 2 stay, though more do where the segment of the second holds more.
        (Limits(num_groups=2), [1, 2]),
        (Limits(num_groups=4), []),
        # At second 1000 the segments are 900, 800, 700, 600 old.
        (Limits(age_s=750), [1, 2]),
        (Limits(num_bytes=99, age_s=650), [1, 2, 3]),
    ],
)
def test_what_is_beyond_any_limit_may_go(limits: Limits, expected: list[int]) -> None:
    retention = segments_of(10, 20, 30, 40)
    retention.settle(in_use=[])
    assert removable(retention, limits) == expected


def test_what_is_open_or_still_asked_for_stays() -> None:
    retention = segments_of(10, 10, 10)
    retention.settle(in_use=[])
    assert removable(retention, NONE, closed_below=3) == [1, 2]
    assert removable(retention, NONE, 2) == [1]
    # A group that comes in later is of no checkpoint.
    retention.apply(Transition(kind=Kind.NO_SIGNAL, time_s=1, segment=1, offset=10, length=5, crc32=1))
    assert removable(retention, NONE) == []


def test_a_checkpoint_is_asked_for_where_it_settles_the_oldest_segment() -> None:
    retention = segments_of(10, 10)
    assert retention.needs_checkpoint([], closed_below=2)
    # A group in it is still to be trained, or it is open: no checkpoint helps.
    assert not retention.needs_checkpoint([1], closed_below=2)
    assert not retention.needs_checkpoint([], closed_below=1)
    retention.settle(in_use=[])
    assert not retention.needs_checkpoint([], closed_below=2)


@example(seed=1, max_policy_age=2)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), max_policy_age=st.integers(0, 3))
def test_a_group_in_a_settled_segment_never_changes_again(seed: int, max_policy_age: int) -> None:
    """Random histories with restores, every record in a segment of its own."""
    journal = history(seed, max_policy_age=max_policy_age, turns=80)
    book = book_of([], journal, max_policy_age)
    segment_of = {row.group_id: row.segment for row in journal.rows if row.length}
    num_settled = 0
    for row in journal.rows:
        number = segment_of.get(row.group_id)
        if number in book.retention.segments and row.kind not in (Kind.REFUSED, Kind.PICKED):
            assert not book.retention.segments[number].is_settled
        book._apply(row)
        # Nor is it in the way of a snapshot or of a lease: nobody reads it.
        settled = {n for n, segment in book.retention.segments.items() if segment.is_settled}
        assert not settled & book.stock.segments()
        num_settled = max(num_settled, len(settled))
    assert num_settled or (seed, max_policy_age) != (1, 2)


def test_a_bound_that_checkpoints_could_not_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"buffer.max_bytes = 1073741824: beside buffer.retain_bytes = 8589934592 .*"):
        config_file.parse({"model": {"path": "-"}, "buffer": {"max_bytes": 1 << 30}}, source="test")
    # 4 (2^16 + 2^16 + 2^20) = 4718592 beside nothing that is kept.
    least = {"retain_bytes": 0, "segment_bytes": 1 << 16, "max_message_bytes": 1 << 16, "log_bytes": 1 << 20}
    config_file.parse({"model": {"path": "-"}, "buffer": least | {"max_bytes": 4718592}}, source="test")


SMALL = {"segment_bytes": 8192, "log_bytes": 20_000, "retain_bytes": 0, "max_message_bytes": 4096}
"""Of a journal that cuts segments after some 3 groups and logs after some 20 commits."""


def train_steps(running: Running, first: int, count: int) -> Any:
    """Steps with a checkpoint after each, of which the newest two are kept."""
    learner, sampler = running.learner(PolicyVersion(0, first)), running.sampler()
    ledger = None
    for step in range(first, first + count):
        version = PolicyVersion(0, step)
        insert(sampler, tickets_for(sampler, 2, version), version)
        ledger = train(learner, learner.lease(version, 2), version)
        learner.checkpointed(PolicyVersion(0, max(step, 0)))
    return ledger


def test_a_long_run_keeps_a_small_journal_and_a_whole_account(run: Callable[..., Running]) -> None:  # noqa: F811
    running = run(curator=FakeCurator(), buffer=SMALL)
    curator = running.curator
    assert curator
    train_steps(running, 0, 12)
    # The curator has nothing on disk yet: every record may be asked for again.
    eventually(lambda: running.process.status()["segments_on_disk"] >= 8)
    curator.num_durable = 10**6
    eventually(lambda: running.process.status()["segments_on_disk"] <= 2)
    train_steps(running, 12, 12)
    eventually(lambda: running.process.status()["segments_on_disk"] <= 2)
    assert running.process.status()["log_number"] > 2
    logs = sorted(path.name for path in running.directory.glob("transitions-*"))
    assert logs[0] > "transitions-000001.arrow"
    before = running.process.status()
    assert before["bytes_on_disk"] == sum(path.stat().st_size for path in running.directory.glob("*.arrow"))
    running.kill()
    running.again()
    eventually(lambda: running.process.status()["version"] == [0, 24])
    after = running.process.status()
    assert after["ledger"] == before["ledger"]
    assert (after["ledger"]["groups"]["trained"], after["ledger"]["closes"]) == (48, True)
    assert [outcome.sequence for outcome in curator.outcomes] == list(range(48))
    train_steps(running, 24, 2)


def test_at_its_bound_the_journal_asks_for_checkpoints_and_then_holds_groups(
    run: Callable[..., Running],  # noqa: F811
) -> None:
    running = run(buffer=SMALL | {"max_bytes": 240_000, "log_bytes": 30_000})
    learner, sampler, client = running.learner(), running.sampler(), running.client()
    bound = 240_000 - 4096 - 2 * 30_000  # the reserve: a message, two logs
    wanted, step = [], 0
    while running.process.status()["bytes_on_disk"] < bound - 30_000:
        version = PolicyVersion(0, step)
        insert(sampler, tickets_for(sampler, 2, version), version)
        ledger = train(learner, learner.lease(version, 2), version)
        wanted.append(ledger["checkpoint_wanted"])
        step += 1
        eventually(lambda: running.process.status()["version"] == [0, step])  # noqa: B023
    # The last step of the way in rows that are never held.
    num_evaluated = 0
    while not running.process.status()["bytes_on_disk"] > bound:
        client.call("evaluated", {"sampler_id": "s1", "version": [9, num_evaluated], "num_tokens": 1})
        num_evaluated += 1
    # First not, then at each step until there is one.
    assert wanted == sorted(wanted)
    assert set(wanted) == {False, True}
    fields = {"sampler_id": "s1", "version": [0, step], "num_wanted": 1, "problems": {}, "group_sizes": {}}
    cause = client.call("tickets", fields).fields["cause"]
    assert "of buffer.max_bytes = 0 MiB" in cause
    assert "before the oldest kept checkpoint contains its groups" in cause
    lease = learner.lease(PolicyVersion(0, step), 2)
    assert lease.checkpoint_wanted
    assert lease.cause.startswith("the journal holds")
    assert running.process.status()["segments_on_disk"] > 2
    learner.checkpointed(PolicyVersion(0, step))
    eventually(lambda: running.process.status()["segments_on_disk"] <= 1)
    assert tickets_for(sampler, 1, PolicyVersion(0, step))
    assert not learner.lease(PolicyVersion(0, step), 2).checkpoint_wanted
