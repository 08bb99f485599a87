"""The chain of logs: each knows its number, a closed one that another follows, and the newest which files are there.

So a log that is gone, and one that another file was copied over, is noticed. `recovery.check_first` compares the number
that a snapshot has with the name of its log. A closed log ends with a `followed` row. That row is written after the log
that follows has its name and before anything is added to it: a crash in between leaves a newest log that is its
snapshot alone behind one whose last row is missing or torn, and `close_former` writes that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stream_grpo.buffer import layout
from stream_grpo.buffer.layout import AppendOnly
from stream_grpo.buffer.recovery import LOG_HEADER, check_first, commits, last_row
from stream_grpo.buffer.retention import Retention
from stream_grpo.buffer.transitions import Kind, Transition, encode_transitions
from stream_grpo.errors import JournalError


def followed(number: int, now: float) -> bytes:
    """The commit that ends a log: the one of this number goes on from here."""
    return encode_transitions([Transition(kind=Kind.FOLLOWED, time_s=now, segment=number)])


def is_followed(log: Path, number: int) -> bool:
    """Whether a log ends by naming the one of this number."""
    row = last_row(log) if log.exists() else None
    return row is not None and row.kind is Kind.FOLLOWED and row.segment == number


def check_newest(log: Path, rows: Sequence[Transition]) -> None:
    """Raises JournalError where the newest log that is there is not the newest that there was."""
    if rows and rows[-1].kind is Kind.FOLLOWED:
        gone = log.with_name(layout.log_name(rows[-1].segment))
        raise JournalError(
            f"{gone}: missing; {log.name} ends by naming it, and it alone says what came after; put back a copy of it, "
            f"or begin another run"
        )


def check_former(log: Path, retention: Retention) -> None:
    """Look for the logs before the newest. Raises JournalError where one is missing or not the log that was closed."""
    missing = missing_logs(log.parent, retention)
    if missing:
        raise JournalError(
            f"{log.parent}: missing: {', '.join(missing)}; {log.name} follows them, and segments that they name are "
            f"still there; put back copies, or begin another run"
        )
    for name in cut_logs(log.parent, retention):
        raise JournalError(
            f"{log.with_name(name)}: does not end by naming the log after it: it was cut, or another file was copied "
            f"over it; put back a copy of it, or begin another run"
        )


def close_former(log: Path, rows: Sequence[Transition], now: float) -> None:
    """Where a crash left the log before the newest, `log`, without its last row: write that."""
    number = layout.number_of(log)
    former = log.with_name(layout.log_name(number - 1))
    if len(rows) != 1 or not former.exists() or is_followed(former, number):
        return
    committed = list(commits(former, former.read_bytes()))
    check_first(former, committed[0][0][0] if committed else None)
    end = committed[-1][1] if committed else len(LOG_HEADER)
    if committed and committed[-1][0][-1].kind is Kind.FOLLOWED:
        return  # by another: `check_former` says so
    file = AppendOnly(former)
    file.cut(end)
    file.append(followed(number, now))
    file.close()


def missing_logs(directory: Path, retention: Retention) -> list[str]:
    """Names of closed logs that are not there, though a segment is that they name."""
    return [name for name in map(layout.log_name, _needed(retention)) if not (directory / name).exists()]


def cut_logs(directory: Path, retention: Retention) -> list[str]:
    """Names of closed logs that are there and do not end by naming the next."""
    there = [number for number in _needed(retention) if (directory / layout.log_name(number)).exists()]
    return [
        layout.log_name(number) for number in there if not is_followed(directory / layout.log_name(number), number + 1)
    ]


def _needed(retention: Retention) -> list[int]:
    # The others may leave at any moment, and a crash may have come before it was written that they did.
    return sorted(retention.logs.keys() - set(retention.removable_logs()))
