"""What a journal should have and has not, in sentences, and what is shown without it. Reads also a running run."""

from __future__ import annotations

from pathlib import Path

from stream_grpo.buffer import layout
from stream_grpo.buffer.chain import cut_logs, missing_logs
from stream_grpo.buffer.recovery import retained, rows_of
from stream_grpo.buffer.transitions import Kind, Transition


def what_is_missing(directory: Path) -> list[str]:
    """A sentence for each file that is missing, or is not the one that was closed, by what the newest log says.

    What is missing twice has not left between a look at the log, which says so before, and one at the folder.
    """
    found = _missing(directory)
    return found and [sentence for sentence in _missing(directory) if sentence in found]


def _missing(directory: Path) -> list[str]:
    log, rows = _newest(directory)
    retention = retained(log, rows)
    found = []
    if rows and rows[-1].kind is Kind.FOLLOWED:
        found.append(
            f"{layout.log_name(rows[-1].segment)} is missing: everything is shown as it was when {log.name} ended"
        )
    found += [
        f"{name} is missing: groups that came in under it are not shown, others as far as the logs that are there say"
        for name in missing_logs(directory, retention)
    ]
    # A new log has its name before the one that it follows has its last row.
    is_beginning = layout.log_name(layout.number_of(log) - 1) if len(rows) == 1 else ""
    found += [
        f"{name} does not end by naming the log after it: it was cut, or another file was copied over it; what came "
        f"after its end is not shown"
        for name in cut_logs(directory, retention)
        if name != is_beginning
    ]
    return found + [
        f"{layout.segment_name(number)} is missing: the {segment.num_groups:,} groups in it are not shown"
        for number, segment in retention.segments.items()
        if not (directory / layout.segment_name(number)).exists()
    ]


def _newest(directory: Path) -> tuple[Path, list[Transition]]:
    """The newest log and its rows; one that was followed meanwhile is not the newest."""
    while True:
        log = list(layout.logs(directory).values())[-1]
        rows = list(rows_of(log))
        if not (rows and rows[-1].kind is Kind.FOLLOWED and log.with_name(layout.log_name(rows[-1].segment)).exists()):
            return log, rows
