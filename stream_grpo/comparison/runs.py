"""What a run folder says for a comparison: its evaluations with the tokens that training had cost by then."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_grpo.config_file import load_run
from stream_grpo.errors import ConfigError
from stream_grpo.evaluation import HEADLINE, ProblemScore
from stream_grpo.files import read_object
from stream_grpo.identity import MANIFEST_FILE
from stream_grpo.metrics import MetricsReader
from stream_grpo.types import spent_tokens

Scores = Mapping[str, ProblemScore]
"""By problem id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation of a run."""

    step: int
    num_tokens: int
    """Sampled for training up to then, over all starts of the run."""
    scores: Scores
    """Of the headline's domains; empty where only figures are kept."""
    pass_at_1: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as a comparison sees it."""

    name: str
    seed: int
    identity_hash: str
    """Of all that it optimised; seeds are not in it."""
    identity: Mapping[str, Any]
    domains: tuple[str, ...]
    """Of its headline; empty: all."""
    before: Evaluated
    during: tuple[Evaluated, ...]
    after: Evaluated


def read_run(path: Path) -> Run:
    """Read a finished run.

    Raises ConfigError where it has not ended, was evaluated on nothing, or has files that are not those of a run.
    """
    try:
        return _read(path)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise ConfigError(f"{path}: its files are not those of a finished run: {error!r}") from error


def _read(path: Path) -> Run:
    manifest = _object(path / MANIFEST_FILE, "no run there")
    summary = _object(path / "summary.json", "the run has not come to its end; go on with --resume")
    domains = _domains(path)
    tokens, during = _during(MetricsReader(path).new_lines())
    # Those of the last step: what samplers had under way when it ended was never trained on.
    spent = tokens[max(tokens)] if tokens else spent_tokens(summary["tokens"])
    before, after = (
        _whole(path, summary, when, domains, num_tokens=num, step=step)
        for when, num, step in (("before", 0, 0), ("after", spent, summary["steps"]))
    )
    identities = manifest.get("identities") or [{}]
    return Run(
        name=path.name,
        seed=int(manifest["seed"]),
        identity_hash="-".join(str(item.get("sha256", "")) for item in identities),
        identity=identities[-1].get("identity", {}),
        domains=domains,
        before=before,
        during=tuple(during),
        after=after,
    )


def _object(path: Path, otherwise: str) -> dict[str, Any]:
    if not path.exists():
        raise ConfigError(f"{path.parent}: {otherwise} (no {path.name})")
    try:
        return read_object(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _domains(path: Path) -> tuple[str, ...]:
    return load_run(path.resolve()).evaluation.domains


def _whole(
    path: Path, summary: Mapping[str, Any], when: str, domains: Sequence[str], *, num_tokens: int, step: int
) -> Evaluated:
    """The evaluation before or after training."""
    file, rows = path / f"evaluation-{when}.json", summary.get(f"heldout_{when}")
    if not rows or not file.exists():
        raise ConfigError(
            f"{path}: nothing was evaluated {when} training; a comparison needs evaluation.files and num_problems"
        )
    try:
        scores = [ProblemScore(**fields) for fields in json.loads(file.read_bytes())]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: no scores in it: {error}") from error
    for score in scores:
        counts = (0, score.num_passed, score.num_scored)
        if not all(type(count) is int for count in counts) or sorted(counts) != list(counts):
            raise ConfigError(
                f"{file}: problem {score.problem_id!r} passed {score.num_passed} of {score.num_scored}: expected whole "
                f"numbers, the first at most the second"
            )
    chosen = {score.problem_id: score for score in scores if not domains or score.domain in domains}
    row = rows[HEADLINE]
    return Evaluated(
        step=step,
        num_tokens=num_tokens,
        scores=chosen,
        pass_at_1=row["pass_at_1"],
        low=row["low"],
        high=row["high"],
    )


def _during(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[int, int], list[Evaluated]]:
    """Tokens spent by each step that the model is made of, and the evaluations of these steps, by step."""
    tokens: dict[int, int] = {}
    found: dict[int, Mapping[str, Any]] = {}
    branch_of: dict[int, int] = {}
    for line in lines:
        if line["event"] == "step":
            # After a restore a step is made again: what had come from there on is lost.
            for step in [step for step in tokens if step >= line["step"]]:
                del tokens[step], branch_of[step]
            tokens[line["step"]], branch_of[line["step"]] = spent_tokens(line["tokens"]), line["branch"]
        elif line["event"] == "evaluation":
            found[line["step"]] = line
    kept = (step for step in sorted(found) if branch_of.get(step) == found[step]["branch"])
    return tokens, [_interval(found[step], tokens[step]) for step in kept]


def _interval(line: Mapping[str, Any], num_tokens: int) -> Evaluated:
    row = line["heldout"][HEADLINE]
    scores = {
        problem_id: ProblemScore(problem_id=problem_id, domain=HEADLINE, num_scored=scored, num_passed=passed)
        for problem_id, (passed, scored) in line.get("problems", {}).items()
    }
    return Evaluated(
        step=line["step"],
        num_tokens=num_tokens,
        scores=scores,
        pass_at_1=row["pass_at_1"],
        low=row["low"],
        high=row["high"],
    )
