"""Whether what a configuration names for its rewards is there: asked before anything starts."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import stream_grpo
from stream_grpo.config_file import NEAR
from stream_grpo.config_http import PREFIX as HTTP
from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.user import PREFIX
from stream_grpo.rewards.verifiers import VERIFIERS

_PACKAGES = str(Path(stream_grpo.__file__).parents[1])


def check_named(rewards: Rewards) -> None:
    """Refuse verifiers that compositions and the hidden reward name and that there are not, and functions of the user's
    that cannot be imported or have no shape of a reward function.

    Functions are imported in a process of their own. Raises ConfigError with a line for each.
    """
    if complaints := [*_unknown(rewards), *_not_importable(rewards)]:
        raise ConfigError("\n".join(complaints))


def unknown_verifier(name: str, rewards: Rewards) -> str | None:
    """Why this is the name of no verifier that the run may ask, with the nearest one; None where it is."""
    known = [*VERIFIERS, *rewards.functions, *(f"{HTTP}{judge}" for judge in rewards.http)]
    if name in known:
        return None
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    if name.startswith(PREFIX):
        return f"rewards.functions does not list it, and no other function is called; {hint}"
    return f"no verifier is called so; {hint}"


def _unknown(rewards: Rewards) -> Iterator[str]:
    for field, name in _named(rewards):
        if reason := unknown_verifier(name, rewards):
            yield f"{field} = {name!r}: {reason}"


def _named(rewards: Rewards) -> Iterator[tuple[str, str]]:
    """(field, verifier) of all that are asked whatever the rows name."""
    for name, composition in rewards.compose.items():
        for key, component in composition.components.items():
            field = f"rewards.compose.{name}.components.{key}"
            yield f"{field}.verifier", component.verifier
            if component.tail_verifier is not None:
                yield f"{field}.tail_verifier", component.tail_verifier
    if rewards.hidden is not None:
        yield "rewards.hidden.verifier", rewards.hidden.verifier


def _not_importable(rewards: Rewards) -> Iterator[str]:
    if not rewards.functions:
        return
    reasons = _import_errors(rewards.functions, str(rewards.function_dir), Limits().load_s * len(rewards.functions))
    for name, reason in reasons.items():
        yield f"rewards.functions: {name!r}: {reason}"


def _import_errors(names: Sequence[str], folder: str, timeout_s: float) -> dict[str, str]:
    """Why functions cannot be used, by name; empty where all can. They are found as by a worker."""
    path = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "stream_grpo.rewards.importing", json.dumps([list(names), folder])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {", ".join(names): f"importing did not end within {timeout_s:g} s"}
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    errors = {name: reason for name, reason in lines if reason}
    if done.returncode and len(lines) < len(names):
        errors[names[len(lines)]] = f"importing ended the process with status {done.returncode}"
    return errors
