"""docs/benchmarks.md: a section a script, which that script alone writes, with command, machine and date."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.made import made_with, said

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
QUICK = "*Of `--quick`: a look, not a measurement.*"
_HEAD = """# Benchmarks

Every section is written by the script that it names, from what that script measured on one machine. Ratios are within
one script. A script that is called again goes on where it stopped.
"""


class Goal(NamedTuple):
    """A figure and what it is to be."""

    name: str
    value: float | None
    """None: not measured yet."""
    goal: float
    at_least: bool = True
    """Or under."""

    @property
    def is_met(self) -> bool:
        """Whether it is measured and as it is to be."""
        return self.value is not None and (self.value >= self.goal if self.at_least else self.value < self.goal)

    def as_row(self) -> tuple[str, str, str, str]:
        """Name, value, goal, and by how much it is missed."""
        wanted = f"{'at least' if self.at_least else 'under'} {self.goal:g}"
        if self.value is None:
            return f"`{self.name}`", "not measured", wanted, ""
        missed = (self.goal - self.value) / self.goal if self.at_least else (self.value - self.goal) / self.goal
        return f"`{self.name}`", f"{self.value:.3g}", wanted, "met" if self.is_met else f"missed by {missed:.0%}"


GOAL_HEADS = ("ratio", "measured", "goal", "")


def write_section(
    path: Path,
    script: str,
    title: str,
    text: str,
    *,
    is_quick: bool,
    command: str = "",
    made: Sequence[Mapping[str, Any]] = (),
) -> bool:
    """Put a section in the place of the one that the script has written before; False where it is left as it is.

    `made`: of the results that it is made of, as `made_with` says it; by default of now. What `--quick` finds never
    takes the place of a measurement.
    """
    page = path.read_text(encoding="utf-8") if path.exists() else _HEAD
    begin, end = f"<!-- {script} -->", f"<!-- end of {script} -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}\n", page, flags=re.DOTALL)
    if is_quick and found and QUICK not in found.group():
        return False
    made_by = f"`{command or f'scripts/{script}'}`, {said(made or [made_with()])}."
    parts = [begin, f"## {title}", "", made_by, *(["", QUICK] if is_quick else []), "", text.strip(), "", end, ""]
    section = "\n".join(parts)
    page = page.replace(found.group(), section) if found else f"{page.rstrip()}\n\n{section}"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
    return True


def put(
    path: Path,
    script: str,
    title: str,
    text: str,
    *,
    is_quick: bool,
    command: str = "",
    made: Sequence[Mapping[str, Any]] = (),
    image: str = "",
    draw: Callable[[Path], None] | None = None,
    say: Callable[[str], None],
) -> None:
    """`write_section`, and its picture in `images/` beside the page, named `image`; both or neither."""
    drawn = None
    if draw is not None:
        drawn = path.parent / "images" / f".{image}"
        drawn.parent.mkdir(parents=True, exist_ok=True)
        draw(drawn)
    if write_section(path, script, title, text, is_quick=is_quick, command=command, made=made):
        if drawn is not None:
            os.replace(drawn, drawn.with_name(image))
        return
    if drawn is not None:
        drawn.unlink()
    say(f"{path}: left as it is; it has figures of a whole measurement")


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def goals(found: Sequence[Goal]) -> str:
    """Goals as a table."""
    return table(GOAL_HEADS, [goal.as_row() for goal in found])
