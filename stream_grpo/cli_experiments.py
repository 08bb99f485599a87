"""`stream-grpo compare`, `sweep` and `ablate`: several runs, and what they say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from stream_grpo.cli_errors import errors
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError

MAX_SEEDS = 100
"""Of a variant: each is a whole training."""
File = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see configs/.", show_default=False)]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs; one that is there is gone on with.")]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: SVG, PNG, PDF.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of all runs. Repeatable.")
]


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.", show_default=False)],
    picture: Picture = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare runs on the same held-out problems at the same sampled tokens, paired by problem with the first."""
    console = Console(stderr=as_json)
    with errors(console):
        from stream_grpo.comparison import show
        from stream_grpo.comparison.compare import compare as compare_runs
        from stream_grpo.comparison.runs import read_run
        from stream_grpo.planner.picture import check_path

        if picture is not None:
            check_path(picture)
        if len({run.resolve() for run in runs}) < len(runs):
            raise ConfigError("the same run twice; name each once")
        found = compare_runs([read_run(run) for run in runs], seed)
        _give(found, show, console, picture, as_json=as_json)


def sweep(
    file: File,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUES", help="Values to train, as stream.max_policy_age=1,4. Repeatable."),
    ] = None,
    out: Out = None,
    like: Annotated[Path | None, typer.Option(metavar="RUN", help="Calibrate by this run, not the first cell.")] = None,
    picture: Picture = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train every cell of a grid, and hold what the planner predicts against what was measured."""
    console = Console(stderr=as_json)
    with errors(console):
        from stream_grpo.experiments import sweep as sweeps
        from stream_grpo.experiments.cells import Series
        from stream_grpo.planner.picture import check_path

        if picture is not None:
            check_path(picture)
        series = Series(file=file, overrides=tuple(overrides or ()), root=out or Path("runs") / f"sweep-{file.stem}")
        found = sweeps.sweep(series, sweeps.parse_grid(grid or []), like, console.say)
        _give(found, sweeps, console, picture, as_json=as_json)


def ablate(
    file: File,
    over: Annotated[str, typer.Option(metavar="NAMES", help="Of group_size, reward, kl, aggregation, recipe.")] = "",
    vary: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUES", help="Other settings, each value by itself. Repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=3, max=MAX_SEEDS, help="Runs of each variant.")] = 3,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Sampled tokens that end each run; by default what the first run takes.")
    ] = None,
    out: Out = None,
    picture: Picture = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Change one choice at a time, train several seeds to equal sampled tokens, and compare with the configuration."""
    console = Console(stderr=as_json)
    with errors(console):
        from stream_grpo.comparison import show
        from stream_grpo.experiments.ablate import ablate as ablate_over
        from stream_grpo.experiments.cells import Series
        from stream_grpo.planner.picture import check_path

        if picture is not None:
            check_path(picture)
        series = Series(file=file, overrides=tuple(overrides or ()), root=out or Path("runs") / f"ablate-{file.stem}")
        names = [name.strip() for name in over.split(",") if name.strip()]
        found = ablate_over(series, names, vary or [], num_seeds=seeds, num_tokens=tokens, say=console.say)
        _give(found, show, console, picture, as_json=as_json)


def _give(found: Any, views: Any, console: Console, picture: Path | None, *, as_json: bool) -> None:
    """The result as one JSON object or as a table, and as a picture: `views` has `show` and `draw` for it."""
    from stream_grpo.planner.picture import writing

    if as_json:
        print(json.dumps(found.as_fields()))
    else:
        views.show(found, console)
    if picture is not None:
        with writing(picture):
            views.draw(found, picture)
        console.say(f"picture: {picture}")
