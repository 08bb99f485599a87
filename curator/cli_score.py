"""`curator score`: a pool with a model and a reward, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from curator.console import errors, finite, progress, say, settings
from curator.errors import CuratorError


def score(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="A folder that import made.", show_default=False)],
    model: Annotated[str, typer.Option(metavar="M", help="A folder with a model.")],
    reward: Annotated[
        str | None, typer.Option(metavar="R", help="A verifier for all problems, instead of the one each names.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The table, Parquet; POOL.scores.parquet by default.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What every sample scored; POOL.scores.jsonl by default.")
    ] = None,
    screen: Annotated[int, typer.Option(min=1, help="Samples of every problem, the first stage.")] = 8,
    most: Annotated[int, typer.Option(min=0, help="Further samples of one problem; 0: no second stage.")] = 32,
    target_sd: Annotated[
        float, typer.Option(callback=finite, help="The second stage ends at this standard deviation of a rate.")
    ] = 0.08,
    group_size: Annotated[int, typer.Option(min=2, help="Of the groups whose signal decides.")] = 8,
    min_signal: Annotated[
        float, typer.Option(callback=finite, help="Keep from this expected chance of a mixed group on.")
    ] = 0.2,
    min_synthetic_signal: Annotated[
        float, typer.Option(callback=finite, help="Of synthetic problems: from this lower bound on.")
    ] = 0.2,
    credit: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Who made a synthetic problem; a.b looks inside. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Every sample's seed is derived from it.")] = 0,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="Of generator and scorer, in their own form.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="On top of these. Repeatable.")
    ] = None,
    generator: Annotated[str | None, typer.Option(help="The one to use of several that are installed.")] = None,
    scorer: Annotated[str | None, typer.Option(help="The one to use of several that are installed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a pool with a model and a reward: few samples a problem, many where they pay. Goes on where it was."""
    with errors():
        from curator import scorers
        from curator.pool import Pool
        from curator.scoring_log import ScoringLog
        from curator.scoring_run import PoolScoring, Stages, with_verifier
        from curator.scoring_table import score_rows, summary, summary_text, write_scores
        from curator.verdicts import CREDIT_KEYS, Rule

        table = out or pool.with_name(f"{pool.name}.scores.parquet")
        with settings():
            stages = Stages(screen=screen, most=most, target_sd=target_sd)
            rule = Rule(group_size=group_size, min_signal=min_signal, min_synthetic_signal=min_synthetic_signal)
        if table.suffix != ".parquet" or not table.parent.is_dir():
            raise CuratorError(f"--out {table}: expected a name that ends in .parquet, in a folder that exists")
        make_generator = scorers.find(scorers.GENERATORS, generator)
        make_scorer = scorers.find(scorers.SCORERS, scorer)
        opened = Pool.open(pool)
        problems = list(with_verifier(opened.problems(), reward))
        asked = scorers.Asked(
            model=model,
            settings=settings_file,
            overrides=tuple(set_ or ()),
            verifiers=frozenset(problem.verifier for problem in problems),
        )
        scores = make_scorer(asked)  # what cannot be scored is told before a model is loaded
        samples = None
        try:
            samples = make_generator(asked)
            header: dict[str, Any] = {
                "pool": opened.fingerprint(),
                "seed": seed,
                "reward": reward,
                "generator": dict(samples.identity),
                "scorer": dict(scores.identity),
            }
            kept = ScoringLog(log or pool.with_name(f"{pool.name}.scores.jsonl"), header)
            if kept.scored:
                say(f"{kept.path}: goes on after {len(kept.scored)} samples")
            with progress() as advance:
                run = PoolScoring(problems, samples, scores, kept, stages, seed=seed, advance=advance)
                rows = score_rows(problems, run.run(), rule, credit or CREDIT_KEYS)
            kept.close()
        finally:
            scores.close()
            if samples is not None:
                samples.close()
        write_scores(rows, table, header)
        figures = summary(rows, screen)
        typer.echo(json.dumps(figures) if as_json else summary_text(figures))
        say(f"{table}: {len(rows)} problems")
