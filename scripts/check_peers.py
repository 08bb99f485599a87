"""Compares our off-policy maths with TRL and verl as installed: d loss / d logprob of every token, and the loss.

Exit code 1 where a difference has no explanation, or where a peer cannot be imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

import torch
from peers.batch import Batch, Draw, Result, draw
from peers.cell import Cell, locate
from peers.oracle import Flags

TOLERANCE = 1e-6
"""Of the largest |d loss / d logprob| of a batch; of the loss likewise."""
NUM_ORACLE_BATCHES = 50
"""Batches of a cell without differences on which the slow oracle is asked as well."""


class Verdict(NamedTuple):
    """How one cell came out."""

    word: str
    """equal, explained or unexplained."""
    num_differing: int
    """Batches on which the peer and we differ."""
    largest: float
    """The largest such difference, as a share of the batch's largest |d loss / d logprob| or of its loss."""
    note: str
    """Where it comes from, or what is not explained."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000, help="random batches per cell")
    parser.add_argument("--seed", type=int, default=0, help="of the random batches")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--json", action="store_true", help="a last line of counts for programs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    cells = [cell for cell in all_cells() if arguments.only in f"{cell.peer} {cell.loss} {cell.options}"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trl", "verl", "torch"))
    print(f"{versions}; {len(cells)} cells, {arguments.batches} batches each, float64")
    kinds: tuple[Draw, ...] = ("mixed", "trained", "beyond")
    batches = {kind: draw(kind, arguments.batches, seed=arguments.seed) for kind in kinds}
    start, verdicts = time.monotonic(), []
    # Forked, so that every process has the peers as they are imported here.
    with multiprocessing.get_context("fork").Pool(arguments.jobs, _share, (cells, batches)) as pool:
        for cell, verdict in zip(cells, pool.imap(_judge, range(len(cells))), strict=True):
            verdicts.append(verdict)
            print(row(cell, verdict), flush=True)
    explain(cells, verdicts)
    words = [verdict.word for verdict in verdicts]
    counts = {"compared": len(words)} | {word: words.count(word) for word in ("equal", "explained", "unexplained")}
    print(f"\n{counts['compared']} cells in {time.monotonic() - start:.0f} s: {counts}")
    if arguments.json:
        print(json.dumps(counts))
    return int(counts["unexplained"] > 0 or not cells)


def all_cells() -> Iterator[Cell]:
    """Every cell; an ImportError here is a failed check."""
    # The peers are imported here and not above, so that --help needs neither.
    from peers import cells_trl, cells_verl

    yield from cells_trl.cells()
    yield from cells_verl.cells()


_SHARED: list[tuple[list[Cell], dict[Draw, list[Batch]]]] = []


def _share(cells: list[Cell], batches: dict[Draw, list[Batch]]) -> None:
    torch.set_num_threads(1)
    _SHARED.append((cells, batches))


def _judge(index: int) -> Verdict:
    cells, batches = _SHARED[0]
    return judge(cells[index], batches[cells[index].draw])


def row(cell: Cell, verdict: Verdict) -> str:
    """One line of the table."""
    differing = f"{verdict.num_differing:5} differ, at most {verdict.largest:.1e}" if verdict.num_differing else ""
    line = f"{cell.peer:5} {cell.loss:38} {cell.options:52} {verdict.word:12} {differing:29} {verdict.note}"
    return line.rstrip()


def judge(cell: Cell, batches: list[Batch]) -> Verdict:
    """Equal, or explained by the one cause: the oracle agrees with us, and with its flag it agrees with the peer."""
    cause_at = ""
    if cell.cause is not None:
        try:
            cause_at = locate(cell.cause)
        except LookupError as error:
            return Verdict("unexplained", 0, 0.0, str(error))
    plain: Flags = frozenset()
    flagged: Flags = frozenset() if cell.cause is None else frozenset({cell.cause.flag})
    num_differing, largest, raised = 0, 0.0, {}
    for number, batch in enumerate(batches):
        ours = cell.run_ours(batch)
        try:
            peer = cell.run_peer(batch)
        except ZeroDivisionError as error:
            # Only a batch without any gradient may make a peer stumble.
            if bool(ours.gradient.any()):
                raise
            place = raised_at(error)
            raised[place] = raised.get(place, 0) + 1
            continue
        size = difference(peer, ours)
        # A comparison with nan is false: what is not a number differs.
        differs = not size <= TOLERANCE
        num_differing, largest = num_differing + differs, max(largest, size) if differs else largest
        if not (differs or number < NUM_ORACLE_BATCHES):
            continue
        for who, result, flags in (("ours", ours, plain), (cell.peer, peer, flagged)):
            gap = difference(result, cell.run_oracle(batch, flags))
            if not gap <= TOLERANCE:
                note = f"batch {number}: oracle and {who} differ by {gap:.1e}"
                return Verdict("unexplained", num_differing, largest, note)
    stumbles = ", ".join(f"division by zero on {n} batches at {where}" for where, n in raised.items())
    if not num_differing:
        return Verdict("equal", 0, 0.0, stumbles if cell.cause is None else f"cause {cell.cause.flag} not seen")
    return Verdict("explained" if cell.cause is not None else "unexplained", num_differing, largest, cause_at)


def raised_at(error: Exception) -> str:
    """file:line of the innermost frame, in its package."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"


def difference(one: Result, other: Result) -> float:
    """The larger of two gaps: of gradients by their largest entry, of losses by the larger of that entry and loss."""
    scale = max(float(one.gradient.abs().max()), float(other.gradient.abs().max()))
    gap = float((one.gradient - other.gradient).abs().max())
    value_scale = max(scale, abs(one.value), abs(other.value))
    value_gap = abs(one.value - other.value)
    return max(gap / scale if scale else 0.0, value_gap / value_scale if value_scale else 0.0)


def explain(cells: list[Cell], verdicts: list[Verdict]) -> None:
    """Each cause once, with its place and which is right."""
    causes = {
        verdict.note: cell.cause
        for cell, verdict in zip(cells, verdicts, strict=True)
        if verdict.word == "explained" and cell.cause is not None
    }
    for place, cause in causes.items():
        print(f"\n{place}  [{cause.flag}]\n  {cause.what}\n  Right: {cause.right}")


if __name__ == "__main__":
    sys.exit(main())
