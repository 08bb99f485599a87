"""Which problems of a scored pool are worth keeping, and why; the credit of those who made them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from curator.schema import Problem
from curator.scoring import Beta, expected_mixed, lowest_mixed, wilson
from curator.scoring_run import Tally

CREDIT_KEYS = ("parent_id", "parent", "generator", "generated_by", "synthesizer", "metadata.source_dataset")
"""Where a row says from whom it is, in `extra`; the last is that of reasoning-gym."""
CUT_SHARE = 0.5
"""From this share of cut answers on, a problem that is never solved is one of length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a problem must show."""

    group_size: int = 8
    """Of the groups whose signal counts."""
    min_signal: float = 0.2
    """A problem is kept where the expected chance of a mixed group is at least this."""
    min_synthetic_signal: float = 0.2
    """A synthetic one where even the lowest rate in its interval gives this chance."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that mean nothing."""
        if self.group_size < 2:
            raise ValueError(f"--group-size {self.group_size}: a group needs at least 2 answers to differ")
        for name in ("min_signal", "min_synthetic_signal"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name):g}: expected a chance, 0 to 1")


class Verdict(NamedTuple):
    """Keep or drop, and why."""

    keep: bool
    why: str


def verdict(tally: Tally, known: Beta, rule: Rule, *, is_synthetic: bool) -> Verdict:
    """What to do with a problem, `known` being the posterior of its rate."""
    if tally.refusal is not None:
        return Verdict(False, f"cannot be sampled: {tally.refusal}")
    if not tally.scored:
        why = tally.whys.most_common(1)[0][0] if tally.whys else "not sampled"
        return Verdict(False, f"no answer could be scored: {why}")
    signal = expected_mixed(known, rule.group_size)
    if signal < rule.min_signal:
        return Verdict(False, f"{_without_signal(tally, known)}: a mixed group at {signal:.3f} < {rule.min_signal:g}")
    if is_synthetic:
        lowest = lowest_mixed(wilson(tally.passed, tally.scored), rule.group_size)
        if lowest < rule.min_synthetic_signal:
            return Verdict(False, f"synthetic, signal not shown: at least {lowest:.3f} < {rule.min_synthetic_signal:g}")
        return Verdict(True, f"synthetic, signal shown: at least {lowest:.3f}")
    return Verdict(True, f"a mixed group at {signal:.3f}")


def _without_signal(tally: Tally, known: Beta) -> str:
    if known.mean >= 0.5:
        return "too easy"
    return "cut at the length limit" if tally.num_cut >= CUT_SHARE * tally.attempts else "too hard"


def credit_of(problem: Problem, keys: Sequence[str] = CREDIT_KEYS) -> str | None:
    """Who made a problem, as `key:value` of the first key that its row has; None for one that is not synthetic."""
    for key in keys:
        value: object = problem.extra
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return f"{key}:{value}"
    return None


class Credit(NamedTuple):
    """What the problems of one parent or generator came to."""

    name: str
    num_problems: int
    num_kept: int
    signal: float
    """Mean lower bound of the chance of a mixed group."""
    num_tokens: int


def credits(rows: Iterable[dict[str, object]]) -> list[Credit]:
    """The rows of a scored pool that name someone, by whom they name; who kept most comes first."""
    by_name: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        if row["credit"] is not None:
            by_name.setdefault(str(row["credit"]), []).append(row)
    found = [
        Credit(
            name,
            len(group),
            sum(bool(row["keep"]) for row in group),
            sum(float(str(row["signal_low"])) for row in group) / len(group),
            sum(int(str(row["tokens"])) for row in group),
        )
        for name, group in by_name.items()
    ]
    return sorted(found, key=lambda credit: (-credit.num_kept, -credit.signal, credit.name))
