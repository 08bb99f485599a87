"""What the `curator` command says and asks: lines and a bar on the error stream, so that results stand alone."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from curator.errors import CuratorError
from curator.leftovers import locked_folder

Advance = Callable[..., None]
"""(amount, what is done, total): further bytes or rows are done; an amount of 0 says what comes next."""
PROGRESS_EVERY_S = 0.1
"""Rows are read faster than a bar can be drawn."""


def check_asking(dry_run: bool, yes: bool, as_json: bool) -> None:
    """Raise CuratorError where a question would find nobody to answer it."""
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise CuratorError("nobody is there to be asked: choose --dry-run to report alone, or --yes to write")


def agreed(yes: bool, question: str) -> bool:
    """Whether to go on; asked unless that was said before."""
    return yes or typer.confirm(question, err=True)


def say(text: str) -> None:
    """One line."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


@contextmanager
def scratch(beside: Path | None) -> Iterator[Path]:
    """A folder for staged problems, gone at the end: on the disk of a pool to be, or where temporary files are.

    What an import that was killed has left there goes first.
    """
    parent = Path(tempfile.gettempdir()) if beside is None else beside.parent
    parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(parent, ".curator-") as folder:
        yield folder


@contextmanager
def progress() -> Iterator[Advance]:
    """A bar on the error stream, where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = bar.add_task("reading", total=None)
    waiting, shown_at = 0, 0.0

    def advance(amount: int, what: str, total: int | None = None) -> None:
        nonlocal waiting, shown_at
        waiting += amount
        if amount and time.monotonic() < shown_at + PROGRESS_EVERY_S:
            return
        shown_at = time.monotonic()
        if amount == 0:
            # What follows has no length that is known; a question must not be drawn over.
            bar.stop()
            say(what)
            return
        if not bar.live.is_started and not bar.finished:
            bar.start()
        bar.update(task, description=what, advance=waiting, total=total)
        waiting = 0

    try:
        yield advance
    finally:
        bar.stop()


def finite(value: float | None) -> float | None:
    """The value of an option. Raises BadParameter for `nan` and `inf`, which pass every comparison with a bound."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to compare with")
    return value


@contextmanager
def settings() -> Iterator[None]:
    """What a setting is refused for, as an error for the user."""
    try:
        yield
    except ValueError as error:
        raise CuratorError(str(error)) from error


@contextmanager
def errors() -> Iterator[None]:
    """Show what a user can act on as one message, not as a traceback; exit code 2."""
    try:
        yield
    except (CuratorError, OSError) as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
