"""One row of a data set becomes a Problem, or is refused with the reason. Which columns hold what: `fields.COLUMNS`."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from curator.errors import PoolError, RowRefused
from curator.ingest.columns import Prompt, is_blank, read_prompt
from curator.ingest.fields import CONTINUED_BY, Table, name_of, with_mapping
from curator.ingest.layouts import MISSING, POOL_FIELDS, lookup, marked_unusable
from curator.ingest.names import NamesMet
from curator.ingest.pass_rate import PassRate
from curator.schema import OFFLINE_PASS_RATE, Problem, problem_row, verifier_items, verifier_text

_POOL_FIELDS = frozenset(POOL_FIELDS)
_SCALARS = (str, int, float)
MAX_DEPTH = 100
"""Lists and objects within one another; whoever reads a pool with another library than ours has limits, too."""
TOO_DEEP = f"nested too deeply: at most {MAX_DEPTH} lists and objects within one another can be kept"
MAX_SHAPES = 1000
"""Sets of columns for which is remembered what can be read of them."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A problem, and which of the row's columns it was made of."""

    problem: Problem
    stored: Mapping[str, Any]
    """The same as a row of PROBLEM_SCHEMA."""
    used: Mapping[str, str]
    """Field -> column."""
    dropped: tuple[str, ...]
    """Columns of binary values, which a problem cannot carry."""


@dataclass(slots=True)
class _Found:
    """What is found while a row is read."""

    columns: Table
    """What can be read of the row."""
    used: dict[str, str] = field(default_factory=dict)
    kept_whole: set[str] = field(default_factory=set)
    """Columns whose value stands unchanged in the problem, and need not be in `extra`."""


def to_problem(
    row: Mapping[str, Any], *, default_verifier: str | None = None, mapping: Mapping[str, str] | None = None
) -> Problem:
    """One row as a problem; see `RowReader`."""
    return RowReader(default_verifier=default_verifier, mapping=mapping).read(row).problem


