"""Which evaluations of some runs are held against each other, and what they say. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stream_grpo.comparison.paired import mean_rate, paired_difference
from stream_grpo.comparison.runs import Evaluated, Run
from stream_grpo.errors import ConfigError
from stream_grpo.evaluation import Rise, derived_seed
from stream_grpo.identity import differences

SAME_BUDGET, SAME_POINT = 0.05, 0.10
"""Shares by which two numbers of tokens differ at most that count as one: of whole runs, and of evaluations in them."""
MAX_SHOWN = 4
"""Settings by which a configuration is told from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration: its runs, one a seed, and where each is looked at."""

    label: str
    runs: tuple[Run, ...]
    at: tuple[Evaluated, ...]
    """The evaluation of each run that is compared."""
    differs: tuple[str, ...]
    """In what it is not the first configuration."""
    difference: Rise | None
    """Against the first configuration; None for itself."""

    @property
    def by_seed(self) -> list[float]:
        """pass@1 of every run."""
        return [mean_rate(evaluated.scores) for evaluated in self.at]

    @property
    def pass_at_1(self) -> float:
        """Mean over its runs."""
        return sum(self.by_seed) / len(self.by_seed)

    @property
    def before(self) -> float:
        """Mean over its runs before training."""
        return sum(mean_rate(run.before.scores) for run in self.runs) / len(self.runs)

    @property
    def num_tokens(self) -> float:
        """Mean tokens sampled for training up to there."""
        return sum(evaluated.num_tokens for evaluated in self.at) / len(self.at)

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        runs = [
            {
                "name": run.name,
                "seed": run.seed,
                "step": at.step,
                "num_tokens": at.num_tokens,
                "pass_at_1": _plain(rate),
            }
            for run, at, rate in zip(self.runs, self.at, self.by_seed, strict=True)
        ]
        return {
            "configuration": self.label,
            "differs": list(self.differs),
            "runs": runs,
            "num_tokens": self.num_tokens,
            "before": _plain(self.before),
            "pass_at_1": _plain(self.pass_at_1),
            "difference": self.difference.as_dict() if self.difference else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All configurations, the first of them first."""

    rows: tuple[Row, ...]
    sentence: str
    """At which evaluations they are compared, and why."""
    is_same_budget: bool

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "configurations": [row.as_fields() for row in self.rows],
            "same_budget": self.is_same_budget,
            "sentence": self.sentence,
        }


def compare(runs: Sequence[Run], seed: int = 0) -> Comparison:
    """Runs of one configuration become a row; each row is paired by problem with the first.

    Raises ConfigError where there is one run, or their held-out problems differ.
    """
    if len(runs) < 2:
        raise ConfigError("compare: name at least two runs")
    _refuse_other_problems(runs)
    chosen, sentence, is_same = _evaluations(runs)
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(run.identity_hash, []).append(index)
    rows: list[Row] = []
    for indices in groups.values():
        mine, at = tuple(runs[i] for i in indices), tuple(chosen[i] for i in indices)
        label = label_of([run.name for run in mine])
        difference = None
        if rows:
            difference = _difference(rows[0], label, at, derived_seed(seed, label))
        rows.append(Row(label=label, runs=mine, at=at, differs=_differs(runs[0], mine[0]), difference=difference))
    return Comparison(rows=tuple(rows), sentence=sentence, is_same_budget=is_same)


def _difference(first: Row, label: str, at: Sequence[Evaluated], seed: int) -> Rise:
    try:
        return paired_difference([one.scores for one in first.at], [one.scores for one in at], seed)
    except ValueError as error:
        raise ConfigError(f"{first.label} and {label}: {error}; a comparison needs samples with a reward") from error


def _refuse_other_problems(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        if odd := sorted(first.after.scores.keys() ^ run.after.scores.keys()):
            raise ConfigError(
                f"{first.name} and {run.name}: their held-out problems differ: {len(odd)} are of one alone, first "
                f"{odd[0]!r}; runs that are to be compared need the same evaluation.files, num_problems and domains, "
                f"and where there are more problems than that, the same evaluation.problems_seed"
            )


def _evaluations(runs: Sequence[Run]) -> tuple[list[Evaluated], str, bool]:
    """Those to compare, a sentence on them, and whether they are at one number of tokens."""
    after = [run.after for run in runs]
    if _spread(after) <= SAME_BUDGET:
        return after, f"after training, at {_range(after)} sampled tokens", True
    if (during := _at_common_budget(runs)) is not None:
        sentence = (
            f"during training, at {_range(during)} sampled tokens, the most that all runs have an evaluation near; "
            f"their ends are at {_range(after)}"
        )
        return during, sentence, True
    budgets = ", ".join(f"{run.name} {run.after.num_tokens:,}" for run in runs)
    sentence = (
        f"after training, although the budgets differ: {budgets} sampled tokens; the runs have no evaluations of the "
        f"same problems near one number of tokens. Set run.max_generated_tokens, or evaluation.interval"
    )
    return after, sentence, False


def _at_common_budget(runs: Sequence[Run]) -> list[Evaluated] | None:
    """Of every run the evaluation nearest to the largest number of tokens that all reached; None where one is far."""
    usable = [[evaluated for evaluated in run.during if evaluated.scores] for run in runs]
    if not all(usable):
        return None
    budget = min(max(evaluated.num_tokens for evaluated in of_one) for of_one in usable)
    nearest = [min(of_one, key=lambda evaluated: abs(evaluated.num_tokens - budget)) for of_one in usable]
    same_problems = len({frozenset(evaluated.scores) for evaluated in nearest}) == 1
    return nearest if same_problems and _spread(nearest) <= SAME_POINT else None


def _spread(evaluations: Sequence[Evaluated]) -> float:
    """How much more tokens the last has than the first."""
    tokens = [evaluated.num_tokens for evaluated in evaluations]
    return max(tokens) / max(1, min(tokens)) - 1


def _range(evaluations: Sequence[Evaluated]) -> str:
    low, high = min(e.num_tokens for e in evaluations), max(e.num_tokens for e in evaluations)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def label_of(names: Sequence[str]) -> str:
    """What the names of the runs of one configuration have in common, or the first of them."""
    if len(names) == 1:
        return names[0]
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return re.sub(r"[-_. ]+(s|seed)?[-_. ]*\d*$", "", "".join(letters[0] for letters in alike)) or names[0]


def _differs(first: Run, other: Run) -> tuple[str, ...]:
    found = [
        f"{d.name} = {'none' if d.right is None else d.right}" for d in differences(first.identity, other.identity)
    ]
    more = (f"and {len(found) - MAX_SHOWN} more",) if len(found) > MAX_SHOWN else ()
    return (*found[:MAX_SHOWN], *more)


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
