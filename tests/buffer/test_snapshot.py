"""A snapshot and the rows after it say what all rows say."""

import json
from collections import Counter, OrderedDict, deque
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.buffer.book import Book
from stream_grpo.buffer.outcomes import Outbox
from stream_grpo.buffer.retention import Limits
from stream_grpo.buffer.snapshot import from_plain, set_folds, to_plain
from stream_grpo.buffer.transitions import (
    TRANSITION_SCHEMA,
    Kind,
    Location,
    Transition,
    decode_transitions,
    encode_transitions,
)
from stream_grpo.types import Fate, PolicyVersion
from tests.buffer.fakes import Buffer, MemoryJournal, rules
from tests.buffer.test_stream import DEADLINE_S, Simulation

LONG_AGO = -1e9
"""A start at which no deadline is extended."""


class WithCheckpoints(Simulation):
    """The simulation, with a checkpoint now and then that becomes the oldest kept one, and problems that are named."""

    def turn(self) -> None:
        super().turn()
        if self.running:
            ticket = self.running[-1][1]
            sizes = {ticket.group_id: 2 + ticket.seed % 3}
            self.buffer.intake.name_problems({ticket.group_id: f"problem-{ticket.seed % 7}"}, self.now, sizes)
        oldest = PolicyVersion(self.learner.branch, self.learner.step - 3)
        if self.rng.random() < 0.2 and oldest.step >= self._oldest_step():
            self.buffer.leases.checkpointed(oldest, self.now)


def settings_of(max_policy_age: int) -> dict[str, Any]:
    """With an age above 0 also requeues and further uses, so that every kind of row is met."""
    more = {"too_old": "requeue", "groups_per_step": 3, "max_uses": 2, "reused_per_step": 1} if max_policy_age else {}
    return {"max_policy_age": max_policy_age, **more}


def history(seed: int, *, max_policy_age: int, turns: int) -> MemoryJournal:
    rules_given = settings_of(max_policy_age)
    simulation = WithCheckpoints(seed, publish_interval=1, samplers=2, crashes=True, rules=rules_given)
    for turn in range(turns):
        simulation.turn()
        if turn % 25 == 0:
            simulation.buffer.intake.evaluated("s0", PolicyVersion(9, turn), 5, simulation.now)
    return simulation.buffer.journal


def book_of(rows: list[Transition], journal: MemoryJournal, max_policy_age: int) -> Book:
    part = MemoryJournal()
    part.rows, part.records = list(rows), journal.records
    book = Book(part, rules(sample_deadline_s=DEADLINE_S, **settings_of(max_policy_age)), now=LONG_AGO)
    assert len(part.rows) == len(rows)
    return book


def contents(book: Book) -> dict[str, Any]:
    """Every attribute of every fold: one that a snapshot forgets is missed here."""
    found: dict[str, Any] = {name: dict(vars(fold)) for name, fold in book._folds.items() if fold is not book}
    found["tickets"].pop("_lineage")  # a reference to another fold
    found["outbox"].pop("_kept")  # read from records
    return found | {name: getattr(book, name) for name in book.folded}


def over_the_disk(row: Transition) -> Transition:
    """The row as a log gives it back."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(encode_transitions([row])), TRANSITION_SCHEMA)
    return decode_transitions(batch)[0]


@pytest.mark.parametrize("max_policy_age", [0, 2])
def test_at_every_cut_a_snapshot_holds_all_that_the_rows_before_it_say(max_policy_age: int) -> None:
    journal = history(1, max_policy_age=max_policy_age, turns=60)
    kinds = {row.kind for row in journal.rows}
    assert {Kind.STALE, Kind.CHECKPOINTED} <= kinds
    assert not max_policy_age or {Kind.REUSED, Kind.REQUEUED} <= kinds
    following = book_of([], journal, max_policy_age)
    for number, row in enumerate(journal.rows):
        following._apply(row)
        following.stock.load(journal.read)
        following.outbox.committed()
        snapshot = following.snapshot(0.0, closes_log=number)
        assert contents(book_of([snapshot], journal, max_policy_age)) == contents(following), (number, row)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6), max_policy_age=st.integers(0, 3), cut=st.floats(0, 1), turns=st.sampled_from([40, 120])
)
def test_a_snapshot_and_the_rows_after_it_say_what_all_rows_say(
    seed: int, max_policy_age: int, cut: float, turns: int
) -> None:
    journal = history(seed, max_policy_age=max_policy_age, turns=turns)
    at = int(cut * len(journal.rows))
    whole, before = (book_of(rows, journal, max_policy_age) for rows in (journal.rows, journal.rows[:at]))
    snapshot = over_the_disk(before.snapshot(1.5, closes_log=4))
    whole.retention.logs = {4: before.retention.newest}
    assert contents(book_of([snapshot, *journal.rows[at:]], journal, max_policy_age)) == contents(whole)


def test_the_outbox_forgets_in_a_snapshot_what_the_curator_has_on_disk() -> None:
    buffer = Buffer()
    buffer.start()
    buffer.fill(PolicyVersion(0, 0), 3)
    book = Book(buffer.journal, rules(), now=0.0)
    book.outbox.answered(3, durable=2)
    again = Outbox()
    set_folds({"outbox": again}, book.snapshot(0.0, closes_log=1))
    assert (again.num_outcomes, [entry.sequence for entry in again._entries]) == (3, [2])


def test_a_snapshot_grows_with_what_is_open_and_not_with_the_run() -> None:
    """Each step ends 2 groups; what is kept of one is its end among the last inserts, some 50 bytes."""
    sizes = []
    buffer = Buffer()
    buffer.start()
    for step in range(60):
        buffer.fill(PolicyVersion(0, step), 2)
        buffer.train(PolicyVersion(0, step))
        buffer.leases.checkpointed(PolicyVersion(0, step + 1), 0.0)
        buffer.book.remove_segments(Limits(num_bytes=0), closed_below=1000, now=0.0)
        state = json.loads(buffer.book.snapshot(0.0, closes_log=1).reason)
        assert len(state["book"].pop("taken")) == 1 + 2 * 2 * (step + 1)
        state["signal"].pop("_recent")  # of the last 256 groups, whether they had signal
        sizes.append(len(json.dumps(state)))
    # All that changes in length are digits: of counts, versions and seeds.
    assert max(sizes[10:]) - min(sizes[10:]) < 120


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, "text", [], [1, ["list"]], (1, (2,)), {3, 1}, frozenset({PolicyVersion(0, 1)}),
        {"a": 1, 2: [Kind.STALE]}, Counter(a=2), OrderedDict([((1, "x"), Fate.STALE)]), deque([True], maxlen=3),
        PolicyVersion(1, 2), Location(1, 2, 3, 4), Transition(kind=Kind.HELLO, time_s=1.5, reason="ünïcode"),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was_and_of_its_type(value: Any) -> None:
    again = from_plain(json.loads(json.dumps(to_plain(value))))
    assert again == value
    assert type(again) is type(value)
    assert getattr(again, "maxlen", None) == getattr(value, "maxlen", None)


def test_a_value_of_an_unknown_type_is_refused_when_the_snapshot_is_made() -> None:
    with pytest.raises(TypeError, match="holds a complex, which a snapshot does not know"):
        to_plain([1j])
