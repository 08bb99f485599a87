"""Tests of the requests on the stock: their start and end states, and the split."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo import stock
from stream_grpo.environments.protocol import End
from stream_grpo.environments.records import Records
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.stock import Request, draw, is_held_out, plan_of, prompt_of, reference_of, row_of, rows, tables_of

KINDS = list(stock.POOL_COUNTS)
COUNTS = dict.fromkeys(KINDS, 30)


@st.composite
def requests(draw_value: st.DrawFn) -> Request:
    kind, seed, held_out = (
        draw_value(st.sampled_from(KINDS)),
        draw_value(st.integers(0, 10**6)),
        draw_value(st.booleans()),
    )
    return draw(kind, random.Random(seed), held_out=held_out)


def database_of(request: Request) -> Records:
    row: Any = json.loads(json.dumps(row_of(request)))  # as a file keeps it
    problem = ProblemRow(problem_id=row["id"], answer=row["answer"], verifier=row["verifier"], extra=row)
    database = Records(problem, open="{", close="}", body="plain")
    database.reset(0, None)
    return database


@pytest.mark.parametrize(
    ("request_", "prompt", "statements"),
    [
        (Request("set", ("bolt",), 407), "set bolt 407:", ["update stock set num=407 where item='bolt'"]),
        (Request("add", ("bolt",), 407), "add bolt 407:", ["insert into stock values('bolt',407)"]),
        (
            Request("drop", ("bolt", "nut")),
            "drop bolt nut:",
            ["delete from stock where item='bolt'", "delete from stock where item='nut'"],
        ),
        (
            Request("move", ("bolt", "nut"), 42),
            "move 42 bolt nut:",
            ["update stock set num=num-42 where item='bolt'", "update stock set num=num+42 where item='nut'"],
        ),
    ],
)
def test_a_request_without_reading_is_done_by_its_prompt_alone(
    request_: Request, prompt: str, statements: list[str]
) -> None:
    assert prompt_of(request_) == prompt
    assert reference_of(request_) == statements


def test_a_request_that_has_to_read_sets_what_the_start_state_holds() -> None:
    copied, restored = Request("copy", ("bolt", "nut")), Request("restore", ("bolt",), 37)
    assert (prompt_of(copied), prompt_of(restored)) == ("copy bolt nut:", "restore bolt 37:")
    amount, (item, noted) = tables_of(copied).amounts["bolt"], tables_of(restored).entries[37]
    assert reference_of(copied) == [
        "select num from stock where item='bolt'",
        f"update stock set num={amount} where item='nut'",
    ]
    assert item == "bolt"
    assert reference_of(restored) == [
        "select num from ledger where id=37",
        f"update stock set num={noted} where item='bolt'",
    ]


@given(requests())
def test_the_reference_reaches_the_goal_and_nothing_less_does(request_: Request) -> None:
    statements = reference_of(request_)
    # What is read changes nothing; without the last change the end state is another one, the start state included.
    for num_played in range(len(statements) + 1):
        database = database_of(request_)
        steps = [database.step(f"{{{statement}}}") for statement in statements[:num_played]]
        assert not any(step.failed or step.end for step in steps)
        end = database.step("done").end
        assert end is (End.SUCCESS if num_played == len(statements) else End.POLICY_FAILURE)


@given(requests())
def test_what_is_read_is_the_number_that_is_written(request_: Request) -> None:
    if (read := plan_of(request_).read) is not None:
        shown = database_of(request_).step(f"{{{stock.read_by(*read)}}}").observation
        assert f"num={json.loads(shown)[0]} " in reference_of(request_)[1]


@pytest.mark.parametrize(("kind", "names"), [("drop", ("first", "second")), ("move", ("taken", "given"))])
def test_each_of_two_changes_is_a_milestone(kind: str, names: tuple[str, str]) -> None:
    request_ = draw(kind, random.Random(3), held_out=False)
    database, (first, second) = database_of(request_), reference_of(request_)
    half, whole = database.step(f"{{{first}}}"), database.step(f"{{{second}}}")
    assert (half.milestones, half.step_score) == (dict(zip(names, (1.0, 0.0), strict=True)), 0.5)
    assert (whole.milestones, whole.step_score) == (dict(zip(names, (1.0, 1.0), strict=True)), 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_ledger_is_blocked(kind: str) -> None:
    request_ = draw(kind, random.Random(4), held_out=False)
    changed = stock.change_by(kind, stock.LEDGER, "bolt", "-7" if kind == "move" else "7")
    assert database_of(request_).step(f"{{{changed}}}").end is End.SAFETY_BLOCKED


def test_pool_and_held_out_set_are_distinct_and_share_no_prompt() -> None:
    pool, held_out = rows(COUNTS, 0, held_out=False), rows(COUNTS, 0, held_out=True)
    for name in ("id", "prompt"):
        values = [row[name] for row in (*pool, *held_out)]
        assert len(set(values)) == len(values) == 2 * 30 * len(KINDS)
    assert {row["domain"] for row in held_out} == {f"stock-{kind}" for kind in KINDS}
    assert rows(COUNTS, 0, held_out=False) == pool
    assert rows(COUNTS, 1, held_out=False) != pool


def test_about_a_tenth_is_held_out_and_where_there_are_fewer_all_are_taken() -> None:
    # 24 x 23 = 552 ordered pairs of items; the count of a tenth of them deviates by sqrt(552 x 0.1 x 0.9) = 7.
    taken, others = rows({"drop": 10**6}, 0, held_out=True), rows({"drop": 10**6}, 0, held_out=False)
    assert len(taken) + len(others) == 552
    assert abs(len(taken) - 55.2) < 21
    requests_of = [
        Request("drop", (first, second)) for first in stock.ITEMS for second in stock.ITEMS if first != second
    ]
    assert {row["prompt"] for row in taken} == {prompt_of(r) for r in requests_of if is_held_out(r)}


@given(requests())
def test_no_two_amounts_of_a_start_state_are_equal(request_: Request) -> None:
    tables = tables_of(request_)
    amounts = [*tables.amounts.values(), *(amount for _, amount in tables.entries.values())]
    # Where the other table is read by an item there is one row at most.
    assert len({item for item, _ in tables.entries.values()}) == len(tables.entries)
    assert (len(tables.amounts), len(tables.entries)) == (stock.NUM_ROWS, stock.NUM_ENTRIES)
    assert len(set(amounts)) == len(amounts) == stock.NUM_ROWS + stock.NUM_ENTRIES
    assert request_.number not in amounts
    assert set(request_.items) <= tables.amounts.keys() or request_.kind == "add"
