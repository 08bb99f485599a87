"""What a curator has made of its outcomes, kept as a file beside them: a restart folds the outcomes after it alone.

It is never needed: without it, or where it does not fit, all outcomes are folded, to the same state bit for bit. It is
written once all outcomes in it are in the table, every so many of them and at the close, so that folding what came
after it takes about as long as folding that many; a larger pool has a larger file, and it is written less often.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray

from curator import snapshot
from curator.chooser import Rules
from curator.earlier import EARLIER_STEPS, EARLIER_TABLE
from curator.errors import PoolError, SnapshotError
from curator.estimators.item_response import Prior
from curator.pool import Pool
from curator.schema import outcomes_from_batch

SAVE_EVERY = 1 << 14
"""Outcomes from one file to the next: less than two seconds of folding."""
_PROBLEMS_AN_OUTCOME = 16
"""The file of a pool of more than so many problems for each of these is written after more outcomes."""
_log = logging.getLogger(__name__)


class SavedState:
    """The file of one run's state."""

    def __init__(
        self,
        pool: Pool,
        folds: Mapping[str, snapshot.Fold],
        rules: Rules,
        depends_on: Sequence[NDArray[Any]],
    ) -> None:
        """`folds`: what is kept; `depends_on`: what is known of the problems beforehand, as the estimator takes it."""
        self._pool, self._folds = pool, folds
        settings = {
            **{name: getattr(rules, name) for name in ("estimator", "rate_step", "domain_step", "unseen_rate", "keep")},
            "prior": asdict(Prior()),
            "earlier_outcomes": pool.num_further_rows(pool.named(EARLIER_TABLE)),
            "earlier_steps": EARLIER_STEPS,
        }
        problems = snapshot.digest_of((pool.problem_ids, pool.domain_names), (pool.domain_numbers, *depends_on))
        # As it is read back.
        self._of: dict[str, Any] = json.loads(json.dumps({"settings": settings, "problems": problems}))
        self._every = max(SAVE_EVERY, len(pool.problem_ids) // _PROBLEMS_AN_OUTCOME)
        self._num_restored = self._num_saved = 0
        self._write_s = 0.0
        self.why_not_used = ""
        """Of the file that was there at the start; empty where it was used, or there was none."""

    def as_fields(self) -> dict[str, Any]:
        """Fields of a status."""
        return {"restored": self._num_restored, "saved": self._num_saved, "write_s": self._write_s}

    def restore(self) -> bool:
        """Set the folds as the file has them; False, and nothing is changed, where there is none or it does not fit."""
        path = self._pool.state_path
        try:
            found = snapshot.read(path)
            if found is None:
                return False
            self._check(found.header)
            snapshot.restore(found, self._folds)
        except SnapshotError as error:
            self.why_not_used = str(error)
            _log.warning("%s: not used: %s; all outcomes are folded instead", path, error)
            return False
        self._num_restored = self._num_saved = found.header["next_sequence"]
        return True

    def _check(self, header: Mapping[str, Any]) -> None:
        """Raise SnapshotError where a file is not of these settings, problems and outcomes."""
        if header["settings"] != self._of["settings"]:
            names = [name for name, value in self._of["settings"].items() if header["settings"].get(name) != value]
            raise SnapshotError(f"it is of other settings: {', '.join(names) or 'some that are no more'}")
        if header["problems"] != self._of["problems"]:
            raise SnapshotError("it is of other problems, or of other numbers of their texts")
        last = header["next_sequence"] - 1
        rest = self._pool.outcomes(last)
        if not rest.num_rows or rest["sequence"][0].as_py() != last:
            raise SnapshotError(f"the table of outcomes does not have outcome {last}, which is in it")
        if _text_of(rest.slice(0, 1)) != header["last_outcome"]:
            raise SnapshotError(f"it is of other outcomes: outcome {last} differs")
        if self._pool.num_outcomes() != last + rest.num_rows:
            raise SnapshotError(f"outcomes before {last} are missing in the table")

    def save_if_due(self, next_sequence: int) -> None:
        """Write the file where enough outcomes have come since; all before `next_sequence` are in the table."""
        if next_sequence - self._num_saved >= self._every:
            self.save(next_sequence)

    def save(self, next_sequence: int) -> None:
        """Write the file where any outcome has come since. A failure is logged: the outcomes say the same."""
        if next_sequence <= self._num_saved:
            return
        begun = time.perf_counter()
        self._num_saved = next_sequence
        try:
            header = {
                **self._of,
                "problems_version": self._pool.version,
                "next_sequence": next_sequence,
                "last_outcome": _text_of(self._pool.outcomes(next_sequence - 1).slice(0, 1)),
            }
            snapshot.write(self._pool.state_path, header, self._folds)
        except (OSError, PoolError) as error:
            _log.warning("%s: cannot be written: %s; a restart folds more outcomes", self._pool.state_path, error)
        self._write_s = time.perf_counter() - begun


def _text_of(outcome: Any) -> str:
    """The one row of a table of outcomes as text that is equal only for equal ones, NaN among their values or not."""
    (row,) = outcomes_from_batch(outcome.combine_chunks().to_batches()[0])
    return json.dumps(asdict(row))
