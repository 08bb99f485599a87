"""The pool on LanceDB: the table of problems, and the append-only table of outcomes. The only file importing lancedb.

One process writes, and holds a lock while it does; any number may read.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from datetime import timedelta
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from curator.errors import PoolError
from curator.leftovers import locked_folder
from curator.schema import OUTCOME_SCHEMA, PROBLEM_SCHEMA, Problem, problem_from_row, problems_to_batch

# LanceDB's own log would print warnings into every terminal; the level is read at import.
os.environ.setdefault("LANCE_LOG", "error")
import lancedb

# A child that only runs another program, as Ray's processes do, uses nothing of LanceDB.
warnings.filterwarnings("ignore", message="lancedb fork support is experimental", category=RuntimeWarning)

CREATE_BATCH_ROWS = 4096
ADD_ROWS, ADD_BYTES = 1 << 16, 128 << 20
"""Problems are added to a new pool this many rows or bytes at a time."""
REMOVE_IDS = 4096
"""Ids of one condition."""
COMPACT_EVERY = 50
"""Appends between two compactions: every append makes a file, and scans slow down with their number."""
_RUN_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
KEEP_VERSIONS = timedelta(minutes=10)
"""A reader may hold an older version this long."""


class Pool:
    """A folder of two tables. Problems have an index: their place in the order of their ids."""

    def __init__(self, path: Path, problems: Any, outcomes: Any, compact_every: int) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.run = ""
        """Whose outcomes these are; empty: those of the pool itself. See `of_run`."""
        self._problem_table = problems
        self._outcome_table = outcomes
        self._compact_every = compact_every
        self._num_appends = 0
        self._is_shared = False
        """Whether runs have the same problems in memory."""
        self._lock = _WriterLock(path)
        self.is_writer = False
        """Whether this is the one that writes."""
        self._last_sequence: int | None = None

    @classmethod
    def create(cls, path: Path, problems: Iterable[Problem], *, compact_every: int = COMPACT_EVERY) -> Pool:
        """Write a new pool; it appears whole or not at all.

        Raises PoolError where something is at `path`, an id occurs twice or there are no problems.
        """
        return cls.create_from_batches(path, _problem_batches(problems), compact_every=compact_every)

    @classmethod
    def create_from_batches(
        cls, path: Path, batches: Iterable[pa.RecordBatch], *, compact_every: int = COMPACT_EVERY
    ) -> Pool:
        """As `create`, from batches of PROBLEM_SCHEMA, of which few are in memory at once."""
        if path.exists():
            raise PoolError(f"{path}: exists already")
        with ExitStack() as stack:
            with _creating(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                building = stack.enter_context(locked_folder(path.parent, f".{path.name}.building-"))
                database = lancedb.connect(str(building))
                problems = database.create_table("problems", schema=PROBLEM_SCHEMA)
                database.create_table("outcomes", schema=OUTCOME_SCHEMA)
            for table in _tables(batches):
                with _creating(path):
                    problems.add(table)
            _check_ids(path, problems)
            with _creating(path):
                building.rename(path)
        return cls.open(path, compact_every=compact_every)

    @classmethod
    def open(cls, path: Path, *, compact_every: int = COMPACT_EVERY, version: int | None = None) -> Pool:
        """Open what `create` made; `version`: the problems as they were then, to be read only.

        Raises PoolError for anything else, another version of the schemas, or a version that is not kept; so does
        every method that reads a damaged folder.
        """
        if not path.is_dir():
            raise PoolError(f"{path}: no pool there")
        tables = []
        database = lancedb.connect(str(path))
        for name, schema in (("problems", PROBLEM_SCHEMA), ("outcomes", OUTCOME_SCHEMA)):
            try:
                table = database.open_table(name)
            except (ValueError, OSError, RuntimeError) as error:
                raise PoolError(f"{path}: not a pool: {error}") from error
            if not table.schema.equals(schema, check_metadata=True):
                raise PoolError(f"{path}: table {name} is of schema {table.schema.metadata}, not {schema.metadata}")
            tables.append(table)
        if version is not None:
            try:
                tables[0].checkout(version)
            except (ValueError, OSError, RuntimeError, TypeError) as error:
                raise PoolError(f"{path}: version {version} of the problems is not kept: {error}") from error
        return cls(path, tables[0], tables[1], compact_every)

    @property
    def version(self) -> int:
        """Version of the problems; every change of them raises it."""
        return int(self._problem_table.version)

    @cached_property
    def _problems(self) -> pa.Table:
        """All problems by index. In one piece: of a table in many, a few rows take as long as all."""
        with _reading(self.path):
            table = self._problem_table.to_arrow()
        ids = table["problem_id"]
        if not pc.all(pc.less(ids.slice(0, max(0, len(ids) - 1)), ids.slice(1))).as_py():
            table = table.take(pc.sort_indices(ids))
        return table.combine_chunks()

    @cached_property
    def problem_ids(self) -> list[str]:
        """Ids by index, ascending."""
        ids: list[str] = self._problems["problem_id"].to_pylist()
        return ids

    def index_of(self, problem_id: str) -> int | None:
        """Index of a problem; None where it is not in the pool."""
        ids = self.problem_ids
        index = bisect_left(ids, problem_id)
        return index if index < len(ids) and ids[index] == problem_id else None

    @cached_property
    def domain_names(self) -> list[str]:
        """Domains that problems have, ascending."""
        return sorted(pc.unique(self._problems["domain"]).to_pylist())

    @cached_property
    def domain_numbers(self) -> NDArray[np.int64]:
        """Each problem's place in `domain_names`, by index."""
        numbers = pc.index_in(self._problems["domain"], pa.array(self.domain_names, pa.string()))
        return np.asarray(numbers, np.int64)

    @property
    def domains(self) -> list[str]:
        """Domains by index."""
        names = self.domain_names
        return [names[number] for number in self.domain_numbers.tolist()]

    def columns(self, names: Sequence[str], num_rows: int) -> Iterator[pa.RecordBatch]:
        """Some columns of PROBLEM_SCHEMA by index, at most so many rows at a time."""
        return iter(self._problems.select(list(names)).to_batches(num_rows))

    def take(self, indices: Sequence[int]) -> list[Problem]:
        """The problems at some indices, in the order asked."""
        rows = self._problems.take(pa.array(np.asarray(indices, np.int64)))
        with _reading(self.path):
            return [problem_from_row(row) for row in rows.to_pylist()]

    def problems(self) -> list[Problem]:
        """All problems, by index."""
        return self.take(range(len(self.problem_ids)))

    def problem_batches(self) -> Iterator[pa.RecordBatch]:
        """All problems as batches of PROBLEM_SCHEMA, in the order of the table, without holding them in memory."""
        with _reading(self.path):
            for batch in self._problem_table.search().to_batches(CREATE_BATCH_ROWS):
                yield batch.select(PROBLEM_SCHEMA.names)

    def num_problems(self) -> int:
        """Rows of the table of problems."""
        with _reading(self.path):
            return int(self._problem_table.count_rows())

    def find(self, problem_id: str) -> Problem | None:
        """The problem of an id, read from the table alone."""
        with _reading(self.path):
            rows = self._problem_table.search().where(f"problem_id = {_quoted(problem_id)}").to_list()
            return problem_from_row(rows[0]) if rows else None

    def remove(self, problem_ids: Sequence[str]) -> None:
        """Take problems out of the table, as new versions of it; their outcomes stay.

        Older versions can be opened until `compact` drops them. Raises PoolError where another process writes to the
        pool, or `of_run` was asked, and where the write fails; what is removed by then stays removed.
        """
        if self._is_shared:
            # A problem's index is its name in the state of every run: with fewer problems it would be another's.
            raise PoolError(f"{self.path}: runs share these problems; remove from the pool opened anew, without runs")
        self.become_writer()
        try:
            for start in range(0, len(problem_ids), REMOVE_IDS):
                listed = ", ".join(map(_quoted, problem_ids[start : start + REMOVE_IDS]))
                self._problem_table.delete(f"problem_id IN ({listed})")
        except (OSError, RuntimeError, ValueError) as error:
            raise PoolError(f"{self.path}: cannot remove problems: {error}") from error
        finally:
            for name in ("_problems", "problem_ids", "domain_names", "domain_numbers"):
                self.__dict__.pop(name, None)

    def versions(self) -> list[int]:
        """Versions of the problems that are kept, the newest last."""
        with _reading(self.path):
            return [int(entry["version"]) for entry in self._problem_table.list_versions()]

    def compact(self, keep_versions: timedelta = KEEP_VERSIONS) -> None:
        """Rewrite both tables in few files and drop versions that are older. Raises PoolError."""
        self.become_writer()
        try:
            with warnings.catch_warnings():
                # The warning that no version is left besides the newest: that is what was asked for.
                warnings.simplefilter("ignore", UserWarning)
                self._problem_table.optimize(cleanup_older_than=keep_versions)
                self._outcome_table.optimize(cleanup_older_than=keep_versions)
        except (OSError, RuntimeError) as error:
            raise PoolError(f"{self.path}: cannot be compacted: {error}") from error

    def fingerprint(self) -> str:
        """A hash of all problems, whatever their order: another pool, or a changed problem, gives another."""
        digest = hashlib.sha256()
        for batch in self._problems.to_batches(CREATE_BATCH_ROWS):
            for row in batch.to_pylist():
                for value in row.values():
                    data = str(value).encode()
                    digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def outcomes(self, first: int = 0) -> pa.Table:
        """The outcomes from sequence number `first` on, in the order of these."""
        with _reading(self.path):
            self._outcome_table.checkout_latest()
            if first <= 0:
                return self._outcome_table.to_arrow().sort_by("sequence")
            return self._outcome_table.search().where(f"sequence >= {first}").to_arrow().sort_by("sequence")

    def num_outcomes(self) -> int:
        """Rows of the table of outcomes."""
        with _reading(self.path):
            self._outcome_table.checkout_latest()
            return int(self._outcome_table.count_rows())

    @property
    def state_path(self) -> Path:
        """File in the folder for what a curator has made of the outcomes, see `state`."""
        return self.path / f"{self.named('curator')}.state"

    def of_run(self, name: str) -> Pool:
        """The same problems, in the same memory, with the outcomes of another run in a table of their own.

        One process may write for several runs at once, each with a posterior of its own. Raises PoolError for a name
        that is more than letters, digits, dashes and underscores, and for a table that cannot be made.
        """
        if not _RUN_NAME.fullmatch(name):
            raise PoolError(f"{self.path}: run {name!r}: expected 1 to 100 letters, digits, dashes or underscores")
        _ = self._problems, self.problem_ids, self.domain_numbers  # in memory once
        self._is_shared = True
        other = copy(self)
        other.run, other.is_writer, other._last_sequence, other._num_appends = name, False, None, 0
        database = lancedb.connect(str(self.path))
        try:
            if self._opened(other.named("outcomes")) is None:
                database.create_table(other.named("outcomes"), schema=OUTCOME_SCHEMA)
            other._outcome_table = database.open_table(other.named("outcomes"))
        except (OSError, RuntimeError, ValueError) as error:
            raise PoolError(f"{self.path}: the outcomes of run {name!r} cannot be opened: {error}") from error
        return other

    def named(self, table: str) -> str:
        """Name of a table that each run has for itself."""
        return f"{table}-{self.run}" if self.run else table

    def further_table(self, name: str) -> pa.Table | None:
        """A table that another part keeps in the folder; None where it is not there."""
        with _reading(self.path):
            table = self._opened(name)
            return None if table is None else table.to_arrow()

    def num_further_rows(self, name: str) -> int:
        """Rows of such a table; 0 where it is not there."""
        with _reading(self.path):
            table = self._opened(name)
            return 0 if table is None else int(table.count_rows())

    def _opened(self, name: str) -> Any | None:
        """A table of the folder; None where no write of it has come to its end, whatever one that was cut off left."""
        try:
            return lancedb.connect(str(self.path)).open_table(name)
        except ValueError:  # not found; what is damaged raises others
            return None

    def keep_further_table(self, name: str, table: pa.Table) -> None:
        """Write such a table, in place of what it was; whenever the process dies, the one or the other is there.

        Raises PoolError where another process writes to the pool, and where the write fails.
        """
        self.become_writer()
        try:
            database = lancedb.connect(str(self.path))
            if self._opened(name) is None:
                database.create_table(name, table)
            else:
                written = database.create_table(name, table, mode="overwrite")
                written.optimize(cleanup_older_than=KEEP_VERSIONS)
        except (OSError, RuntimeError, ValueError) as error:
            raise PoolError(f"{self.path}: cannot write the table {name}: {error}") from error

    def last_sequence(self) -> int:
        """Sequence number of the newest outcome in the table; -1 where there is none."""
        if self.is_writer and self._last_sequence is not None:
            return self._last_sequence
        with _reading(self.path):
            self._outcome_table.checkout_latest()
            largest = pc.max(self._outcome_table.search().select(["sequence"]).to_arrow()["sequence"]).as_py()
        self._last_sequence = -1 if largest is None else int(largest)
        return self._last_sequence

    def append_outcomes(self, batch: pa.RecordBatch) -> None:
        """Add outcomes, whose sequence numbers go on where the table ends; all are added or none.

        Raises PoolError for a gap or a repeat, where another process writes, and where the write fails.
        """
        self.become_writer()
        expected = list(range(self.last_sequence() + 1, self.last_sequence() + 1 + batch.num_rows))
        if batch["sequence"].to_pylist() != expected:
            raise PoolError(f"{self.path}: outcomes must go on at sequence {self.last_sequence() + 1} without gaps")
        if not expected:
            return
        try:
            self._outcome_table.add(pa.Table.from_batches([batch]))
        except (OSError, RuntimeError, ValueError) as error:
            # Whether it was committed is unknown: the table itself is asked the next time.
            self._last_sequence = None
            raise PoolError(f"{self.path}: cannot append outcomes: {error}") from error
        self._last_sequence = expected[-1]
        self._num_appends += 1
        if self._num_appends % self._compact_every == 0:
            self._compact()

    def _compact(self) -> None:
        try:
            self._outcome_table.optimize(cleanup_older_than=KEEP_VERSIONS)
        except (OSError, RuntimeError) as error:
            self._outcome_table.checkout_latest()
            raise PoolError(f"{self.path}: outcomes are appended, but cannot be compacted: {error}") from error

    def become_writer(self) -> None:
        """Hold the writer's lock until `close`. Raises PoolError where another holds it."""
        if not self.is_writer:
            self._lock.take()
            self.is_writer, self._last_sequence = True, None

    def close(self) -> None:
        """Let another process write."""
        if self.is_writer:
            self._lock.drop()
            self.is_writer = False