class RowReader:
    """Makes problems of rows.

    `mapping` names the column for a field (`prompt`, `answer`, `verifier`, `problem_id`, `domain`, `source`); then no
    other column is looked at for it. Columns that do not stand unchanged in the problem go to its `extra`.
    """

    def __init__(
        self,
        *,
        default_verifier: str | None = None,
        mapping: Mapping[str, str] | None = None,
        verifier_names: Mapping[str, str] | None = None,
        pass_rate: PassRate | None = None,
    ) -> None:
        """`verifier_names`: the verifier for a name that the data set uses.

        Raises ValueError for a mapping of an unknown field; PoolError for a default that is no list of verifiers and
        looks like one.
        """
        try:
            verifier_items(default_verifier or "")
        except ValueError as error:
            raise PoolError(f"the default verifier: {error}") from None
        self._table = with_mapping(mapping or {})
        self._mapping = mapping or {}
        self._default_verifier = default_verifier
        self._verifier_names = verifier_names or {}
        self._pass_rate = pass_rate
        self._present: dict[tuple[str, ...], Table] = {}
        self._names = NamesMet(self._mapping, pass_rate.column if pass_rate else None, self._verifier_names)

    def read(self, row: Mapping[str, Any]) -> ReadRow:
        """The problem of a row, with the columns that were used.

        Raises RowRefused for a missing or empty prompt or gold, where no verifier is named, where the data set marks
        the row as unusable, for a pass rate off the stated scale, and for values that JSON cannot hold.
        """
        self._names.note(row)
        try:
            return self._read(row)
        except RecursionError:
            raise RowRefused(TOO_DEEP) from None

    def check_names(self) -> None:
        """Raise PoolError for a column or verifier that was named and that no row has had; for the end of a reading."""
        self._names.check()

    def _read(self, row: Mapping[str, Any]) -> ReadRow:
        if not self._mapping and row.keys() - {"prompt_is_messages"} == _POOL_FIELDS:
            return self._finished(_exported(row), {name: name for name in row}, ())
        if (reason := marked_unusable(row)) is not None:
            raise RowRefused(reason)
        found = _Found(self._columns(row))
        prompt = self._read_prompt(row, found)
        answer = self._required("answer", row, found)
        if not answer.strip():
            raise RowRefused(f"empty gold in column '{found.used['answer']}'")
        verifier = self._optional("verifier", row, found) or self._default_verifier
        self._names.note_verifier(verifier)
        if not verifier:
            raise RowRefused(f"no verifier: {_looked_for('verifier', row, self._table)}, or name one for all rows")
        if (renamed := self._renamed(verifier)) != verifier:
            found.kept_whole.discard(found.used.get("verifier", ""))
        domain = self._optional("domain", row, found) or ""
        source = self._optional("source", row, found) or ""
        problem_id = self._problem_id(row, found) or content_id(prompt, answer)
        rest = {name: plain_column(name, value) for name, value in row.items() if name not in found.kept_whole}
        extra = {name: value for name, value in rest.items() if value is not MISSING}
        self._note_pass_rate(row, extra, found)
        problem = Problem(
            problem_id=problem_id,
            prompt=prompt,
            answer=answer,
            verifier=renamed,
            domain=domain,
            source=source,
            extra=extra,
        )
        return self._finished(problem, found.used, tuple(n for n, value in rest.items() if value is MISSING))

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt alone, as a held-out problem needs no more. Raises RowRefused."""
        try:
            return self._read_prompt(row, _Found(self._columns(row)))
        except RecursionError:
            raise RowRefused(TOO_DEEP) from None

    def _finished(self, problem: Problem, used: Mapping[str, str], dropped: tuple[str, ...]) -> ReadRow:
        return ReadRow(problem, _storable(problem), used, dropped)

    def _read_prompt(self, row: Mapping[str, Any], found: _Found) -> Prompt:
        prompt: Prompt = self._required("prompt", row, found)
        column = found.used["prompt"]
        more = row.get(CONTINUED_BY.get(column, ""))
        if isinstance(prompt, str) and isinstance(more, str) and more.strip():
            prompt = f"{prompt}\n\n{more}"
            found.kept_whole.discard(column)
        if is_blank(prompt):
            raise RowRefused(f"empty prompt in column '{column}'")
        return prompt

    def _renamed(self, verifier: str) -> str:
        """The verifier, or each of a list of them, by the name that stands for the data set's. Raises RowRefused."""
        names = self._verifier_names
        try:
            if not names or (items := verifier_items(verifier)) is None:
                return names.get(verifier, verifier)
            found = verifier_text([replace(item, verifier=names.get(item.verifier, item.verifier)) for item in items])
            verifier_items(found)  # two names may have become one
        except ValueError as error:
            raise RowRefused(f"verifier: {error}") from None
        return found

    def _problem_id(self, row: Mapping[str, Any], found: _Found) -> str | None:
        named = self._optional("problem_id", row, found)
        if named is not None or "problem_id" in self._mapping:
            return named
        index = name_of(lookup(row, "extra_info.index"))
        if index is None:
            return None
        # An index counts within one split of one source.
        found.used["problem_id"] = "extra_info.index"
        parts = (name_of(lookup(row, "data_source")), name_of(lookup(row, "extra_info.split")), index)
        return "/".join(part for part in parts if part)

    def _note_pass_rate(self, row: Mapping[str, Any], extra: dict[str, Any], found: _Found) -> None:
        if self._pass_rate is None:
            return
        value = lookup(row, self._pass_rate.column)
        share = self._pass_rate.read(None if value is MISSING else value)
        if share is not None:
            extra[OFFLINE_PASS_RATE] = share
            found.used[OFFLINE_PASS_RATE] = self._pass_rate.column

    def _required(self, field_name: str, row: Mapping[str, Any], found: _Found) -> Any:
        null = None
        for column, reader in found.columns[field_name].items():
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
        raise RowRefused(f"no column for the {_word(field_name)}: {_looked_for(field_name, row, self._table)}")

    def _optional(self, field_name: str, row: Mapping[str, Any], found: _Found) -> str | None:
        for column, reader in found.columns[field_name].items():
            value = lookup(row, column)
            if value is MISSING or value is None:
                continue
            result: Any = reader(value)
            if isinstance(result, str) and result.strip():
                _note(field_name, column, value, result, found)
                return result
        return None

    def _columns(self, row: Mapping[str, Any]) -> Table:
        """The part of the table that rows with these columns can have; most rows of a file have the same."""
        names = tuple(row)
        present = self._present.get(names)
        if present is None:
            if len(self._present) >= MAX_SHAPES:
                self._present.clear()
            present = self._present[names] = {
                field_name: {c: reader for c, reader in columns.items() if c in row or c.partition(".")[0] in row}
                for field_name, columns in self._table.items()
            }
        return present


