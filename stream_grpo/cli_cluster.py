"""`stream-grpo samplers` and `keys`: what is typed of the processes of a run and of the machines they run on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from stream_grpo.cli_errors import errors
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError

WITHIN_S = 60.0
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def samplers(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a running run.", show_default=False)],
    add: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start so many more.", show_default=False)] = None,
    remove: Annotated[
        str | None, typer.Option(metavar="NAME", help="Have this one finish its groups and leave.", show_default=False)
    ] = None,
    within_s: Annotated[
        float, typer.Option("--within", min=0, help="Seconds it has; what is unfinished then, others go on with.")
    ] = WITHIN_S,
    as_json: AsJson = False,
) -> None:
    """List the samplers of a running run, add some, remove one; the run goes on meanwhile."""
    console = Console(stderr=as_json)
    with errors(console):
        from stream_grpo.orders import give

        if add is not None and remove is not None:
            raise ConfigError("--add with --remove: one at a time")
        if add is not None:
            found = give(run, "samplers.add", {"number": add})
        elif remove is not None:
            found = give(run, "samplers.remove", {"name": remove, "within_s": within_s})
        else:
            found = give(run, "samplers")
        if as_json:
            print(json.dumps(found))
            return
        for sampler in found["samplers"]:
            print(_line(sampler))
        if len(found["samplers"]) != found["configured"]:
            console.say(
                f"{len(found['samplers'])} now; a start with --resume begins with sampler.num_samplers = "
                f"{found['configured']}, or as many as --set sampler.num_samplers says"
            )


def keys(
    folder: Annotated[Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run folder, or one for keys alone.")],
) -> None:
    """Make the CURVE keys of a run anew, or those of another service: who has none of them is not let in."""
    console = Console()
    with errors(console):
        from stream_grpo import keys as of_run
        from stream_grpo.orders import is_run

        target = folder / of_run.FOLDER if (folder / "config.toml").exists() else folder
        if target != folder and is_run(folder):
            raise ConfigError(f"{folder}: this run is running with the keys it has; stop it first")
        of_run.make(target)
        console.say(f"{target}: {of_run.SERVER_FILE} for what listens, {of_run.CLIENT_FILE} for what connects")


def _line(sampler: Mapping[str, Any]) -> str:
    version = ".".join(map(str, sampler["version"])) if sampler["version"] else "none yet"
    where = f"process {sampler['pid'] or '-'} on {sampler['node'] or '-'}"
    return (
        f"{sampler['name']:12} {sampler['state']:9} {where}  weights {version}  "
        f"{sampler['num_running'] or 0} running, {sampler['num_tokens'] or 0} tokens sampled, "
        f"{sampler['restarts_left']} restarts left"
    )
