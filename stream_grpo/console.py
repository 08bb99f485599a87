"""What a person sees in the terminal: one line a step, a panel below them, tables at the end."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stream_grpo.pace.panel import clock, panel
from stream_grpo.pace.watch import PaceWatch

_STYLES: Mapping[str, str] = {
    "title": "bold",
    "heading": "bold cyan",
    "fact": "dim",
    "context": "yellow",
    "trunk": "yellow",
}


_COMMANDS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")
PACE_EVERY_S = 60.0
"""Where there is no panel, how often a line says what holds the run up."""


class Console:
    """Plain lines when not a terminal; a panel below them when it is one."""

    def __init__(self, stderr: bool = False) -> None:
        self._rich = RichConsole(stderr=stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._num_steps = 0
        self._pace = PaceWatch(0)
        self._next_pace_at = 0.0

    def say(self, text: str) -> None:
        """One line."""
        self._rich.print(visible(text), markup=False)

    def error(self, text: str) -> None:
        """One message, marked as an error."""
        self._rich.print("error:", style="bold red", end=" ")
        self.say(text)

    @contextmanager
    def steps(self, total: int, *, max_tokens: int | None = None) -> Iterator[None]:
        """While learner steps are made: keep a panel below the lines, where there is a terminal.

        `max_tokens`: sampled for training, end the run before `total` steps.
        """
        self._num_steps, self._pace = total, PaceWatch(total, max_tokens=max_tokens)
        if not self._rich.is_terminal:
            yield
            return
        with Live(panel(None, total), console=self._rich, refresh_per_second=2, transient=True) as self._live:
            yield
        self._live = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Show a line of metrics."""
        self._pace.take(line)
        match line["event"]:
            case "step":
                self.step(line, self._num_steps)
            case "evaluation":
                self.evaluation(line)
            case "warning":
                self.say(f"{line['source']}: {line['message']}")
            case "alarm":
                self.alarm(line)
            case "control":
                self.say(f"control   {line['setting']} from {line['before']} to {line['after']}: {line['reason']}")
        if self._live is not None:
            self._live.update(panel(self._pace.now(), self._num_steps))
        elif line["event"] == "status":
            self._say_pace(line["time_s"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the panel away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say_pace(self, now_s: float) -> None:
        """Now and then what the panel would say."""
        if not self._next_pace_at:
            self._next_pace_at = now_s + PACE_EVERY_S
        if now_s < self._next_pace_at or (pace := self._pace.now()) is None:
            return
        self._next_pace_at = now_s + PACE_EVERY_S
        left = "" if pace.left_s is None else f"; {clock(pace.left_s)} left"
        self.say(f"pace      {pace.bottleneck}; {pace.sampled_per_s:,.0f} tokens/s sampled{left}")

    def alarm(self, record: Mapping[str, Any]) -> None:
        """An alarm, and the likely cause."""
        self._rich.print(f"alarm ({record['name']}):", style="bold yellow", end=" ", markup=False)
        self.say(f"{record['sentence']}\n    likely cause: {record['cause']}")

    def step(self, record: Mapping[str, Any], total: int) -> None:
        """The line of one learner step."""
        groups = record["groups"]
        ended = groups["trained"] + groups["no_signal"]
        signal = f"{groups['trained'] / ended:.0%}" if ended else "-"
        self.say(
            f"step {record['step']:>4}/{total}  reward {_number(record['reward_mean'])}  "
            f"age {record['age_mean']:.1f} max {record['age_max']}  tokens {record['response_tokens_mean']:.0f}  "
            f"grad {_number(record.get('grad_norm'))}  clip {_number(record.get('clip_share_high'))}  "
            f"signal {signal}  waited {record['waited_s']:.2f} s  step {record['step_s']:.2f} s"
        )

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """The line of one evaluation during training."""
        headline = record["heldout"]["headline"]
        self.say(
            f"step {record['step']:>4} evaluated  held-out pass@1 {_percent(headline['pass_at_1'])} "
            f"[{_interval(headline)}] of {headline['num_problems']} problems  "
            f"{record['num_tokens']:,} tokens in {record['seconds']:.2f} s  "
            f"newer weights waited {record['pinned_s']:.2f} s"
        )

    def scores(self, scores: Mapping[str, Mapping[str, Any]], title: str = "held-out pass@1") -> None:
        """One evaluation by domain."""
        table = Table("domain", "pass@1", "95% interval", "problems", title=title, title_justify="left")
        for domain, score in scores.items():
            table.add_row(domain, _percent(score["pass_at_1"]), _interval(score), str(score["num_problems"]))
        self._rich.print(table)

    def presets(self, rows: Iterable[tuple[str, str, str]], default: str) -> None:
        """The named recipes: name, source, what each trades. Long text is wrapped, at a terminal or not."""
        table = Table(title=f"presets; the default is {default}", title_justify="left", show_lines=True)
        table.add_column("name", no_wrap=True)
        table.add_column("source", overflow="fold", max_width=24)
        table.add_column("what it trades")
        for row in rows:
            table.add_row(*row)
        self._rich.print(table, soft_wrap=False)

    def table(self, columns: Iterable[str], rows: Iterable[Iterable[str]], numbers: Container[str] = ()) -> None:
        """A table at a terminal, cells between tabs where the output goes elsewhere; `numbers` are flush right."""
        if not self._rich.is_terminal:
            for row in (columns, *rows):
                self._rich.file.write("\t".join(visible(cell, but="") for cell in row) + "\n")
            return
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        self._rich.print(table, soft_wrap=False)

    def block(self, style: str, text: str) -> None:
        """A piece of a longer text: a `title`, a `heading`, a `fact`, some `text`, `trunk`, `context` or `tokens`."""
        if style == "heading":
            self.say("")
        prefix = {"heading": "-- ", "context": "[context] ", "trunk": "[trunk, not trained] "}.get(style, "")
        self._rich.print(Text(visible(prefix + text)), style=_STYLES.get(style))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """The end of a run."""
        before, after = summary["heldout_before"], summary["heldout_after"]
        if before:
            table = Table("domain", "before", "after", "problems", title="held-out pass@1", title_justify="left")
            for domain, score in before.items():
                now = after.get(domain, score)
                cells = (
                    f"{_percent(score['pass_at_1'])} [{_interval(score)}]",
                    f"{_percent(now['pass_at_1'])} [{_interval(now)}]",
                )
                table.add_row(domain, *cells, str(score["num_problems"]))
            self._rich.print(table, markup=False)
            rise = summary["heldout_rise"]
            self.say(
                f"rise {rise['mean']:+.3f}, 95% interval {rise['low']:+.3f} to {rise['high']:+.3f}, paired by problem"
            )
        tokens, age, gap = summary["tokens"], summary["age"], summary["probe_gap"]
        self.say("tokens   " + ", ".join(f"{fate} {count:,}" for fate, count in tokens.items() if count))
        self.say("groups   " + ", ".join(f"{fate} {count:,}" for fate, count in summary["groups"].items() if count))
        self.say(f"age      mean {age['mean']:.2f}, max {age['max']}")
        self.say(f"probe    logprob gap mean {gap['mean']:.1e}, max {gap['max']:.1e} over {gap['num_tokens']:,} tokens")
        busy = summary["busy_s"]
        self.say(
            f"time     {summary['steps']} steps, {summary['wall_s']:.0f} s in all; "
            f"loop {summary['loop_wall_s']:.0f} s, sampler busy {busy['sampler']:.0f} s, "
            f"learner busy {busy['learner']:.0f} s, overlap {summary['overlap']:.2f}"
        )
        self.say(f"ledger   {'closes' if summary['ledger_closes'] else 'DOES NOT CLOSE'}")
        self.say(f"model    {summary['model_dir']}")


def visible(text: str, *, but: str = "\n\t") -> str:
    """The text with control characters, and those that turn the direction of writing, as escapes.

    What a model writes would otherwise command the terminal.
    """
    return _COMMANDS.sub(lambda found: found[0] if found[0] in but else ascii(found[0])[1:-1], text)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _interval(score: Mapping[str, Any]) -> str:
    return "-" if score["low"] is None else f"{100 * score['low']:.1f} to {100 * score['high']:.1f}"
