"""How the buffer is doing, in figures."""

from __future__ import annotations

from typing import Any

from stream_grpo.buffer.book import Book
from stream_grpo.buffer.journal import Journal


def figures(book: Book, journal: Journal) -> dict[str, Any]:
    """Counts, seconds and bytes as plain values."""
    return {
        "version": list(book.lineage.learner),
        "live": book.num_live,
        "in_flight": len(book.tickets),
        "buffered": book.stock.num_live - book.stock.num_leased,
        "leased": book.stock.num_leased,
        "ledger": account(book),
        "ends": dict(book.ledger.ends),
        "mixed_context_tokens": book.mixed_context_tokens,
        "bytes_on_disk": journal.num_bytes,
        "segments_on_disk": len(book.retention.segments),
        "log_number": journal.log_number,
        "num_commits": journal.num_commits,
        "commit_s": journal.commit_s,
        "longest_commit_s": journal.longest_commit_s,
        "num_incomplete": journal.num_incomplete,
        "expected_share": book.signal.expected_share,
        "groups_without_signal": book.signal.num_without,
        "without_signal": book.signal.causes,
        "outcomes": book.outbox.num_outcomes,
        "outcomes_acknowledged": book.outbox.num_acknowledged,
    }


def account(book: Book) -> dict[str, Any]:
    """The ledger, and under `losses` what ended as stale; `lost_share` is of generated tokens."""
    fields = book.ledger.as_fields()
    share = fields["tokens"]["stale"] / max(1, fields["tokens"]["generated"])
    return {**fields, "losses": {"lost_share": share, **book.losses.as_fields()}}
