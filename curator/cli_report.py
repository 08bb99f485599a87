"""`curator report`: a pool in tables and pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from curator.console import errors, say
from curator.errors import CuratorError


def report(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="A folder that import made.", show_default=False)],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures, which needs nothing else.")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of `curator score`; POOL.scores.parquet where it is there.")
    ] = None,
    import_report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="That `curator import --report FILE` wrote.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what a pool's outcomes say: difficulty by domain, how it moved, why groups had no signal, quarantine."""
    with errors():
        from curator.pool import Pool
        from curator.report_figures import report_of
        from curator.report_page import page, text

        if html is not None and not html.parent.is_dir():
            raise CuratorError(f"--html {html}: no such folder; name a file in one that exists")
        beside = pool.with_name(f"{pool.name}.scores.parquet")
        found = report_of(
            Pool.open(pool),
            scores=scores or (beside if beside.is_file() else None),
            import_report=import_report,
        )
        if as_json:
            # A quarantine list may hold dates.
            typer.echo(json.dumps(dataclasses.asdict(found), default=str))
        else:
            typer.echo(text(found))
        if html is not None:
            from curator.report_pictures import pictures, svg_of  # matplotlib takes a second

            drawn = [(title, told, svg_of(figure)) for title, told, figure in pictures(found)]
            html.write_text(page(found, drawn), encoding="utf-8")
            say(f"{html}: written")
