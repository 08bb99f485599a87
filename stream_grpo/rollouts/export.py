"""Groups as one Parquet file: a row a rollout, the columns of a segment and what became of the group."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stream_grpo.buffer.facts import batch_of_record
from stream_grpo.errors import ConfigError
from stream_grpo.rollouts.views import Filters, GroupLine, Groups
from stream_grpo.transport.codec import GROUP_SCHEMA

_ADDED = {
    "state": pa.string(),
    "reason": pa.string(),
    "age": pa.int32(),
    "made_branch": pa.int32(),
    "made_step": pa.int32(),
    "came_at_s": pa.float64(),
}
SCHEMA = pa.schema([*GROUP_SCHEMA, *(pa.field(name, of) for name, of in _ADDED.items())])
"""What a file holds."""
_GROUPS_AT_ONCE = 64


def write_parquet(directory: Path, filters: Filters, path: Path, limit: int | None = None) -> int:
    """Write the groups that pass, oldest first, the oldest `limit` of them; returns how many. The file is whole or
    not there.

    Raises ConfigError where it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"--parquet {path}: it is there already, and nothing is overwritten; name another file")
    groups = Groups(directory)
    beside = path.with_name(f".{path.name}.tmp")
    num_groups = 0
    try:
        with pq.ParquetWriter(beside, SCHEMA, compression="zstd") as writer:
            lines = islice(groups.lines(filters, newest_first=False), limit)
            while some := list(islice(lines, _GROUPS_AT_ONCE)):
                writer.write_table(pa.Table.from_batches([_batch(groups, line) for line in some], SCHEMA))
                num_groups += len(some)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"--parquet {path}: cannot be written: {error.strerror or error}") from error
    return num_groups


def _batch(groups: Groups, line: GroupLine) -> pa.RecordBatch:
    batch = batch_of_record(groups.data(line.view))
    view = line.view
    made = view.made or (None, None)
    values = (view.state, view.reason, line.age, *made, view.came_at_s)
    added = [pa.array([value] * batch.num_rows, of) for value, of in zip(values, _ADDED.values(), strict=True)]
    return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=SCHEMA)
