"""The `stream-grpo` command. Heavy libraries are imported only by the commands that use them."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from stream_grpo import cli_cluster, cli_experiments, config_file, identity
from stream_grpo.algo.presets import DEFAULT, PRESETS, Preset
from stream_grpo.cli_errors import errors as _errors
from stream_grpo.config import Config
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError
from stream_grpo.model_folder import unusable
from stream_grpo.types import RewardResult

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, for example --set run.seed=1. Repeatable."),
]

MAX_SAMPLERS, MAX_PLANNED_STEPS = 100_000, 10_000
"""Of a prediction: more would only keep its reader waiting."""
COMMENT: Mapping[str, Any] = {
    "width": 100,
    "initial_indent": "# ",
    "subsequent_indent": "# ",
    "break_on_hyphens": False,
}
"""How text is wrapped that stands in a TOML file."""


@app.command()
def train(
    file: Annotated[Path | None, typer.Argument(help="A TOML file; see configs/.", show_default=False)] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue this run folder from its newest checkpoint.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Validate, print configuration, placement and sizes, start nothing.")
    ] = False,
) -> None:
    """Train: sample, curate and learn at once; evaluate on held-out problems before and after."""
    console = Console()
    with _errors(console):
        config = _load(file, resume, overrides or [])
        from stream_grpo.parts_sampler import check_environment
        from stream_grpo.rewards.named import check_named

        check_named(config.rewards)
        check_environment(config)
        if dry_run:
            print(config_file.to_toml(config), end="")
            for note in config_file.missing_files(config):
                console.say(f"not there yet: {note}")
            _check_model(config, console)
            _show_plan(config)
            return
        from stream_grpo.train import train as run

        run(config, resume=resume is not None, console=console)


def _show_plan(config: Config) -> None:
    """Where everything would go, and what a device would hold, as comments. Raises ConfigError for what cannot fit."""
    from stream_grpo import placement, sizes

    shape = sizes.shape_of(config.model.path) if config.model.path.exists() else None
    lines = [*placement.sentences(config), *(sizes.sentences(config, shape) if shape else ())]
    print("\n".join(f"# {line}" for line in lines))
    if shape and (found := list(sizes.impossible(config, shape))):
        raise ConfigError("\n".join(found))


def _check_model(config: Config, console: Console) -> None:
    """A folder that is not there may still be made; one that is there must be usable, also by this run's learner.

    Raises ConfigError.
    """
    found = unusable(config)
    if found and config.model.path.exists():
        raise ConfigError("\n".join(found))
    for note in found:
        console.say(f"not there yet: {note}")
    if not found:
        from stream_grpo.parts import check_learner

        check_learner(config)


def _load(file: Path | None, resume: Path | None, overrides: list[str]) -> Config:
    if (file is None) == (resume is None):
        raise ConfigError("name a config file, or a run folder with --resume; not both")
    if resume is None:
        assert file is not None
        return config_file.load(file, overrides)
    return config_file.load_run(resume.resolve(), overrides)


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(help="A Hugging Face folder.")],
    files: Annotated[list[Path], typer.Argument(help="Problem files: JSONL, JSON or Parquet.")],
    num_samples: Annotated[int, typer.Option("--samples", min=1, help="Rollouts per problem.")] = 16,
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="A seeded subset where there are more.")] = 256,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a model on problems: pass@1 with 95% intervals over problems, by domain."""
    console = Console(stderr=as_json)
    with _errors(console):
        evaluation = {"files": [str(file) for file in files], "num_samples": num_samples, "num_problems": num_problems}
        tree = {"model": {"path": str(model)}, "evaluation": evaluation}
        config = config_file.parse(config_file.with_overrides(tree, overrides or []), source="eval")
        from stream_grpo.train import evaluate_model

        scores = evaluate_model(config, console)
        if as_json:
            print(json.dumps(scores))
        else:
            console.scores(scores)