def _exported(row: Mapping[str, Any]) -> Problem:
    """The problem of a row that `export` has written. Raises RowRefused."""
    try:
        prompt = json.loads(row["prompt"]) if row.get("prompt_is_messages") else row["prompt"]
        extra = json.loads(row["extra"]) if isinstance(row["extra"], str) else row["extra"]
        extra = plain_column("extra", extra)
    except ValueError as error:
        raise RowRefused("a column of an exported pool is not JSON") from error
    texts = {name: row[name] for name in ("problem_id", "answer", "verifier", "domain", "source")}
    if not isinstance(extra, Mapping) or not all(isinstance(text, str) for text in texts.values()):
        raise RowRefused("a column of an exported pool is of another type than when it was written")
    prompt = prompt if isinstance(prompt, str) else read_prompt(prompt)
    if is_blank(prompt) or not texts["problem_id"] or not texts["verifier"]:
        raise RowRefused("empty prompt, problem_id or verifier in an exported pool")
    return Problem(prompt=prompt, extra=extra, **texts)


def content_id(prompt: Prompt, answer: str) -> str:
    """An id made of prompt and gold: the first 16 hex digits of their SHA-256."""
    turns = [prompt] if isinstance(prompt, str) else [text for m in prompt for text in (m["role"], m["content"])]
    digest = hashlib.sha256()
    for text in (*turns, answer):
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def plain_column(name: str, value: Any) -> Any:
    """As `plain`, with the column in the reason. Raises RowRefused."""
    try:
        return plain(value)
    except RowRefused as refusal:
        raise RowRefused(f"column '{name}': {refusal}") from None


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it: dates and decimals as text, tuples as lists, NaN of a table as null.

    MISSING for anything with bytes. Raises RowRefused for an infinite number, and for what is nested too deeply.
    """
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise RowRefused("an infinite number, which JSON cannot hold")
    if value is None or isinstance(value, _SCALARS):
        return value
    if depth >= MAX_DEPTH:
        raise RowRefused(TOO_DEEP)
    if isinstance(value, Mapping):
        return _unless_missing({str(k): plain(v, depth + 1) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return _unless_missing([plain(v, depth + 1) for v in value])
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return MISSING


def _unless_missing(value: dict[str, Any] | list[Any]) -> Any:
    parts = value.values() if isinstance(value, dict) else value
    return MISSING if any(part is MISSING for part in parts) else value


def _note(field_name: str, column: str, value: Any, result: Any, found: _Found) -> None:
    found.used[field_name] = column
    if (tuple(value) if isinstance(value, list) else value) == result:
        found.kept_whole.add(column)


def _looked_for(field_name: str, row: Mapping[str, Any], table: Table) -> str:
    return (
        f"the row has {', '.join(sorted(map(str, row))) or 'none'}; looked for {', '.join(table[field_name])}; "
        f'set mapping.{field_name} = "<column>" to name it'
    )


def _word(field_name: str) -> str:
    return "gold" if field_name == "answer" else field_name


def _storable(problem: Problem) -> Mapping[str, Any]:
    """The row of the pool's table. Raises RowRefused for text that no file can hold."""
    try:
        row = problem_row(problem)
        for value in row.values():
            if isinstance(value, str):
                value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowRefused("half of a surrogate pair in the text") from None
    return row
