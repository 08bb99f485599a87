"""Problems on their way into a pool: a file of Arrow batches, written once and read as often as needed.

So the whole report stands before anything is written to a pool, and no file is parsed twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from curator.dedup import digest, normalised
from curator.ingest.rows import ReadRow
from curator.schema import PROBLEM_SCHEMA

BATCH_ROWS = 4096
BATCH_BYTES = 32 << 20
"""A batch ends at either; rows of code problems may hold megabytes of tests."""


class Staging:
    """`write` all problems, then read them back with `batches`."""

    def __init__(self, path: Path) -> None:
        """A file that does not exist yet."""
        self._path = path
        self._lengths: list[NDArray[np.uint32]] = []
        self._text_digests, self._gold_digests = bytearray(), bytearray()

    def write(self, rows: Iterable[ReadRow]) -> None:
        """Write the problems of rows. Raises OSError where the disk is full."""
        with pa.OSFile(str(self._path), "wb") as file, pa.ipc.new_stream(file, PROBLEM_SCHEMA) as writer:
            for chunk in _chunks(rows):
                writer.write_batch(pa.RecordBatch.from_pylist([dict(row.stored) for row in chunk], PROBLEM_SCHEMA))
                texts = [prompt_text(row.problem.prompt) for row in chunk]
                self._lengths.append(np.fromiter(map(len, texts), np.uint32, len(texts)))
                for text, row in zip(texts, chunk, strict=True):
                    self._text_digests += digest(normalised(text))
                    self._gold_digests += digest(normalised(row.problem.answer))

    @property
    def num_characters(self) -> NDArray[np.uint32]:
        """Length of each prompt."""
        return np.concatenate([np.zeros(0, np.uint32), *self._lengths])

    def text_key(self, index: int) -> bytes:
        """Equal for prompts that are equal after normalising."""
        return bytes(self._text_digests[16 * index : 16 * index + 16])

    def gold_key(self, index: int) -> bytes:
        """Equal for golds that are equal after normalising."""
        return bytes(self._gold_digests[16 * index : 16 * index + 16])

    def batches(self, keep: NDArray[np.bool_] | None = None) -> Iterator[pa.RecordBatch]:
        """All problems, or those of a mask, a batch of PROBLEM_SCHEMA at a time."""
        start = 0
        with pa.memory_map(str(self._path)) as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                end = start + batch.num_rows
                yield batch if keep is None else batch.filter(pa.array(keep[start:end]))
                start = end

    def rows(self, indices: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Some problems as rows of PROBLEM_SCHEMA, by index."""
        wanted = np.unique(np.fromiter(indices, np.int64))
        found: dict[int, dict[str, Any]] = {}
        start = 0
        for batch in self.batches():
            inside = wanted[(wanted >= start) & (wanted < start + batch.num_rows)]
            found.update(zip(inside.tolist(), batch.take(pa.array(inside - start)).to_pylist(), strict=True))
            start += batch.num_rows
        return found

    def column(self, name: str, keep: NDArray[np.bool_]) -> list[Any]:
        """One column of the problems of a mask."""
        return [value for batch in self.batches(keep) for value in batch[name].to_pylist()]

    def texts(self, keep: NDArray[np.bool_]) -> list[str]:
        """The prompts of a mask, normalised."""
        return [normalised(text) for batch in self.batches(keep) for text in batch_texts(batch)]


def prompt_text(prompt: Any) -> str:
    """What a prompt says: of messages the contents, one below the other, without the system's."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt if message["role"] != "system")


def batch_texts(batch: pa.RecordBatch) -> Iterator[str]:
    """`prompt_text` of the problems of a batch of PROBLEM_SCHEMA."""
    columns = zip(batch["prompt"].to_pylist(), batch["prompt_is_messages"].to_pylist(), strict=True)
    return (prompt_text(json.loads(prompt)) if is_messages else prompt for prompt, is_messages in columns)


def _chunks(rows: Iterable[ReadRow]) -> Iterator[list[ReadRow]]:
    chunk: list[ReadRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += sum(len(value) for value in row.stored.values() if isinstance(value, str))
        if len(chunk) == BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
