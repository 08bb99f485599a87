"""What another run has learned as the beginning of this one's posterior: its outcomes, copied once.

The copy is a table of this pool, `earlier_outcomes`. So the state stays a fold over what lies in the pool's folder,
whatever becomes of the other run, and each run goes its own way from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from curator.errors import PoolError
from curator.pool import Pool
from curator.schema import Outcome, outcomes_from_batch

EARLIER_TABLE = "earlier_outcomes"
EARLIER_STEPS = 100.0
"""Policy steps that lie between the two runs for the estimator: the weights are others, the problems are not."""
_ROWS = 4096


def start_from(pool: Pool, other: Path | Pool) -> None:
    """Copy the outcomes of a run or a pool, given by its folder or open, unless that was done before.

    What came earlier for that one comes along. Branches are made negative; what is called a sequence has no meaning.

    Raises PoolError where it has no outcome of a problem of this pool, and where this pool has outcomes already: what
    is a beginning cannot come later.
    """
    pool.become_writer()
    if pool.further_table(pool.named(EARLIER_TABLE)) is not None:
        return
    if pool.last_sequence() >= 0:
        raise PoolError(
            f"{pool.path}: has outcomes already; those of {_name(other)} can only come before them: begin a new run"
        )
    pool.keep_further_table(pool.named(EARLIER_TABLE), _outcomes_of(pool, other))


def earlier_outcomes(pool: Pool) -> Iterator[Outcome]:
    """The outcomes that come before the pool's own, in order."""
    table = pool.further_table(pool.named(EARLIER_TABLE))
    for batch in [] if table is None else table.to_batches(max_chunksize=_ROWS):
        yield from outcomes_from_batch(batch)


def _name(other: Path | Pool) -> str:
    return f"{other.path} {other.run}".rstrip() if isinstance(other, Pool) else str(other)


def _outcomes_of(pool: Pool, given: Path | Pool) -> pa.Table:
    other = given if isinstance(given, Pool) else Pool.open(given / "pool" if (given / "pool").is_dir() else given)
    own, before = other.outcomes(), other.further_table(other.named(EARLIER_TABLE))
    table = own if before is None else pa.concat_tables([before.select(own.schema.names).cast(own.schema), own])
    table = table.filter(pc.is_in(table["problem_id"], pa.array(pool.problem_ids)))
    if not table.num_rows:
        raise PoolError(f"{_name(given)}: has no outcome of a problem of the new pool; there is nothing to start from")
    # A branch of this run begins where the newest of these came to, see PolicyClock: theirs must be others.
    branch = np.asarray(table["branch"], np.int32)
    place = table.schema.get_field_index("branch")
    return table.set_column(place, table.schema.field(place), pa.array(branch - branch.max() - 1, pa.int32()))
