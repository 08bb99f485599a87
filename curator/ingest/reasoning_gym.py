"""Problems of reasoning-gym: a family or a composite, with a seed, as many as wanted or without end.

Entry i of a family is a function of seed + i alone, so a range of seeds is a range of problems: seed 0 from entry
1,000 on is seed 1,000, and the ranges of two pools must not overlap if their problems shall not. In the families of
`BY_SEED_AND_INDEX` an entry depends on both, and its id names both.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from curator.dedup import digest
from curator.errors import PoolError, RowRefused
from curator.ingest.formats import Row
from curator.ingest.layouts import MISSING, POOL_FIELDS
from curator.ingest.reading import Source
from curator.ingest.rows import plain

COMPOSITE = "composite"
VERIFIER = "reasoning_gym"
BY_SEED_AND_INDEX = frozenset({"acre", "gsm_symbolic", "list_functions"})
"""Families that draw once for all entries, or go through a list by index (reasoning-gym 0.1.25)."""
BLOCK = 1000
"""Entries of one generator; the next ones come from a generator whose seed is further on."""


def reasoning_gym_source(
    family: str, *, seed: int, size: int | None, config: Mapping[str, Any] | None = None
) -> Source:
    """The problems with seeds `seed`, `seed + 1`, ...: `size` of them, without end for None.

    `config` holds the family's own settings; of a composite its `datasets`, each with name, weight and config.

    Raises PoolError where the package is missing, the family unknown or a setting refused.
    """
    settings = dict(config or {})
    if family == COMPOSITE:
        _check_composite(settings)
    for part in (settings, *(part.get("config", {}) for part in _parts(family, settings))):
        if taken := {"seed", "size"} & part.keys():
            raise PoolError(
                f"--reasoning-gym {family}: {' and '.join(sorted(taken))} in the config; give --seed and --size instead"
            )
    _make(family, settings, seed, 1)  # a wrong setting is told now, not in the middle
    return Source(Path(f"reasoning-gym:{family}"), _rows(family, settings, seed, size))


def _rows(
    family: str, settings: Mapping[str, Any], seed: int, size: int | None
) -> Iterator[tuple[int, Row | RowRefused]]:
    name = f"{family}-{digest(json.dumps(settings, sort_keys=True)).hex()[:8]}" if settings else family
    is_by_both = not BY_SEED_AND_INDEX.isdisjoint([family, *(part["name"] for part in _parts(family, settings))])
    for start in count(0, BLOCK):
        if size is not None and start >= size:
            return
        num = BLOCK if size is None else min(BLOCK, size - start)
        dataset = _make(family, settings, seed + start, num)
        for index in range(num):
            number = start + index
            place = f"{seed + start}.{index}" if is_by_both else str(seed + number)
            yield number + 1, _entry(dataset, index, family, f"{name}/{place}")


_PART_KEYS = {"name", "weight", "config"}


def _check_composite(settings: Mapping[str, Any]) -> None:
    """Raise PoolError for a config of a composite that is not of the form it must have."""
    form = '{"datasets": [{"name": FAMILY, "weight": 1, "config": {}}, ...]}'
    parts = settings.get("datasets")
    if settings.keys() != {"datasets"} or not isinstance(parts, list) or not parts:
        raise PoolError(f"--reasoning-gym composite: a setting is refused: expected {form}, received {settings!r:.200}")
    for number, part in enumerate(parts, start=1):
        where = f"--reasoning-gym composite: part {number} of 'datasets'"
        if not isinstance(part, Mapping) or not isinstance(part.get("name"), str) or not part.keys() <= _PART_KEYS:
            raise PoolError(f"{where}: expected name, weight and config as in {form}, received {part!r:.200}")
        weight = part.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise PoolError(f"{where}: a weight of {weight!r:.80}; expected a number above 0")
        if not isinstance(part.get("config", {}), Mapping):
            raise PoolError(f"{where}: a config of {part['config']!r:.80}; expected an object of the family's settings")


def _parts(family: str, settings: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return settings.get("datasets", []) if family == COMPOSITE else []


def _entry(dataset: Any, index: int, family: str, problem_id: str) -> Row | RowRefused:
    try:
        entry = dataset[index]
    except Exception as error:
        # A family is a program of somebody else's; one entry that it cannot make does not hide the others.
        return RowRefused(f"the family cannot make the entry: {type(error).__name__}: {error}")
    try:
        return _row(entry, family, problem_id)
    except RowRefused as refusal:
        return refusal


def _row(entry: Mapping[str, Any], family: str, problem_id: str) -> Row | RowRefused:
    metadata = plain(dict(entry.get("metadata") or {}))
    if metadata is MISSING:
        return RowRefused("the metadata, which the scorer needs, holds what JSON cannot")
    metadata.setdefault("source_dataset", family)
    answer = entry.get("answer")
    values = (
        problem_id,
        str(entry["question"]),
        # Families without a single answer have none; their scorer needs the metadata alone.
        "" if answer is None else str(answer),
        VERIFIER,
        str(metadata["source_dataset"]),
        "reasoning-gym",
        {"metadata": metadata},
    )
    return dict(zip(POOL_FIELDS, values, strict=True))


def _make(family: str, settings: Mapping[str, Any], seed: int, size: int) -> Any:
    try:
        library = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise PoolError("--reasoning-gym: the package reasoning-gym is not installed") from error
    families = library.factory.DATASETS
    if family not in families:
        raise PoolError(f"--reasoning-gym {family}: no family of that name; known: {', '.join(sorted(families))}")
    try:
        if family == COMPOSITE:
            return _composite(library, settings, seed, size)
        return library.create_dataset(family, **settings, seed=seed, size=size)
    except Exception as error:
        # Each family checks its settings in its own way, and some only by failing at them.
        raise PoolError(f"--reasoning-gym {family}: a setting is refused: {error or type(error).__name__}") from error


def _composite(library: Any, settings: Mapping[str, Any], seed: int, size: int) -> Any:
    specs = [
        library.composite.DatasetSpec(
            name=part["name"],
            weight=part.get("weight", 1),
            # Each part counts its seeds from that of the whole, so that a range of seeds is a range of problems.
            config={"seed": seed + 1_000_003 * number, "size": size, **part.get("config", {})},
        )
        for number, part in enumerate(settings["datasets"], start=1)
    ]
    return library.create_dataset(COMPOSITE, seed=seed, size=size, datasets=specs)
