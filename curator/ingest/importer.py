"""An import of any size: rows are staged in a file, settled and cleaned there, and only then written to a pool."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from curator.cleaning import Cleaning, Collision, Corpus, collisions
from curator.errors import PoolError, RowRefused
from curator.ingest.account import ImportReport, Removed, Spread
from curator.ingest.places import Places
from curator.ingest.reading import ProblemReading, Source, file_sources
from curator.ingest.rows import ReadRow, RowReader
from curator.ingest.staging import Staging, prompt_text
from curator.ingest.template import ChatTemplate
from curator.schema import Problem, problem_from_row

MAX_EXAMPLE_CHARACTERS = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """What is imported and how."""

    sources: Iterable[Source]
    reader: RowReader = field(default_factory=RowReader)
    cleaning: Cleaning = field(default_factory=Cleaning)
    heldout: Sequence[Path] = ()
    """Files whose problems the pool may not have."""
    template: ChatTemplate | None = None
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The problems of an import before they are written, and the report."""

    report: ImportReport
    staging: Staging
    keep: NDArray[np.bool_]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The problems that are kept, a batch of PROBLEM_SCHEMA at a time."""
        return self.staging.batches(self.keep)


def prepare(plan: ImportPlan, folder: Path, say: Callable[[str], None] = lambda text: None) -> Prepared:
    """Read and clean; `folder` is where the staged problems stand until they are no longer needed.

    Raises PoolError where a file cannot be read or has no rows. What is refused, in conflict or removed is in the
    report; whether that is too much is the caller's to say.
    """
    report = ImportReport()
    lengths = _Lengths(plan)
    reading = ProblemReading(plan.sources, plan.reader, report, lengths.check)
    staging = Staging(folder / "problems.arrow")
    staging.write(reading)
    keep = reading.settle(lambda mask: staging.column("problem_id", mask))
    say(f"{report.num_rows} rows read")
    heldout, places = read_heldout(plan.heldout, plan.reader)
    if heldout or plan.cleaning.is_within_pool:
        say("comparing the problems with one another" + (" and with the held-out ones" if heldout else ""))
        clean(staging, keep, heldout, places, plan.cleaning, report, reading.places)
    _describe(report, staging, keep, plan, lengths)
    return Prepared(report, staging, keep)


def clean_pool(
    batches: Iterable[pa.RecordBatch], cleaning: Cleaning, heldout: Sequence[Path], reader: RowReader, folder: Path
) -> ImportReport:
    """What leaves a pool that exists, given as batches of PROBLEM_SCHEMA; `reader` is that of the held-out files.

    Raises PoolError where a held-out file cannot be read.
    """
    texts, places = read_heldout(heldout, reader)
    staging = Staging(folder / "problems.arrow")
    staging.write(ReadRow(problem_from_row(row), row, {}, ()) for batch in batches for row in batch.to_pylist())
    report = ImportReport(num_rows=len(staging.num_characters))
    keep = np.ones(report.num_rows, bool)
    clean(staging, keep, texts, places, cleaning, report)
    _describe(report, staging, keep, ImportPlan(sources=[]), _Lengths(ImportPlan(sources=[])))
    return report


def clean(
    staging: Staging,
    keep: NDArray[np.bool_],
    heldout: Sequence[str],
    heldout_places: Places,
    cleaning: Cleaning,
    report: ImportReport,
    places: Places | None = None,
) -> None:
    """Take out of `keep` what is in the pool twice or held out, and note it in the report."""
    rows = np.flatnonzero(keep)

    def texts(is_left: NDArray[np.bool_]) -> list[str]:
        mask = np.zeros_like(keep)
        mask[rows[is_left]] = True
        return staging.texts(mask)

    ids = staging.column("problem_id", keep)
    corpus = Corpus(ids, [staging.text_key(index) for index in rows.tolist()], texts)
    for found in collisions(corpus, heldout, cleaning):
        row = int(rows[found.problem])
        keep[row] = False
        report.removed.append(
            Removed(
                places[row] if places else None,
                ids[found.problem],
                found.why,
                str(heldout_places[found.other]) if found.is_heldout else ids[found.other],
                found.similarity,
                _golds_differ(staging, found, rows),
            )
        )


def _golds_differ(staging: Staging, found: Collision, rows: NDArray[np.int64]) -> bool:
    if found.why != "exact":
        return False
    return staging.gold_key(int(rows[found.problem])) != staging.gold_key(int(rows[found.other]))


def read_heldout(paths: Sequence[Path], reader: RowReader) -> tuple[list[str], Places]:
    """Prompts of held-out problems and where they stand; a row without gold or verifier is held out all the same.

    Raises PoolError for a file that cannot be read or has no rows, and for a row without a prompt: what it would keep
    out is unknown.
    """
    texts: list[str] = []
    places = Places()
    for path, rows in file_sources(paths):
        before = len(texts)
        for number, row in rows:
            if isinstance(row, RowRefused):
                raise PoolError(f"{path}:{number}: held out, but {row}")
            try:
                texts.append(prompt_text(reader.prompt(row)))
            except RowRefused as refusal:
                raise PoolError(f"{path}:{number}: held out, but {refusal}") from refusal
            places.add(path, number)
        if len(texts) == before:
            raise PoolError(f"{path}: holds no rows")
    return texts, places


class _Lengths:
    """Counts the tokens of prompts while they are read, and refuses those that are too long."""

    def __init__(self, plan: ImportPlan) -> None:
        self._template, self._limit = plan.template, plan.max_prompt_tokens
        self.num_tokens = array("Q")

    def check(self, problem: Problem) -> None:
        """Raises RowRefused for a prompt that the template refuses, or that is over the limit after it."""
        if self._template is None:
            return
        try:
            num_tokens = self._template.num_tokens(problem.prompt)
        except ValueError as error:
            raise RowRefused(str(error)) from error
        if self._limit is not None and num_tokens > self._limit:
            raise RowRefused(f"the prompt has more than {self._limit} tokens after the template")
        self.num_tokens.append(num_tokens)


def _describe(
    report: ImportReport, staging: Staging, keep: NDArray[np.bool_], plan: ImportPlan, lengths: _Lengths
) -> None:
    report.num_kept = int(np.count_nonzero(keep))
    if not report.num_kept:
        return
    report.verifiers = Counter()
    for batch in staging.batches(keep):
        report.verifiers.update(batch["verifier"].to_pylist())
    characters = staging.num_characters
    report.characters = _spread(characters[keep])
    if plan.template is not None:
        report.tokens = _spread(np.frombuffer(lengths.num_tokens, np.uint64)[keep])
    by_length = np.flatnonzero(keep)[np.argsort(characters[keep], kind="stable")]
    chosen = dict.fromkeys(int(by_length[i]) for i in (0, len(by_length) // 2, len(by_length) - 1))
    rows = staging.rows(chosen)
    report.examples = [_example(problem_from_row(rows[index]), plan.template) for index in chosen]


def _spread(lengths: NDArray[np.integer]) -> Spread:
    return Spread(int(lengths.min()), float(np.median(lengths)), float(np.percentile(lengths, 95)), int(lengths.max()))


def _example(problem: Problem, template: ChatTemplate | None) -> str:
    """A problem as it is sampled from, with its gold; of chat messages without a template the turns."""
    if template is not None:
        text = template.render(problem.prompt)
    elif isinstance(problem.prompt, str):
        text = problem.prompt
    else:
        text = "\n".join(f"[{message['role']}] {message['content']}" for message in problem.prompt)
    return f"{_cut(text)}\n=> {_cut(problem.answer)} ({problem.verifier})"


def _cut(text: str) -> str:
    return (
        text if len(text) <= MAX_EXAMPLE_CHARACTERS else f"{text[:MAX_EXAMPLE_CHARACTERS]}... ({len(text)} characters)"
    )