@app.command("make-model")
def make_model(
    out: Annotated[Path, typer.Argument(help="Folder to write: model/, pool.jsonl, heldout.jsonl.")],
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="The same seed gives the same files.")] = 0,
    task: Annotated[str, typer.Option(help="scratchpad; or calculator, records: it calls a tool.")] = "scratchpad",
) -> None:
    """Make a small Llama that can do a task and often fails, and its problems."""
    console = Console()
    with _errors(console):
        begun = time.monotonic()
        from stream_grpo.lessons import Task

        if task not in get_args(Task):
            raise ConfigError(f"--task {task}: expected {', '.join(get_args(Task))}")
        from stream_grpo.make_model import make_model as make

        make(out, seed, task=cast("Task", task), report=console.say)
        console.say(f"{out}: ready after {time.monotonic() - begun:.0f} s")


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    right: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say in what two runs differ: what they optimise, seeds, versions. Exit code 0 where in nothing, else 1."""
    with _errors(Console(stderr=as_json)):
        found = identity.differences(identity.read_identity(left), identity.read_identity(right))
        if as_json:
            print(json.dumps({"equal": not found, "differences": [item._asdict() for item in found]}))
        else:
            print("\n".join(identity.lines(found)) or "equal")
        if found:
            raise typer.Exit(1)


@app.command()
def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Account for every group and token of a run, from its journal, also while it goes on.

    Exit code 1 with a gap, or where a file of the journal is missing.
    """
    console = Console(stderr=as_json)
    with _errors(console):
        from stream_grpo.rollouts import commands

        if as_json:
            account = commands.account_of(run)
            print(json.dumps(account))
        if not (account["closes"] and not account["missing"] if as_json else commands.show_account(run, console)):
            raise typer.Exit(1)


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    fate: Annotated[str | None, typer.Option(help="Only groups in this state, as trained or stale.")] = None,
    problem: Annotated[str | None, typer.Option(help="Only of this problem id; * and ? stand for any text.")] = None,
    domain: Annotated[str | None, typer.Option(help="Only of problems of this domain.")] = None,
    min_age: Annotated[int | None, typer.Option(min=0, help="Only groups of at least this policy age.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many; the newest 20, or all with --parquet.")] = None,
    show: Annotated[str | None, typer.Option(metavar="GROUP", help="Show this one: prompt and completions.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --show: every token with logprob and version.")
    ] = False,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write them to a file, a row a rollout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a group.")] = False,
) -> None:
    """Look at what was sampled, from a run's journal, also while it goes on: list, filter, show, export."""
    console = Console(stderr=as_json)
    with _errors(console):
        from stream_grpo.rollouts import commands
        from stream_grpo.rollouts.views import Filters

        filters = Filters(state=fate, problem=problem, domain=domain, min_age=min_age)
        if show is not None:
            commands.show_group(run, show, console, with_tokens=tokens)
        elif parquet is not None:
            commands.export(run, filters, parquet, limit, console)
        elif as_json:
            for found in commands.groups_of(run, filters, limit or 20):
                print(json.dumps(found))
            commands.say_missing(run, console)
        else:
            commands.show_groups(run, filters, limit or 20, console)


