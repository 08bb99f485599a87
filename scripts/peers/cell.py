"""A cell of the table: one loss of one peer with one set of options, ours beside it, and a cause where they differ."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peers.batch import Batch, Draw, Result
from peers.oracle import Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a peer and we differ: one flag of the oracle, and the line that does it."""

    flag: str
    file: str
    """The file in its installed package, for example trl/trainer/grpo_trainer.py."""
    anchor: str
    """A line before the line, to tell it from others like it."""
    line: str
    what: str
    right: str
    """Which of the two is right, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is run on every batch of a draw."""

    peer: str
    loss: str
    options: str
    draw: Draw = "mixed"
    cause: Cause | None = None
    run_peer: Callable[[Batch], Result]
    run_ours: Callable[[Batch], Result]
    run_oracle: Callable[[Batch, Flags], Result]


def locate(cause: Cause) -> str:
    """The cause's place as file:line in the installed version. Raises LookupError where the peer has moved on."""
    package, _, rest = cause.file.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    lines = (Path(spec.submodule_search_locations[0]) / rest).read_text().splitlines()
    found = iter(enumerate((line.strip() for line in lines), start=1))
    for wanted in (cause.anchor, cause.line):
        number = next((i for i, line in found if line.startswith(wanted)), None)
        if number is None:
            raise LookupError(f"{cause.file} has no line {wanted!r}: the cause {cause.flag} is not there any more")
    return f"{cause.file}:{number}"
