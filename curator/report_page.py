"""A report as a page of HTML that needs nothing else, and as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from curator.report_figures import CAUSES, PoolReport

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .8rem 0; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td { overflow-wrap: anywhere; max-width: 30rem; } td.number { text-align: right; white-space: nowrap; }
p { max-width: 46rem; color: #444; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing from anywhere."""
MAX_CELL = 400
BAR = 24
Cell = str | int | float | None


def page(report: PoolReport, pictures: Iterable[tuple[str, str, str]]) -> str:
    """The whole page; pictures are title, sentence and an `svg` element. All text of the pool is escaped."""
    parts = [
        f"<h1>{escape(report.pool)}</h1>",
        f"<p>{escape(headline(report))}</p>",
        *(f"<h2>{escape(title)}</h2><p>{escape(text)}</p>{svg}" for title, text, svg in pictures),
    ]
    for title, header, rows in tables(report):
        parts.append(f"<h2>{escape(title)}</h2>{_table(header, rows)}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(report.pool)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def text(report: PoolReport) -> str:
    """The same for a terminal, with bars for pictures."""
    lines = [report.pool, headline(report)]
    causes = {cause: num for cause, num in report.causes().items() if num}
    if total := sum(causes.values()):
        lines += ["", "groups"]
        lines += [f"  {_bar(num / total)} {num / total:5.1%}  {cause}" for cause, num in causes.items()]
    for title, header, rows in tables(report):
        lines += ["", title, *_columns(header, rows)]
    return "\n".join(lines)


def headline(report: PoolReport) -> str:
    """The pool in a sentence."""
    fates = ", ".join(f"{fate} {num}" for fate, num in sorted(report.fates.items()))
    outcomes = f"{report.num_outcomes} groups ({fates})" if report.num_outcomes else "no group so far"
    return f"{report.num_problems} problems, version {report.version}; {outcomes}"


def tables(report: PoolReport) -> list[tuple[str, Sequence[str], list[Sequence[Cell]]]]:
    """Title, header and rows of each table that the pool has something for."""
    found: list[tuple[str, Sequence[str], list[Sequence[Cell]]]] = [
        (
            "Domains",
            ("domain", "problems", "sampled", "groups", "tokens", "rate", *(c.partition(":")[0] for c in CAUSES)),
            [
                (d.domain, d.num_problems, d.num_sampled, d.num_groups, d.num_tokens, d.rate, *d.causes)
                for d in report.domains
            ],
        )
    ]
    if report.imported is not None:
        found.append(("Import: what became of the rows", ("rows", "number"), _counted(report.imported)))
    if report.scored is not None:
        found.append(("Scored by a model", ("problems", "number"), _counted(report.scored)))
    if report.quarantine is not None:
        names = list(dict.fromkeys(name for row in report.quarantine for name in row)) or ["problem_id"]
        found.append(
            (
                "Quarantine: a wrong gold or a broken verifier, to be looked at",
                names,
                [[_cell(row.get(name)) for name in names] for row in report.quarantine],
            )
        )
    return found


def _counted(figures: Mapping[str, Any], before: str = "") -> list[Sequence[Cell]]:
    rows: list[Sequence[Cell]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            rows += _counted(value, f"{before}{name}: ")
        else:
            rows.append((f"{before}{name}", _cell(value)))
    return rows


def _cell(value: Any) -> Cell:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, default=str)


def _shown(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}"
    shown = str(value)
    return shown if len(shown) <= MAX_CELL else f"{shown[:MAX_CELL]}..."


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="number">{_shown(cell)}</td>'
            if isinstance(cell, int | float)
            else f"<td>{escape(_shown(cell))}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _columns(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Aligned; a control character of a data set could rewrite the terminal, and is shown as a question mark."""
    cells = [list(header), *([_printable(_shown(cell))[:60] for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def _printable(shown: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in shown)


def _bar(share: float) -> str:
    return ("#" * round(share * BAR)).ljust(BAR, ".")
