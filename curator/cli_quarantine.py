"""`curator quarantine`: problems that look broken, put aside and put back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from curator.console import errors, say
from curator.errors import CuratorError

if TYPE_CHECKING:
    from curator.quarantine import Entry

MAX_SHOWN_CHARACTERS = 100


def quarantine(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="A folder that import made.", show_default=False)],
    remove: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Put this problem aside: no run draws it. Repeatable.")
    ] = None,
    remove_suspects: Annotated[bool, typer.Option("--remove-suspects", help="Put all that look broken aside.")] = False,
    restore: Annotated[list[str] | None, typer.Option(metavar="ID", help="Put it back. Repeatable.")] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Rollouts of a group, as in the run.")] = 8,
    text_numbers: Annotated[int, typer.Option(min=0, max=256, help="As curator.text_numbers of the run.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List problems that look broken by the pool's outcomes, and those put aside; put some aside or back.

    A suspect fails although what is like it passes: a wrong gold or a broken verifier, to be looked at. What is put
    aside stays in the pool and comes back with --restore. A curator that runs holds the pool; stop the run first, and
    its next start draws accordingly.
    """
    with errors():
        from curator import quarantine as aside
        from curator.pool import Pool

        opened = Pool.open(pool)
        suspects = aside.suspects_of(opened, group_size=group_size, text_numbers=text_numbers)
        chosen = [*(remove or []), *([entry.problem_id for entry in suspects] if remove_suspects else [])]
        if both := set(chosen) & set(restore or []):
            raise CuratorError(f"{min(both)!r} is to be removed and restored; choose one")
        try:
            if restore:
                say(f"{pool}: {aside.put_back(opened, restore)} problems put back")
            if chosen:
                say(f"{pool}: {aside.put_aside(opened, chosen, suspects)} problems put aside")
        finally:
            opened.close()
        left = [entry for entry in suspects if entry.problem_id not in chosen]
        kept = aside.quarantined(opened)
        if as_json:
            typer.echo(json.dumps({"suspects": [*map(asdict, left)], "quarantined": [*map(asdict, kept)]}))
        else:
            typer.echo("\n".join([*_lines("suspects", left), *_lines("put aside", kept)]))


def _lines(title: str, entries: Sequence[Entry]) -> list[str]:
    lines = [f"{title}: {len(entries)}"]
    for entry in entries:
        seen = f"0 of {entry.scored} passed, expected {entry.expected_rate:.0%}" if entry.scored else "named by hand"
        lines.append(f"  {_short(entry.problem_id)}  {seen}  gold {_short(entry.answer)}  {_short(entry.prompt)}")
    return lines


def _short(text: str) -> str:
    plain = " ".join(text.split())
    plain = "".join(character for character in plain if character.isprintable())
    return plain if len(plain) <= MAX_SHOWN_CHARACTERS else plain[: MAX_SHOWN_CHARACTERS - 1] + "…"
