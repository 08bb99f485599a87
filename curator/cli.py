"""The `curator` command: pools in, out, compared and cleaned. What is heavy is imported by the commands that use it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curator.cli_quarantine import quarantine
from curator.cli_report import report
from curator.cli_score import score
from curator.console import Advance, agreed, check_asking, errors, finite, progress, say, scratch, settings
from curator.errors import CuratorError

if TYPE_CHECKING:
    from curator.cleaning import Cleaning
    from curator.ingest.account import ImportReport
    from curator.ingest.reading import Source

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

PoolArgument = Annotated[Path, typer.Argument(metavar="POOL", help="A folder that import made.", show_default=False)]
PoolOption = Annotated[Path, typer.Option("--pool", metavar="POOL", help="The folder of the pool.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")]
DryRun = Annotated[bool, typer.Option(help="Report, write nothing.")]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write the whole report as JSON too.")
]

MAX_KEEP_MINUTES = 60 * 24 * 366
"""A year."""
MAX_SEED = (1 << 31) - 1
"""Families of generators that draw with numpy take no larger ones."""

Exact = Annotated[bool, typer.Option(help="Remove problems that are equal but for case, space, character forms.")]
Near = Annotated[float | None, typer.Option(metavar="JACCARD", help="Remove nearly equal ones, from this on; say 0.8.")]
Semantic = Annotated[float | None, typer.Option(metavar="COSINE", help="Remove ones alike by vectors; say 0.95.")]
Embedding = Annotated[str, typer.Option(help="hashed, model2vec:FOLDER or sentence-transformers:FOLDER.")]
AnyNumbers = Annotated[bool, typer.Option(help="Problems that differ in their numbers may be nearly equal too.")]
Heldout = Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Remove what stands in here. Repeatable.")]
HeldoutNear = Annotated[float, typer.Option(metavar="JACCARD", help="Nearly equal to a held-out one, from this on.")]
HeldoutWords = Annotated[int, typer.Option(metavar="N", help="Words in a row shared with a held-out one; 0: any.")]


@app.command("import")
def import_problems(
    pool: PoolOption,
    files: Annotated[
        list[Path] | None, typer.Argument(help="JSONL, JSON, CSV, TSV or Parquet.", show_default=False)
    ] = None,
    mapping: Annotated[
        list[str] | None, typer.Option("--map", metavar="FIELD=COLUMN", help="Read a field from here. Repeatable.")
    ] = None,
    verifier: Annotated[str | None, typer.Option(help="For rows that name none.")] = None,
    rename_verifier: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="The verifier for a name in the data. Repeatable.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave out columns such as 'r1_*'. Repeatable.")
    ] = None,
    pass_rate: Annotated[str | None, typer.Option(metavar="COLUMN", help="Pass rates measured before.")] = None,
    pass_rate_scale: Annotated[
        str | None, typer.Option(metavar="SCALE", help="0..1, 0..100, any LOW..HIGH, k/n.")
    ] = None,
    pass_rate_of: Annotated[str | None, typer.Option(metavar="WHAT", help="success or failure.")] = None,
    reasoning_gym: Annotated[
        str | None, typer.Option(metavar="FAMILY", help="Generate instead of reading files.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="JSON", help="Settings of the family or composite.")] = None,
    size: Annotated[int, typer.Option(min=1, max=MAX_SEED, help="Problems to generate.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the first one; the next has the next.")] = 0,
    exact: Exact = True,
    near: Near = None,
    semantic: Semantic = None,
    embedding: Embedding = "hashed",
    any_numbers: AnyNumbers = False,
    heldout: Heldout = None,
    heldout_near: HeldoutNear = 0.8,
    heldout_words: HeldoutWords = 13,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Count tokens and render examples with its template.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Refuse longer prompts.")] = None,
    max_refused_share: Annotated[
        float, typer.Option(min=0, max=1, callback=finite, help="Above it nothing is written.")
    ] = 0.05,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
    report_file: ReportFile = None,
) -> None:
    """Make a pool of files as people have them, or of a generator. The report comes first, then the question."""
    with errors():
        check_asking(dry_run, yes, as_json)
        from curator.ingest.importer import ImportPlan, prepare
        from curator.ingest.pass_rate import parse_pass_rate
        from curator.ingest.reasoning_gym import reasoning_gym_source
        from curator.ingest.report import check_conflicts, check_refused_share
        from curator.ingest.rows import RowReader
        from curator.ingest.template import ChatTemplate
        from curator.pool import Pool

        if pool.exists():
            raise CuratorError(f"{pool}: exists already; name another folder")
        if bool(files) == (reasoning_gym is not None):
            raise CuratorError("name files, or a family with --reasoning-gym; not both")
        if max_prompt_tokens is not None and tokenizer is None:
            raise CuratorError("--max-prompt-tokens: tokens are counted with --tokenizer FOLDER")
        if pass_rate is None and (pass_rate_scale or pass_rate_of):
            raise CuratorError("--pass-rate-scale and --pass-rate-of: say of which column with --pass-rate COLUMN")
        with settings():
            reader = RowReader(
                default_verifier=verifier,
                mapping=_pairs("--map", mapping),
                verifier_names=_pairs("--rename-verifier", rename_verifier),
                pass_rate=None if pass_rate is None else parse_pass_rate(pass_rate, pass_rate_scale, pass_rate_of),
            )
            cleaning = _cleaning(exact, near, semantic, embedding, any_numbers, heldout_near, heldout_words)
        with progress() as advance, scratch(None if dry_run else pool) as folder:
            if reasoning_gym is not None:
                generated = reasoning_gym_source(
                    reasoning_gym, seed=seed, size=size, config=_object("--config", config)
                )
                sources = iter([_counted(generated, advance, size)])
            else:
                sources = _files(files or [], drop or [], advance)
            plan = ImportPlan(
                sources=sources,
                reader=reader,
                cleaning=cleaning,
                heldout=heldout or [],
                template=None if tokenizer is None else ChatTemplate(tokenizer),
                max_prompt_tokens=max_prompt_tokens,
            )
            prepared = prepare(plan, folder, lambda text: advance(0, text))
            _show(prepared.report, as_json, report_file)
            check_conflicts(prepared.report)
            check_refused_share(prepared.report, max_refused_share)
            if dry_run or not agreed(yes, f"write {prepared.report.num_kept} problems to {pool}?"):
                return
            advance(0, "writing")
            Pool.create_from_batches(pool, prepared.batches())
            say(f"{pool}: {prepared.report.num_kept} problems")


@app.command()
def clean(
    pool: PoolArgument,
    exact: Exact = True,
    near: Near = None,
    semantic: Semantic = None,
    embedding: Embedding = "hashed",
    any_numbers: AnyNumbers = False,
    heldout: Heldout = None,
    heldout_near: HeldoutNear = 0.8,
    heldout_words: HeldoutWords = 13,
    mapping: Annotated[
        list[str] | None, typer.Option("--map", metavar="FIELD=COLUMN", help="Of held-out files. Repeatable.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
    report_file: ReportFile = None,
) -> None:
    """Remove from a pool what it holds twice or what is held out, as a new version of its table."""
    with errors():
        check_asking(dry_run, yes, as_json)
        from curator.ingest.importer import clean_pool
        from curator.ingest.rows import RowReader
        from curator.pool import Pool

        with settings():
            cleaning = _cleaning(exact, near, semantic, embedding, any_numbers, heldout_near, heldout_words)
            columns = _pairs("--map", mapping)
            if others := columns.keys() - {"prompt"}:
                raise CuratorError(f"--map {min(others)}: of held-out files only the prompt is read; use prompt=COLUMN")
            reader = RowReader(mapping=columns)
        opened = Pool.open(pool)
        with scratch(None) as folder:
            report = clean_pool(opened.problem_batches(), cleaning, heldout or [], reader, folder)
        _show(report, as_json, report_file)
        if dry_run or not report.removed or not agreed(yes, f"remove {len(report.removed)} problems from {pool}?"):
            return
        before = opened.version
        opened.remove([removed.problem_id for removed in report.removed])
        opened.close()
        say(f"{pool}: {report.num_kept} problems, version {opened.version}; version {before} is as before")


@app.command()
def show(
    problem_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="A problem.", show_default=False)] = None,
    *,
    pool: PoolOption,
    as_json: AsJson = False,
) -> None:
    """Show a problem with its history, or without an id the pool in figures."""
    with errors():
        from curator.pool import Pool
        from curator.show import pool_in_figures, problem_with_history

        opened = Pool.open(pool)
        found = pool_in_figures(opened) if problem_id is None else problem_with_history(opened, problem_id)
        print(json.dumps(found, ensure_ascii=False, indent=None if as_json else 2))


@app.command()
def export(
    pool: PoolArgument,
    file: Annotated[Path, typer.Argument(help="A new .parquet or .jsonl file.", show_default=False)],
    outcomes: Annotated[
        bool, typer.Option("--outcomes", help="The table of outcomes instead of the problems.")
    ] = False,
    version: Annotated[int | None, typer.Option(min=1, help="The problems as they were in this version.")] = None,
) -> None:
    """Write a pool's problems, or its outcomes, to a file; import reads the problems back."""
    with errors():
        from curator.export import export_outcomes, export_problems
        from curator.pool import Pool

        opened = Pool.open(pool, version=version)
        if outcomes:
            num_rows = export_outcomes(opened.outcomes(), file)
        else:
            num_rows = export_problems(opened.problem_batches(), file)
        say(f"{file}: {num_rows} rows")


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(metavar="POOL", help="A pool.", show_default=False)],
    right: Annotated[Path, typer.Argument(metavar="POOL", help="Another one.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Say in what two pools differ: ids of one alone, other content. Exit code 0 where in nothing, else 1."""
    with errors():
        from curator.compare import compare
        from curator.pool import Pool

        found = compare(Pool.open(left), Pool.open(right))
        print(json.dumps(found.as_plain()) if as_json else found.text())
        if not found.is_none:
            raise typer.Exit(1)


@app.command()
def compact(
    pool: PoolArgument,
    keep_minutes: Annotated[float, typer.Option(min=0, max=MAX_KEEP_MINUTES, callback=finite)] = 10,
) -> None:
    """Rewrite a pool's tables in few files, and drop versions older than this. No process may be using it."""
    with errors():
        from datetime import timedelta

        from curator.pool import Pool

        opened = Pool.open(pool)
        opened.compact(timedelta(minutes=keep_minutes))
        opened.close()
        say(f"{pool}: versions kept: {', '.join(map(str, opened.versions()))}")


app.command()(score)
app.command()(report)
app.command()(quarantine)


def _files(files: Sequence[Path], drop: Sequence[str], advance: Advance) -> Iterator[Source]:
    from curator.ingest.formats import Reading
    from curator.ingest.reading import file_sources

    total = sum(file.stat().st_size for file in files if file.is_file())
    return file_sources(files, Reading(drop, lambda num_bytes: advance(num_bytes, "reading", total)))


def _counted(source: Source, advance: Advance, total: int) -> Source:
    def rows() -> Iterator[Any]:
        for numbered in source.rows:
            advance(1, "generating", total)
            yield numbered

    return source._replace(rows=rows())


def _cleaning(
    exact: bool,
    near: float | None,
    semantic: float | None,
    embedding: str,
    any_numbers: bool,
    heldout_near: float,
    heldout_words: int,
) -> Cleaning:
    from curator.cleaning import Cleaning
    from curator.embedding import load_embedding

    if semantic is not None:
        load_embedding(embedding)  # a missing package is told before anything is read
    return Cleaning(
        exact=exact,
        near=near,
        semantic=semantic,
        embedding=embedding,
        same_numbers=not any_numbers,
        heldout_near=heldout_near,
        heldout_words=heldout_words or None,
    )


def _pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise CuratorError(f"{option} {text}: expected NAME=VALUE")
        pairs[name] = value
    return pairs


def _object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise CuratorError(f"{option}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CuratorError(f"{option}: expected a JSON object, received a {type(value).__name__}")
    return value


def _show(report: ImportReport, as_json: bool, report_file: Path | None) -> None:
    if report_file is not None:
        report_file.write_text(json.dumps(report.as_plain(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report.as_plain(), ensure_ascii=False) if as_json else report.text())


if __name__ == "__main__":
    app()
