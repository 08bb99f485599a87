"""One row of a data set becomes a Problem, or is refused with the reason.

Which columns hold what is the table `COLUMNS`: for each field of a problem the columns looked for, in order, and how
the value is read. The first column that is there and not null decides.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from curator.errors import RowRefused
from curator.ingest import columns as read
from curator.schema import Problem, problem_row

Reader = Callable[[Any], Any]
MISSING = object()


def _name(value: Any) -> str | None:
    """Text or a whole number as a name; None for what is neither, and the next column is looked at."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).strip() or None


COLUMNS: Mapping[str, Mapping[str, Reader]] = {
    "prompt": {
        "prompt": read.read_prompt,
        "messages": read.read_conversation,
        "problem": read.read_prompt,
        "question": read.read_prompt,
    },
    "answer": {
        "reward_model.ground_truth": read.read_ground_truth,
        "ground_truth": read.read_ground_truth,
        "answer": read.read_answer,
        "final_answer": read.read_gold,
        "expected_answer": read.read_gold,
        "solution": read.read_solution,
    },
    "verifier": dict.fromkeys(("verifier", "dataset", "data_source", "ability"), _name),
    "problem_id": dict.fromkeys(("id", "problem_id", "uuid"), _name),
    "domain": dict.fromkeys(("domain", "ability", "data_source"), _name),
    "source": dict.fromkeys(("source", "data_source"), _name),
}
"""Field of a problem -> columns in order -> reader. A dot looks inside an object."""

MAPPED_READERS: Mapping[str, Reader] = {"prompt": read.read_prompt, "answer": read.read_answer}
"""Readers of columns that a mapping names; `_name` for the other fields."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A problem, and which of the row's columns it was made of."""

    problem: Problem
    used: Mapping[str, str]
    """Field -> column."""
    dropped: tuple[str, ...]
    """Columns of binary values, which a problem cannot carry."""


@dataclass(slots=True)
class _Found:
    """What is found while a row is read."""

    used: dict[str, str] = field(default_factory=dict)
    kept_whole: set[str] = field(default_factory=set)
    """Columns whose value stands unchanged in the problem, and need not be in `extra`."""


def to_problem(
    row: Mapping[str, Any], *, default_verifier: str | None = None, mapping: Mapping[str, str] | None = None
) -> Problem:
    """A row as a problem.

    `mapping` names the column for a field (`prompt`, `answer`, `verifier`, `problem_id`, `domain`, `source`); then no
    other column is looked at for it. Columns that do not stand unchanged in the problem go to its `extra`.

    Raises RowRefused for a missing or empty prompt or gold, and where no verifier is named; ValueError for a mapping
    of an unknown field.
    """
    return read_row(row, default_verifier=default_verifier, mapping=mapping).problem


def read_row(
    row: Mapping[str, Any], *, default_verifier: str | None = None, mapping: Mapping[str, str] | None = None
) -> ReadRow:
    """As `to_problem`, with the columns that were used."""
    table = with_mapping(mapping or {})
    found = _Found()
    prompt = _required("prompt", row, table, found)
    if read.is_blank(prompt):
        raise RowRefused(f"empty prompt in column '{found.used['prompt']}'")
    answer = _required("answer", row, table, found)
    if not answer.strip():
        raise RowRefused(f"empty gold in column '{found.used['answer']}'")
    verifier = _optional("verifier", row, table, found) or default_verifier
    if not verifier:
        raise RowRefused(f"no verifier: {_looked_for('verifier', row, table)}, or name one for all rows")
    problem_id = _optional("problem_id", row, table, found) or content_id(prompt, answer)
    domain = _optional("domain", row, table, found) or ""
    source = _optional("source", row, table, found) or ""
    rest = {name: plain(value) for name, value in row.items() if name not in found.kept_whole}
    problem = Problem(
        problem_id=problem_id,
        prompt=prompt,
        answer=answer,
        verifier=verifier,
        domain=domain,
        source=source,
        extra={name: value for name, value in rest.items() if value is not MISSING},
    )
    _check_storable(problem)
    return ReadRow(problem, found.used, tuple(name for name, value in rest.items() if value is MISSING))


def with_mapping(mapping: Mapping[str, str]) -> Mapping[str, Mapping[str, Reader]]:
    """`COLUMNS`, where a mapped field has its one column. Raises ValueError for an unknown field."""
    for name in mapping:
        if name not in COLUMNS:
            raise ValueError(f"mapping of '{name}': no field of a problem; known: {', '.join(COLUMNS)}")
    return {
        name: {mapping[name]: MAPPED_READERS.get(name, _name)} if name in mapping else known
        for name, known in COLUMNS.items()
    }


def content_id(prompt: read.Prompt, answer: str) -> str:
    """An id made of prompt and gold: the first 16 hex digits of their SHA-256."""
    turns = [prompt] if isinstance(prompt, str) else [text for m in prompt for text in (m["role"], m["content"])]
    digest = hashlib.sha256()
    for text in (*turns, answer):
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def plain(value: Any) -> Any:
    """A value as JSON can hold it: dates and decimals as text, tuples as lists; MISSING for anything with bytes."""
    if isinstance(value, Mapping):
        return _unless_missing({str(k): plain(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return _unless_missing([plain(v) for v in value])
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else MISSING


def _unless_missing(value: dict[str, Any] | list[Any]) -> Any:
    parts = value.values() if isinstance(value, dict) else value
    return MISSING if any(part is MISSING for part in parts) else value


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or MISSING. A name with a dot that is no column is a path into an object."""
    if column in row:
        return row[column]
    name, dot, inner = column.partition(".")
    if dot and isinstance(row.get(name), Mapping):
        return lookup(row[name], inner)
    return MISSING


def _required(field_name: str, row: Mapping[str, Any], table: Mapping[str, Mapping[str, Reader]], found: _Found) -> Any:
    null = None
    for column, reader in table[field_name].items():
        value = lookup(row, column)
        if value is MISSING:
            continue
        if value is None:
            null = null or column
            continue
        result = reader(value)
        _note(field_name, column, value, result, found)
        return result
    if null is not None:
        raise RowRefused(f"{_word(field_name)} is null in column '{null}'")
    raise RowRefused(f"no column for the {_word(field_name)}: {_looked_for(field_name, row, table)}")


def _optional(
    field_name: str, row: Mapping[str, Any], table: Mapping[str, Mapping[str, Reader]], found: _Found
) -> str | None:
    for column, reader in table[field_name].items():
        value = lookup(row, column)
        if value is MISSING or value is None:
            continue
        result: Any = reader(value)
        if isinstance(result, str) and result.strip():
            _note(field_name, column, value, result, found)
            return result
    return None


def _note(field_name: str, column: str, value: Any, result: Any, found: _Found) -> None:
    found.used[field_name] = column
    if (tuple(value) if isinstance(value, list) else value) == result:
        found.kept_whole.add(column)


def _looked_for(field_name: str, row: Mapping[str, Any], table: Mapping[str, Mapping[str, Reader]]) -> str:
    return (
        f"the row has {', '.join(sorted(map(str, row))) or 'none'}; looked for {', '.join(table[field_name])}; "
        f'set mapping.{field_name} = "<column>" to name it'
    )


def _word(field_name: str) -> str:
    return "gold" if field_name == "answer" else field_name


def _check_storable(problem: Problem) -> None:
    try:
        for text in problem_row(problem).values():
            str(text).encode("utf-8")
    except UnicodeEncodeError:
        raise RowRefused("half of a surrogate pair in the text") from None
    except RecursionError:
        raise RowRefused("nested too deeply") from None
