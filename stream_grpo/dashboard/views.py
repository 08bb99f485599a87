"""What the page is sent of a run: whole at first, then what has come since a cursor. Plain values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stream_grpo.dashboard.facts import Files, Settings, heldout, state_of
from stream_grpo.dashboard.lines import AGES, TokensByFate
from stream_grpo.dashboard.reading import RunReader
from stream_grpo.dashboard.thinning import Cursor, Floats, Thinned

MEANS = (
    *("time_s", "reward_mean", "response_tokens_mean", "age_mean"),
    *("age_publish_lag_mean", "age_in_flight_mean", "age_in_queue_mean", "step_s", "waited_s"),
    *("entropy", "grad_norm", "k3", "ess", "mask_share", "clip_share_high", "abs_log_ratio"),
)
BANDS = ("reward_mean",)
"""Figures whose smallest and largest value in a bucket are sent, too."""
FATES = TokensByFate.__struct_fields__
AHEAD_S, PAUSE_S = 0.1, 0.005
"""How long is read at once while nobody asks, and the moment in which whoever does gets in."""
SAMPLED_ABOVE_BYTES, NUM_SAMPLES = 64 << 20, 500
"""A run with more than this left to read is first shown as it is at so many places of its metrics."""
DIGITS = 5
"""Significant ones that are sent: a picture shows no more."""


class RunView:
    """One run for the page. `name` is what it is called in requests."""

    def __init__(self, name: str, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self.name, self.run_dir = name, run_dir
        self._reader, self._files, self._clock = RunReader(run_dir), Files(run_dir), clock
        self._sampled: RunReader | None = None

    def read_ahead(self) -> None:
        """Take in all that is there, so that a page need not wait for it. Others may look meanwhile."""
        is_whole = False
        while not is_whole:
            with self._reader.lock:
                is_whole = self._reader.follow(AHEAD_S)
            time.sleep(PAUSE_S)

    def update(self, since: str, budget_s: float) -> dict[str, Any]:
        """What a page with cursor `since` lacks; an empty cursor lacks all. Reads the run for about `budget_s`."""
        with self._reader.lock:
            shown, is_whole = self._reader_to_show(budget_s)
            return self._update(shown, since) | {"complete": is_whole, "share_read": self._reader.share_read}

    def _reader_to_show(self, budget_s: float) -> tuple[RunReader, bool]:
        """The reader of all lines, once it has them; of a long run, until then, one of some. And whether it has."""
        is_whole = self._reader.follow(budget_s if self._sampled else 0.0)
        if not is_whole and self._sampled is None:
            if self._reader.num_bytes_left > SAMPLED_ABOVE_BYTES:
                self._sampled = RunReader(self.run_dir, num_samples=NUM_SAMPLES)
                self._sampled.follow(math.inf)
            else:
                is_whole = self._reader.follow(budget_s)
        if is_whole:
            self._sampled = None
        return self._sampled or self._reader, is_whole

    def _update(self, reader: RunReader, since: str) -> dict[str, Any]:
        tables = {"steps": reader.steps, "pool": reader.pool, "evaluations": reader.evaluations}
        start = f"{reader.start}{'s' if reader is self._sampled else ''}"
        known = parse_cursor(since, start, tables)
        starts = {name: table.start_of(known.get(name)) for name, table in tables.items()}
        summary = self._files.read("summary.json")
        settings = Settings.read(self.run_dir)
        return {
            "name": self.name,
            "cursor": format_cursor(start, tables),
            "state": state_of(self.run_dir, summary, reader.step, reader.last_s, self._clock()),
            "last_s": reader.last_s,
            "first_s": reader.first_s,
            "step": reader.step,
            "settings": settings.values,
            "heldout": heldout(self._files, summary, settings),
            "steps": _steps(reader.steps, starts["steps"]),
            "pool": _pool(reader.pool, starts["pool"]),
            "evaluations": _evaluations(reader.evaluations, starts["evaluations"]),
            "tokens": msgspec.structs.asdict(reader.newest.tokens) if reader.newest else {},
            "flow": reader.flow.as_fields(),
            "alarms": _notes(reader.alarms),
            "warnings": [*self._problem(reader), *_notes(reader.warnings)],
            "num_alarms": reader.num_alarms,
            "num_warnings": reader.num_warnings + (reader.follower.problem is not None),
            "num_unreadable": reader.follower.num_unreadable,
        }

    def _problem(self, reader: RunReader) -> Iterator[dict[str, Any]]:
        """Why there is nothing to be seen of the run, as a warning of the page itself."""
        if reader.follower.problem is not None:
            yield {"time_s": self._clock(), "source": "live page", "message": reader.follower.problem}


def format_cursor(start: str, tables: Mapping[str, Thinned]) -> str:
    """What a page has that was sent all buckets of these tables."""
    return "-".join([start, *(f"{table.cursor.generation}.{table.cursor.bucket}" for table in tables.values())])


def parse_cursor(text: str, start: str, names: Iterable[str]) -> dict[str, Cursor]:
    """The inverse; nothing for a cursor of another file, or for anything else. A page that has nothing is sent all."""
    first, *parts = text.split("-")
    names = list(names)
    if first != start or len(parts) != len(names):
        return {}
    found = {}
    for name, part in zip(names, parts, strict=True):
        generation, _, index = part.partition(".")
        if not (_is_count(generation) and _is_count(index)):
            return {}
        found[name] = Cursor(int(generation), int(index))
    return found


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _steps(table: Thinned, start: int) -> dict[str, Any]:
    columns = {name: table.mean(name, start) for name in MEANS}
    columns |= {f"{name}/low": table.low(name, start) for name in BANDS}
    columns |= {f"{name}/high": table.high(name, start) for name in BANDS}
    columns["age_max"] = table.high("age_max", start)
    columns |= {f"age/{age}": table.total(f"trained at age/{age}", start) for age in AGES}
    columns |= {f"tokens/{fate}": table.last(f"tokens/{fate}", start) for fate in FATES}
    return _sent(table, start, columns)


def _pool(table: Thinned, start: int) -> dict[str, Any]:
    return _sent(table, start, {name: table.last(name, start) for name in table.names})


def _evaluations(table: Thinned, start: int) -> dict[str, Any]:
    return _sent(table, start, {name: table.mean(name, start) for name in table.names})


def _sent(table: Thinned, start: int, columns: Mapping[str, Floats]) -> dict[str, Any]:
    """A table from a bucket on: the page puts it in place of what it has from there on."""
    return {
        "from": start,
        "x": table.x(start).tolist(),
        "columns": {name: values if name == "time_s" else _short(values) for name, values in _listed(columns)},
    }


def _listed(columns: Mapping[str, Floats]) -> Iterable[tuple[str, list[float]]]:
    return ((name, values.tolist()) for name, values in columns.items())


def _short(values: list[float]) -> list[float | None]:
    """Without the digits that no picture shows; None where there is no figure."""
    array = np.array(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(array))))
        rounded = np.where(array == 0, 0.0, np.round(array * scale) / scale)
    return [
        value if is_finite else None for value, is_finite in zip(rounded.tolist(), np.isfinite(rounded), strict=True)
    ]


def _notes(lines: Iterable[msgspec.Struct]) -> list[dict[str, Any]]:
    """The newest first."""
    return [msgspec.structs.asdict(line) for line in reversed(list(lines))]
