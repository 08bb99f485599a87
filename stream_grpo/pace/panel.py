"""A run's pace as a panel for a terminal. Pure: what comes in is drawn."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stream_grpo.pace.watch import Pace


def panel(pace: Pace | None, num_steps: int) -> RenderableType:
    """The panel; before there is a pace, that it is waited for."""
    if pace is None:
        return Panel(Text("the first learner step is under way", style="dim"), title=f"0 of {num_steps} steps")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("tokens", f"{pace.sampled_per_s:,.0f} sampled, {pace.trained_per_s:,.0f} trained a second")
    rows.add_row("groups", ", ".join(f"{num:,} {name.replace('_', ' ')}" for name, num in pace.queue.items()))
    parts = " + ".join(f"{value:.1f} {name.replace('_', ' ')}" for name, value in pace.age_parts.items())
    rows.add_row("age", f"{pace.age_mean:.1f} steps in the mean ({parts}), {pace.age_max} at most")
    rows.add_row("pace", Text(pace.bottleneck, style="bold"))
    for sentence in pace.alarms:
        rows.add_row(Text("alarm", style="not dim bold yellow"), Text(sentence, style="yellow"))
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    left = "" if pace.left_s is None else f"{clock(pace.left_s)} left"
    bar.add_row(ProgressBar(total=1.0, completed=pace.share_done), left)
    return Panel(Group(rows, bar), title=_title(pace), title_align="left")


def _title(pace: Pace) -> str:
    """How far the run has come, towards both of its ends."""
    if pace.max_tokens is None:
        return f"{pace.step} of {pace.num_steps} steps"
    return f"{pace.step} of at most {pace.num_steps} steps, {pace.num_tokens:,} of {pace.max_tokens:,} tokens"


def clock(seconds: float) -> str:
    """A span of time as people read it: 42 s, 3:07, 1:02:09, 3 days 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole >= 2 * 86400:
        return f"{whole // 86400} days {whole % 86400 // 3600} h"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
