"""What scoring a pool needs of a model and of rewards, and how both are found: by entry points, not by imports.

A package that can sample registers a function under `curator.generators`, one that can check answers under
`curator.scorers`. Each takes an `Asked` and raises CuratorError for settings that cannot be used, before anything
expensive starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from curator.errors import CuratorError
from curator.schema import Problem

GENERATORS, SCORERS = "curator.generators", "curator.scorers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was told about model and rewards."""

    model: str
    """A folder, or whatever else the generator takes for one."""
    settings: Path | None = None
    """A file of settings in the package's own form."""
    overrides: tuple[str, ...] = ()
    """KEY=VALUE on top of it."""
    verifiers: frozenset[str] = frozenset()
    """All that the problems name."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One answer to be sampled. The seed depends on problem and number alone, so that a resumed run asks the same."""

    problem: Problem
    number: int
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """Problem and number."""
        return self.problem.problem_id, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An answer as sampled."""

    request: SampleRequest
    text: str
    num_tokens: int
    is_cut: bool
    """Whether it reached the length limit."""
    failure: str | None = None
    """Why there is no answer to be checked: the engine's fault, never the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a scorer says of a sample."""

    sample: Sample
    passed: bool | None
    """None where nothing was decided: such a sample is in no rate."""
    reward: float | None
    why: str = ""


class Generator(Protocol):
    """Samples answers."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides which answers come out, as plain values: weights, tokenizer, prompts, sampling settings."""

    def refusal(self, problem: Problem) -> str | None:
        """Why a problem cannot be sampled from; None where it can."""

    def generate(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """One sample a request, as they finish; requests are taken as there is room for them."""

    def close(self) -> None:
        """Free what is held."""


class Scorer(Protocol):
    """Checks answers."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides how an answer scores, as plain values."""

    def submit(self, sample: Sample) -> None:
        """Give one to be checked."""

    def poll(self, timeout_s: float) -> Sequence[Score]:
        """What is decided and was not yet returned; waits so long where nothing is and something is out."""

    def close(self) -> None:
        """Free what is held."""


def find(group: str, name: str | None) -> Callable[[Asked], Any]:
    """The function that an installed package registers under a name; without a name the only one there is.

    Raises CuratorError where there is none, or several to choose from.
    """
    found = {entry.name: entry for entry in entry_points(group=group)}
    option = "--generator" if group == GENERATORS else "--scorer"
    if name is None:
        if len(found) != 1:
            raise CuratorError(f"{option}: name one of {_listed(found)}" if found else _none_installed(group))
        (name,) = found
    if name not in found:
        near = get_close_matches(name, found, n=1)
        hint = f"the nearest is '{near[0]}'" if near else f"there are {_listed(found)}"
        raise CuratorError(f"{option} {name}: no installed package has one of that name; {hint}" + _again(found))
    try:
        make: Callable[[Asked], Any] = found[name].load()
    except Exception as error:
        # What fails here is another package's import; it is told with that package's name.
        raise CuratorError(f"{option} {name}: {found[name].value} cannot be loaded: {error!r}") from error
    return make


def _listed(found: Iterable[str]) -> str:
    return ", ".join(sorted(found)) or "none"


def _again(found: Mapping[str, Any]) -> str:
    return "" if found else "; install stream-grpo (again, where it is an older one)"


def _none_installed(group: str) -> str:
    return f"no installed package registers {group}; install stream-grpo (again, where it is an older one)"
