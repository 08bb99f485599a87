"""An account of an import: what became of every row, what was read from which column, what the problems look like."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from curator.ingest.pass_rate import likely_pass_rates
from curator.ingest.places import Place, Places
from curator.schema import OFFLINE_PASS_RATE, Problem

MAX_SHOWN = 10
"""Rows that an error or the text of a report shows by place."""


class Pairs(Sequence[tuple[Place, Place]]):
    """A dropped row, and the one that is kept for it."""

    def __init__(self) -> None:
        """Empty."""
        self._dropped, self._kept = Places(), Places()

    def append(self, dropped: Place, kept: Place) -> None:
        """Add a pair."""
        self._dropped.append(dropped)
        self._kept.append(kept)

    def __len__(self) -> int:
        return len(self._dropped)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(zip(self._dropped[index], self._kept[index], strict=True))
        return self._dropped[index], self._kept[index]

    def __iter__(self) -> Iterator[tuple[Place, Place]]:
        return zip(self._dropped, self._kept, strict=True)


class Conflict(NamedTuple):
    """Two rows of one id whose prompt, gold or verifier differ."""

    place: Place
    first: Place
    problem_id: str

    def __str__(self) -> str:
        other = f"the id of {self.first}, whose prompt, gold or verifier differs"
        return f"{self.place}: id '{self.problem_id}' is also {other}"


class Removed(NamedTuple):
    """A problem that leaves because of another one."""

    place: Place | None
    """Where its row stands; None for one that was in a pool already."""
    problem_id: str
    why: str
    """`exact`, `near`, `semantic`: within the pool; `heldout-` before these or before `words`: of a held-out one."""
    collides_with: str
    """The id of the problem that stays, or the place of a held-out row."""
    similarity: float
    """Jaccard or cosine; of `heldout-words` the number of runs of words in common."""
    golds_differ: bool = False
    """Whether the two ask the same and have other golds: one of them is likely wrong."""

    def __str__(self) -> str:
        where = f"{self.place} " if self.place else ""
        golds = ", golds differ" if self.golds_differ else ""
        return f"{where}{self.problem_id} ~ {self.collides_with} ({self.why} {self.similarity:.3g}{golds})"

    def as_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**self._asdict(), "place": str(self.place) if self.place else None}


class Spread(NamedTuple):
    """Lengths of prompts."""

    smallest: int
    median: float
    p95: float
    largest: int

    def __str__(self) -> str:
        return f"{self.smallest} to {self.largest}, median {self.median:g}, 95% up to {self.p95:g}"


@dataclass(slots=True)
class ImportReport:
    """What became of the rows: rows = kept + refused + duplicates + conflicts + removed."""

    problems: list[Problem] = field(default_factory=list)
    """The kept ones, where they are held in memory."""
    num_rows: int = 0
    num_kept: int = 0
    refused: dict[str, Places] = field(default_factory=lambda: defaultdict(Places))
    """Reason -> where."""
    duplicates: Pairs = field(default_factory=Pairs)
    """A dropped row, and the equal one of the same id that is kept."""
    conflicts: list[Conflict] = field(default_factory=list)
    id_forms: Pairs = field(default_factory=Pairs)
    """A row whose id is that of an earlier one but for its Unicode form (NFC), and that one; both are problems."""
    removed: list[Removed] = field(default_factory=list)
    layouts: Counter[str] = field(default_factory=Counter)
    """What the rows were recognised as."""
    columns_used: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Field of a problem -> column -> rows that had it from there."""
    columns_ignored: Counter[str] = field(default_factory=Counter)
    """Columns that no field was read from, by rows; they are in `extra`."""
    columns_dropped: Counter[str] = field(default_factory=Counter)
    """Columns of binary values, by rows; they are not in `extra`."""
    verifiers: Counter[str] = field(default_factory=Counter)
    """Problems by verifier; whoever runs verifiers knows which of them exist."""
    characters: Spread | None = None
    tokens: Spread | None = None
    """After the chat template."""
    examples: list[str] = field(default_factory=list)

    @property
    def num_refused(self) -> int:
        """Rows that could not become a problem."""
        return sum(map(len, self.refused.values()))

    @property
    def num_duplicates(self) -> int:
        """Rows dropped because an equal one is kept."""
        return len(self.duplicates)

    def refuse(self, reason: str, place: Place) -> None:
        """Note a row that does not become a problem."""
        self.refused[reason].append(place)

    def count_columns(
        self, columns: Sequence[str], used: dict[str, str], dropped: Sequence[str], num_rows: int
    ) -> None:
        """Note which columns some rows have, and which of them were read."""
        for name, column in used.items():
            self.columns_used[name][column] += num_rows
        roots = {column if column in columns else column.partition(".")[0] for column in used.values()}
        self.columns_dropped.update(dict.fromkeys(dropped, num_rows))
        self.columns_ignored.update(dict.fromkeys(set(columns) - roots - set(dropped), num_rows))

    def ignored_pass_rates(self) -> list[str]:
        """Columns that look like pass rates, while none was stated to be one."""
        return [] if OFFLINE_PASS_RATE in self.columns_used else likely_pass_rates(self.columns_ignored)

    def text(self) -> str:
        """The report for a terminal."""
        removed = f", {len(self.removed)} removed" if self.removed else ""
        conflicts = f", {len(self.conflicts)} with the id of another" if self.conflicts else ""
        lines = [
            f"{self.num_rows} rows: {self.num_kept} kept, {self.num_refused} refused, {self.num_duplicates} duplicates"
            f"{conflicts}{removed}",
            f"layout: {_counts(self.layouts)}",
            *(f"{name} from {_counts(counts)}" for name, counts in self.columns_used.items()),
            f"verifiers: {_counts(self.verifiers)}",
            f"passed on, not read: {_counts(self.columns_ignored)}",
        ]
        if self.columns_dropped:
            lines.append(f"dropped, binary: {_counts(self.columns_dropped)}")
        if rates := self.ignored_pass_rates():
            lines.append(f"pass rates not taken, as scale and direction are not stated: {', '.join(rates)}")
        if self.characters:
            lines.append(f"prompt characters: {self.characters}")
        if self.tokens:
            lines.append(f"prompt tokens after the template: {self.tokens}")
        for number, example in enumerate(self.examples, start=1):
            lines += [f"--- example {number}", example]
        if self.examples:
            lines.append("---")
        return "\n".join([*lines, *self.refusals(), *self._collisions(), *map(str, self.conflicts[:MAX_SHOWN])])

    def refusals(self) -> list[str]:
        """One line a reason: how many rows, why, and where the first ones are."""
        return [f"{len(places)} refused: {reason} ({_some(places)})" for reason, places in self.refused.items()]

    def _collisions(self) -> Iterator[str]:
        """One line a reason for leaving: how many, and the first ones with what they collided with."""
        if self.duplicates:
            pairs = [f"{dropped} = {kept}" for dropped, kept in self.duplicates[:MAX_SHOWN]]
            yield f"{len(self.duplicates)} duplicates of the same id: {', '.join(pairs)}{_more(self.duplicates)}"
        if self.id_forms:
            pairs = [f"{place} ~ {other}" for place, other in self.id_forms[:MAX_SHOWN]]
            yield (
                f"{len(self.id_forms)} ids differ from an earlier one in their Unicode form (NFC) alone, and count as "
                f"others: {', '.join(pairs)}{_more(self.id_forms)}"
            )
        by_reason: dict[str, list[Removed]] = defaultdict(list)
        for removed in self.removed:
            by_reason[removed.why].append(removed)
        for why, found in by_reason.items():
            yield f"{len(found)} removed, {why}: {_some(found)}"

    def as_plain(self) -> dict[str, Any]:
        """The whole report as JSON can hold it, with every row that did not become a problem."""
        return {
            "rows": self.num_rows,
            "kept": self.num_kept,
            "refused": {reason: list(map(str, places)) for reason, places in self.refused.items()},
            "duplicates": [[str(dropped), str(kept)] for dropped, kept in self.duplicates],
            "conflicts": [[str(c.place), str(c.first), c.problem_id] for c in self.conflicts],
            "id_forms": [[str(place), str(other)] for place, other in self.id_forms],
            "removed": [removed.as_plain() for removed in self.removed],
            "layouts": dict(self.layouts),
            "columns_used": {name: dict(counts) for name, counts in self.columns_used.items()},
            "columns_ignored": dict(self.columns_ignored),
            "columns_dropped": dict(self.columns_dropped),
            "pass_rates_not_taken": self.ignored_pass_rates(),
            "verifiers": dict(self.verifiers),
            "prompt_characters": self.characters._asdict() if self.characters else None,
            "prompt_tokens": self.tokens._asdict() if self.tokens else None,
            "examples": self.examples,
        }


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common()) or "none"


def _some(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:MAX_SHOWN])) + _more(items)


def _more(items: Sequence[Any]) -> str:
    return ", ..." if len(items) > MAX_SHOWN else ""