@app.command()
def plan(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run folder, or a TOML file.", show_default=False)
    ],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUES]...", help="More of the grid.", show_default=False)
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUES", help="Values of a setting to try, as max_policy_age=1,2. Repeatable."),
    ] = None,
    samplers: Annotated[
        int | None, typer.Option(min=1, max=MAX_SAMPLERS, help="So many samplers, thousands too.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Take times and lengths from this run.", show_default=False)
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Give times and lengths instead; see docs/planner.md. Repeatable."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw throughput against age: SVG, PNG.")] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=MAX_PLANNED_STEPS, help="Learner steps that a prediction is taken over.")
    ] = 60,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict throughput, staleness and waits for a grid of settings, from what a run has measured; recommend one."""
    console = Console(stderr=as_json)
    with _errors(console):
        from stream_grpo.planner import commands
        from stream_grpo.planner.picture import check_path, writing

        if picture is not None:
            check_path(picture)
        found = commands.plan(
            source,
            [*(grid or []), *(more or [])],
            like=like,
            given=given or [],
            overrides=overrides or [],
            num_samplers=samplers,
            num_steps=steps,
            seed=seed,
        )
        if as_json:
            print(json.dumps(found.as_fields()))
        else:
            commands.show(found, console)
        if picture is not None:
            with writing(picture):
                commands.draw(found, picture)
            console.say(f"picture: {picture}")


@app.command()
def dashboard(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, running or finished.", show_default=False)
    ],
    host: Annotated[str, typer.Option(help="Where to listen. Beyond loopback the link has a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
) -> None:
    """Show runs as a live page in a browser: reward, flow, ages, pool, tokens, alarms, rollouts; also side by side."""
    console = Console()
    with _errors(console):
        from stream_grpo.dashboard import commands

        commands.dashboard(runs, host=host, port=port, say=console.say)


@app.command()
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(help="Rows of JSONL: gold, response, optionally verifier, one or a list.", show_default=False),
    ] = None,
    gold: Annotated[str | None, typer.Option(help="With --response: one pair instead of a file.")] = None,
    response: Annotated[str | None, typer.Option(help="What a model answered.")] = None,
    verifier: Annotated[str, typer.Option(help="For rows that name none; your own: python:module.function.")] = "math",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    limit_s: Annotated[float, typer.Option(min=0.001, help="Seconds for one response.")] = 10.0,
    config: Annotated[
        Path | None, typer.Option(help="A run's configuration, for what it names: http:NAME, compose:NAME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row, in their order.")] = False,
) -> None:
    """Score responses against golds, and say why: the decision of a verifier with its evidence."""
    with _errors(Console(stderr=as_json)):
        from stream_grpo.rewards import verify as by_hand
        from stream_grpo.rewards.limits import Limits
        from stream_grpo.rewards.messages import result_to_plain

        if {file is None} != {gold is not None, response is not None}:
            raise ConfigError("name a file of rows, or one pair with --gold and --response; not both")
        rewards = config_file.load(config).rewards if config else by_hand.NO_REWARDS
        if file is not None:
            pairs = by_hand.read_pairs(file, verifier, rewards)
        else:
            pairs = iter([by_hand.make_pair(gold or "", response or "", verifier, rewards)])
        preload = [verifier] if file else []
        results = by_hand.verify(
            pairs, num_workers=workers, limits=Limits(wall_s=limit_s), preload=preload, rewards=rewards
        )
        for number, (found, parts) in enumerate(results, 1):
            if as_json:
                plain = {"parts": {key: result_to_plain(part) for key, part in parts.items()}} if parts else {}
                print(json.dumps(result_to_plain(found) | plain))
                continue
            said = _reward_of(found) if parts else found.evidence
            print(f"{number:>5}  {found.decision:9}  {found.verifier} {found.verifier_version}  {said}")
            for key, part in parts.items():
                print(
                    f"       {part.decision:9}  {key}: {part.verifier} {part.verifier_version}  "
                    f"{_reward_of(part)}  {part.evidence}"
                )


def _reward_of(result: RewardResult) -> str:
    return "no reward" if result.reward is None else f"reward {result.reward:g}"


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Show this one, as TOML for [algo].", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the named recipes, with their source and what each trades; with a name, its row of choices."""
    console = Console(stderr=as_json)
    with _errors(console):
        if name is not None:
            config_file.parse({"model": {"path": "-"}, "algo": {"preset": name}}, source="presets")  # or refused
        chosen = PRESETS if name is None else {name: PRESETS[name]}
        if as_json:
            print(json.dumps({key: _as_plain(preset) for key, preset in chosen.items()}))
        elif name is not None:
            print("\n".join(_as_toml(name, PRESETS[name])))
        else:
            rows = [(key, preset.source, preset.trades) for key, preset in PRESETS.items()]
            console.presets(rows, default=DEFAULT)


def _as_plain(preset: Preset) -> dict[str, Any]:
    row = preset.recipe.model_dump(mode="json", exclude_none=True)
    return {"source": preset.source, "trades": preset.trades, "recipe": row}


def _as_toml(name: str, preset: Preset) -> Iterator[str]:
    """The choices that act, as they may stand under [algo]."""
    yield from textwrap.wrap(f"{name}: {preset.source}", **COMMENT)
    yield from textwrap.wrap(preset.trades, **COMMENT)
    for key, value in {"preset": name, **preset.recipe.model_dump(mode="json")}.items():
        yield from config_file.toml_lines(key, value)


app.command()(cli_cluster.samplers)
app.command()(cli_cluster.keys)
app.command()(cli_experiments.compare)
app.command()(cli_experiments.sweep)
app.command()(cli_experiments.ablate)

if __name__ == "__main__":
    app()
