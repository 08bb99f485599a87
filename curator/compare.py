"""In what two pools differ: ids that only one has, and problems of one id with another content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from curator.dedup import digest
from curator.pool import Pool
from curator.schema import PROBLEM_SCHEMA

FIELDS = tuple(name for name in PROBLEM_SCHEMA.names if name not in ("problem_id", "prompt_is_messages"))


class Changed(NamedTuple):
    """A problem whose content differs."""

    problem_id: str
    fields: tuple[str, ...]


class Difference(NamedTuple):
    """What is in one pool and not in the other, in the order of ids."""

    only_left: list[str]
    only_right: list[str]
    changed: list[Changed]
    num_equal: int

    @property
    def is_none(self) -> bool:
        """Whether the pools hold the same problems."""
        return not (self.only_left or self.only_right or self.changed)

    def as_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        changed = {problem_id: list(fields) for problem_id, fields in self.changed}
        return {
            "equal": self.is_none,
            "only_left": self.only_left,
            "only_right": self.only_right,
            "changed": changed,
            "num_equal": self.num_equal,
        }

    def text(self, max_shown: int = 20) -> str:
        """For a terminal."""
        changed = [f"{problem_id} ({', '.join(fields)})" for problem_id, fields in self.changed]
        named = (("only left", self.only_left), ("only right", self.only_right), ("content differs", changed))
        lines = [f"{len(items)} {name}: {_shown(items, max_shown)}" for name, items in named if items]
        return "\n".join([*lines, f"{self.num_equal} equal"])


def compare(left: Pool, right: Pool) -> Difference:
    """The difference of two pools; a hash for each field of each problem is held in memory."""
    a, b = dict(_hashes(left)), dict(_hashes(right))
    common = sorted(a.keys() & b.keys())
    changed = [
        Changed(
            problem_id,
            tuple(name for name, x, y in zip(FIELDS, _cut(a[problem_id]), _cut(b[problem_id]), strict=True) if x != y),
        )
        for problem_id in common
        if a[problem_id] != b[problem_id]
    ]
    return Difference(sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys()), changed, len(common) - len(changed))


def _hashes(pool: Pool) -> Iterator[tuple[str, bytes]]:
    """Id and the hashes of all fields, eight bytes each."""
    for batch in pool.problem_batches():
        for row in batch.to_pylist():
            # A text and the messages that spell the same JSON are different prompts.
            values = (f"{row['prompt_is_messages']}{row['prompt']}", *(row[name] for name in FIELDS[1:]))
            yield row["problem_id"], b"".join(digest(value)[:8] for value in values)


def _cut(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 8] for i in range(0, len(hashes), 8)]


def _shown(items: Sequence[str], max_shown: int) -> str:
    return ", ".join(items[:max_shown]) + (", ..." if len(items) > max_shown else "")