class _WriterLock:
    """The lock of a pool's folder, held by one process for all the runs that it keeps there."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_holders = path, 0
        self._file: IO[bytes] | None = None

    def take(self) -> None:
        if self._file is None:
            # The kernel drops the lock when its holder dies, however it dies.
            file = (self._path / "writer.lock").open("wb")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.close()
                raise PoolError(f"{self._path}: another process writes to this pool") from error
            self._file = file
        self._num_holders += 1

    def drop(self) -> None:
        self._num_holders -= 1
        if self._file is not None and not self._num_holders:
            self._file.close()
            self._file = None


def _problem_batches(problems: Iterable[Problem]) -> Iterator[pa.RecordBatch]:
    remaining = iter(problems)
    while chunk := list(islice(remaining, CREATE_BATCH_ROWS)):
        yield problems_to_batch(chunk)


def _tables(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches put together: every append to a table makes a file."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(b.num_rows for b in waiting) >= ADD_ROWS or sum(b.nbytes for b in waiting) >= ADD_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if sum(batch.num_rows for batch in waiting):
        yield pa.Table.from_batches(waiting)


def _check_ids(path: Path, problems: Any) -> None:
    counts = problems.search().select(["problem_id"]).to_arrow().group_by("problem_id").aggregate([([], "count_all")])
    if not counts.num_rows:
        raise PoolError(f"{path}: no problems to make a pool of")
    twice = counts.filter(pc.greater(counts["count_all"], 1))
    if twice.num_rows:
        raise PoolError(f"{path}: two problems have the id '{twice['problem_id'][0]}'")


@contextmanager
def _creating(path: Path) -> Iterator[None]:
    """What LanceDB and the disk raise, as a PoolError; what the problems' own source raises is none of theirs."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise PoolError(f"{path}: cannot be created: {error}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What LanceDB raises for tables that are damaged, as a PoolError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise PoolError(
            f"{path}: damaged, a table cannot be read: {error}; copy the folder back from a backup, or import anew"
        ) from error


def _quoted(text: str) -> str:
    """Text in a condition of LanceDB."""
    return "'" + text.replace("'", "''") + "'"
