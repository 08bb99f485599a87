"""Snapshots: all that the buffer knows as one row, so that a start reads the newest log alone.

Every log but the first begins with such a row: a JSON object with the state of each fold as it was when all rows before
it had been applied. A fold names in `folded` the attributes that its rows have made; what it derives from settings or
reads from records is not among them. JSON knows few types, so that any other value is a list that begins with the name
of its type. The layout goes with the schema version of the log.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Protocol

from stream_grpo.buffer import (
    admission,
    facts,
    ledger,
    outcomes,
    partials,
    retention,
    staleness,
    stock,
    tickets,
    transitions,
)
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.types import Fate, PolicyVersion, Ticket

_VALUES: Mapping[str, Any] = {
    of.__name__: of
    for of in (
        Fate,
        Kind,
        PolicyVersion,
        Ticket,
        admission.Admission,
        facts.RolloutFacts,
        ledger.Account,
        outcomes.Entry,
        partials.Partial,
        retention.Segment,
        staleness.Share,
        staleness.Totals,
        stock.Held,
        tickets.InFlight,
        transitions.Location,
        transitions.Transition,
    )
}
"""Records and enumerations that a fold may hold."""
_SEQUENCES: Mapping[str, Any] = {of.__name__: of for of in (list, tuple, set, frozenset)}
_MAPPINGS: Mapping[str, Any] = {of.__name__: of for of in (dict, Counter, OrderedDict)}


class Fold(Protocol):
    """What a snapshot is made of."""

    @property
    def folded(self) -> tuple[str, ...]:
        """Attributes that hold what the rows say."""


def snapshot_row(folds: Mapping[str, Fold], now: float, *, begins_log: int) -> Transition:
    """The state of folds, by name, as the first row of a log. Raises TypeError for a value of an unknown type."""
    state = {name: {key: to_plain(getattr(fold, key)) for key in fold.folded} for name, fold in folds.items()}
    return Transition(
        kind=Kind.SNAPSHOT, time_s=now, segment=begins_log, reason=json.dumps(state, separators=(",", ":"))
    )


def set_folds(folds: Mapping[str, Fold], row: Transition) -> None:
    """Give folds the state that `snapshot_row` has put into a row."""
    state = json.loads(row.reason)
    for name, fold in folds.items():
        for key in fold.folded:
            setattr(fold, key, from_plain(state[name][key]))


def to_plain(value: Any) -> Any:
    """A value as JSON holds it; bytes of records stay in their segments, and are empty here."""
    of = type(value)
    name = of.__name__
    if value is None or of in (bool, int, float, str):
        return value
    if of is bytes:
        return ["bytes"]
    if of is deque:
        return ["deque", value.maxlen, *map(to_plain, value)]
    if _SEQUENCES.get(name) is of:
        return [name, *map(to_plain, sorted(value) if of in (set, frozenset) else value)]
    if _MAPPINGS.get(name) is of:
        return [name, *(to_plain(part) for item in value.items() for part in item)]
    if _VALUES.get(name) is of:
        return [name, *map(to_plain, _parts(value))]
    raise TypeError(f"a fold holds a {name}, which a snapshot does not know")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Enum):
        return [value.value]
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else list(value)


def from_plain(plain: Any) -> Any:
    """The inverse of `to_plain`."""
    if not isinstance(plain, list):
        return plain
    name, *parts = plain
    if name == "bytes":
        return b""
    if name == "deque":
        return deque(map(from_plain, parts[1:]), maxlen=parts[0])
    values = [from_plain(part) for part in parts]
    if name in _SEQUENCES:
        return _SEQUENCES[name](values)
    if name in _MAPPINGS:
        return _MAPPINGS[name](dict(zip(values[::2], values[1::2], strict=True)))
    return _build(_VALUES[name], values)


def _build(of: Any, values: list[Any]) -> Any:
    names = [field.name for field in fields(of)] if is_dataclass(of) else []
    # Some dataclasses take their fields by name alone.
    return of(**dict(zip(names, values, strict=True))) if names else of(*values)
