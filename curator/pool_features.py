"""The features of a whole pool, read by columns; the numbers of its texts are kept beside it once they are made.

P: problems, X: numbers of a text.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from curator.embedding import NUM_DIMENSIONS, WIDTHS, hashed_ngrams
from curator.errors import PoolError
from curator.estimators.features import Features, features_of_columns, fourier, offline_rate, text_of
from curator.pool import Pool
from curator.schema import OFFLINE_PASS_RATE

TEXT_TABLE = "text_numbers"
"""Table in the pool's folder: a problem's id and its numbers."""
_ROWS = 1 << 14


def features_of_pool(pool: Pool, num_text: int) -> Features:
    """As `features_of` of the pool's problems, with `num_text` numbers of their texts as hashed n-grams.

    The pool's writer keeps those in a table: of a million prompts they take a while. Raises PoolError.
    """
    lengths, rates = [], []
    for batch in pool.columns(("prompt", "prompt_is_messages", "extra"), _ROWS):
        lengths.append(np.asarray(pc.utf8_length(_texts(batch)), np.float64))
        rates.append(_offline_rates(batch["extra"]))
    rate_P = np.concatenate(rates)
    return features_of_columns(
        pool.domain_numbers,
        num_characters_P=np.concatenate(lengths),
        offline_rate_PA=rate_P if np.any(~np.isnan(rate_P)) else None,
        vector_PV=_text_numbers(pool, num_text) if num_text else None,
    )


def _texts(batch: pa.RecordBatch) -> pa.Array:
    if not pc.any(batch["prompt_is_messages"]).as_py():
        return batch["prompt"]
    prompts = zip(batch["prompt"].to_pylist(), batch["prompt_is_messages"].to_pylist(), strict=True)
    return pa.array([text_of(json.loads(prompt) if is_messages else prompt) for prompt, is_messages in prompts])


def _offline_rates(extra: pa.Array) -> NDArray[np.float64]:
    rate_P = np.full(len(extra), np.nan)
    # JSON is parsed only where the name occurs at all.
    named_P = np.flatnonzero(np.asarray(pc.match_substring(extra, f'"{OFFLINE_PASS_RATE}"')))
    for place, text in zip(named_P.tolist(), extra.take(pa.array(named_P)).to_pylist(), strict=True):
        rate_P[place] = offline_rate(json.loads(text))
    return rate_P


def has_text_numbers(pool: Pool, num: int) -> bool:
    """Whether the pool keeps so many numbers of the text of each of its problems. Raises PoolError."""
    return _kept_numbers(pool, _ids(pool), _made_by(num)) is not None


def _made_by(num: int) -> dict[str, str]:
    return {"made_by": f"fourier({num}) of hashed n-grams {WIDTHS} in {NUM_DIMENSIONS}"}


def _ids(pool: Pool) -> pa.ChunkedArray:
    return pa.chunked_array([batch["problem_id"] for batch in pool.columns(("problem_id",), _ROWS)])


def _text_numbers(pool: Pool, num: int) -> NDArray[np.float32]:
    made_by, ids = _made_by(num), _ids(pool)
    if (number_PX := _kept_numbers(pool, ids, made_by)) is not None:
        return number_PX
    number_PX = np.concatenate(
        [
            fourier(hashed_ngrams(_texts(batch).to_pylist()), num)
            for batch in pool.columns(("prompt", "prompt_is_messages"), _ROWS)
        ]
    )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(number_PX.reshape(-1)), num)
    table = pa.table({"problem_id": ids, "numbers": vectors})
    if pool.is_writer:
        pool.keep_further_table(TEXT_TABLE, table.replace_schema_metadata(made_by))
    return number_PX


def _kept_numbers(pool: Pool, ids: pa.ChunkedArray, made_by: dict[str, str]) -> NDArray[np.float32] | None:
    """The numbers of these problems from the table; None where it lacks one of them or was made another way."""
    try:
        kept = pool.further_table(TEXT_TABLE)
    except PoolError:
        # Damaged: they are made again.
        return None
    if kept is None or kept.schema.metadata != {name.encode(): value.encode() for name, value in made_by.items()}:
        return None
    if not kept["problem_id"].equals(ids):
        place = pc.index_in(ids, kept["problem_id"])
        if place.null_count:
            return None
        kept = kept.take(place)
    vectors = kept["numbers"].combine_chunks()
    return np.asarray(vectors.flatten(), np.float32).reshape(len(ids), -1)
