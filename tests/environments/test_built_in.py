"""The environments that are built in: the calculator, and the task on SQLite."""

import json
from typing import Any

import pytest

from stream_grpo.environments.calculator import Calculator
from stream_grpo.environments.protocol import End, Step, snapshot_hash
from stream_grpo.environments.records import Records
from stream_grpo.rewards.messages import ProblemRow

ROW: dict[str, Any] = {
    "setup": "create table stock (item text, num int); insert into stock values ('bolt', 3), ('nut', 5);"
    "create table ledger (what text); insert into ledger values ('opened');",
    "goal": [["select num from stock where item = 'bolt'", [[4]]]],
    "milestones": {"read": ["select count(*) from stock where num > 3 and item = 'bolt'", [[1]]]},
    "protected": ["ledger"],
}


def calculator(**options: Any) -> Calculator:
    made = Calculator(
        ProblemRow(problem_id="p", answer="51", verifier="exact"), open="[", close="]", body="plain", **options
    )
    made.reset(0, None)
    return made


def records(**columns: Any) -> Records:
    return Records(ProblemRow(problem_id="p", answer="", verifier="environment", extra={**ROW, **columns}))


def call(query: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'sql', 'arguments': {'query': query}})}</tool_call>"


@pytest.mark.parametrize(
    ("code", "shown"), [("12+39", "51"), ("-(7-10)*2", "6"), ("7//2", "3"), ("1/4", "0.25"), ("-7 % 3", "2")]
)
def test_a_sum_is_shown_as_python_prints_it(code: str, shown: str) -> None:
    assert calculator().step(f"[{code}]") == Step(observation=shown, tool="python")


def test_an_action_without_a_call_is_the_answer() -> None:
    assert calculator().step("#51").end is End.ANSWERED


def test_a_call_that_is_not_valid_is_told_so_and_ends_nothing() -> None:
    step = calculator().step("[12+39")
    assert (step.end, step.observation, step.tool) == (None, "error: the call is not closed by ']'", None)


@pytest.mark.slow
def test_a_sum_too_deep_for_this_process_is_left_to_the_sandbox() -> None:
    tool = calculator(time_limit_s=5.0, allow_weaker_sandbox=True)
    assert tool.step(f"[{'+'.join(['1'] * 1000)}]").observation == "1000"
    assert tool.step("[max(2,\n 3)  # the larger]").observation == "3"


@pytest.mark.slow
def test_other_code_runs_in_the_sandbox_with_its_limits() -> None:
    tool = calculator(time_limit_s=1.0, allow_weaker_sandbox=True)
    assert tool.step("[sum(range(5))]").observation == "10"
    assert tool.step("[x = 3\nprint(x * x)]").observation == "9"
    assert tool.step("[1 / 0]").observation == "error: ZeroDivisionError: division by zero"
    assert tool.step("[while True: pass]").observation.startswith("error: the code")


def test_equal_starts_have_equal_snapshots_and_a_snapshot_is_a_start() -> None:
    one, two = records().reset(1, None), records().reset(2, None)
    assert one.snapshot == two.snapshot
    assert records(setup="create table stock (item text)").reset(1, one.snapshot).snapshot == one.snapshot
    assert snapshot_hash(one.snapshot) != snapshot_hash(records(setup="create table t (a)").reset(1, None).snapshot)


def test_the_end_state_decides() -> None:
    task = records()
    task.reset(0, None)
    assert task.step(call("select num from stock where item = 'bolt'")).observation == "[3]"
    assert task.step("done").end is End.POLICY_FAILURE
    task = records()
    task.reset(0, None)
    changed = task.step(call("update stock set num = 4 where item = 'bolt'"))
    # The one milestone is reached by this step: its whole share.
    assert (changed.observation, changed.step_score, changed.milestones) == ("ok", 1.0, {"read": 1.0})
    assert task.step("done").end is End.SUCCESS


@pytest.mark.parametrize(
    "query",
    ["delete from ledger", "insert into LEDGER values ('x')", "drop table ledger", "alter table ledger rename to l"],
)
def test_a_write_to_a_protected_table_ends_the_trajectory(query: str) -> None:
    task = records()
    task.reset(0, None)
    step = task.step(call(query))
    assert step.end is End.SAFETY_BLOCKED
    assert "ledger" in step.evidence.lower()


@pytest.mark.parametrize(
    "query",
    [
        "attach database '/tmp/x' as x",
        "pragma writable_schema = 1",
        "select load_extension('x')",
        "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n",
        "select * from nothing",
        "select 1; select 2",
        "select replace(printf('%.*c', 1000000, 'x'), 'x', 'xx')",  # above 2^20 bytes
        "create temp table stock as select 'bolt' item, 4 num",
        "create temp view stock as select 'bolt' item, 4 num",
        "create temp trigger t after insert on stock begin select 1; end",
    ],
)
def test_what_a_query_may_not_do_is_an_error_that_it_reads(query: str) -> None:
    task = records()
    task.reset(0, None)
    step = task.step(call(query))
    assert step.end is None
    assert step.observation.startswith("error: ")


def test_a_temporary_object_does_not_stand_for_the_end_state() -> None:
    task = records()
    task.reset(0, None)
    task.step(call("create temp view stock as select 'bolt' item, 4 num"))
    assert task.step("done").end is End.POLICY_FAILURE


def test_a_row_without_its_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="no column 'goal'"):
        Records(ProblemRow(problem_id="p", answer="", verifier="environment", extra={"setup": ""}))
    with pytest.raises(ValueError, match="queries with the rows"):
        records(goal=["select 1"])
