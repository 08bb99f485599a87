"""What a person sees of a run: lines where there is no terminal, a panel below them where there is one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from stream_grpo.console import PACE_EVERY_S, Console, visible

LINES = [json.loads(line) for line in (Path(__file__).parent / "data" / "metrics_run.jsonl").read_text().splitlines()]
ALARM = {
    "event": "alarm", "time_s": 1e9, "name": "entropy", "sentence": "entropy fell [fast]", "cause": "a rate", "step": 3,
}  # fmt: skip


def shown(lines: list[dict[str, Any]], *, is_terminal: bool) -> str:
    console, out = Console(), io.StringIO()
    console._rich = RichConsole(file=out, force_terminal=is_terminal, width=140, soft_wrap=True, highlight=False)
    with console.steps(50):
        for line in lines:
            console.write(line)
    return out.getvalue()


def test_without_a_terminal_there_is_a_line_a_step_and_one_a_minute_on_what_holds_it_up() -> None:
    text = shown(LINES, is_terminal=False).splitlines()
    num_steps = sum(line["event"] == "step" for line in LINES)
    assert sum(line.startswith("step ") and "reward" in line for line in text) == num_steps
    assert sum("evaluated" in line for line in text) == sum(line["event"] == "evaluation" for line in LINES)
    pace = [line for line in text if line.startswith("pace ")]
    span_s = LINES[-1]["time_s"] - LINES[0]["time_s"]
    assert 1 <= len(pace) <= span_s / PACE_EVERY_S
    assert all("tokens/s sampled" in line for line in pace)
    assert not [line for line in text if "\x1b" in line]


def test_at_a_terminal_a_panel_is_drawn_and_taken_away_at_the_end() -> None:
    text = shown(LINES, is_terminal=True)
    assert "of 50 steps" in text
    assert "sampled," in text
    assert not [line for line in text.splitlines() if line.startswith("pace ")]
    assert text.rstrip().endswith("\x1b[2K")  # the last thing done: the panel's lines are cleared


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_alarm_is_said_with_its_cause_as_it_is_written(is_terminal: bool) -> None:
    text = shown([ALARM], is_terminal=is_terminal)
    assert "alarm (entropy):" in text
    assert "entropy fell [fast]\n" in text
    assert "    likely cause: a rate\n" in text


def test_a_warning_names_who_warns() -> None:
    line = {"event": "warning", "time_s": 0.0, "source": "sampler-0", "message": "all [red]cut[/red] off"}
    assert shown([line], is_terminal=False).strip() == "sampler-0: all [red]cut[/red] off"


def test_a_change_by_the_closed_loop_is_said_with_its_reason() -> None:
    line = {"event": "control", "time_s": 0.0, "setting": "target_policy_age", "before": 3, "after": 2, "reason": "ess"}
    assert shown([line], is_terminal=False).strip() == "control   target_policy_age from 3 to 2: ess"


def test_to_finish_twice_or_without_a_panel_does_no_harm() -> None:
    console = Console()
    console.finish({})
    console._rich = RichConsole(file=io.StringIO(), force_terminal=True, width=100)
    with console.steps(3):
        console.finish({})
    console.finish({"steps": 3})


def test_what_a_model_writes_commands_no_terminal() -> None:
    # A title, a cleared screen and reversed text; line ends and tabs stay.
    assert visible("a\x1b]0;t\x07\u202eb\n\tc\x9b2J") == "a\\x1b]0;t\\x07\\u202eb\n\tc\\x9b2J"
    assert visible("a\tb\n", but="") == "a\\tb\\n"  # in a cell of a table between tabs
    assert visible("0.97 ± 0.01 → ok") == "0.97 ± 0.01 → ok"
