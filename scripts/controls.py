"""Judges three finished runs, PREFIX-as-it-is, -learning-rate-0 and -shuffled-rewards: only the first may rise."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

AS_IT_IS = "as-it-is"


class Threshold(NamedTuple):
    """Of a held-out rise."""

    least_rise: float
    """Its mean is at least that."""
    least_low: float
    """The low end of its 95 % interval is above that."""
    most_rise: float = 0.02
    """The mean of a control is at most that."""


THRESHOLD = Threshold(least_rise=0.18, least_low=0.12)


def is_right(rise: Mapping[str, float], threshold: Threshold, *, is_control: bool) -> bool:
    """Whether a run has risen as it must, or a control has not."""
    if is_control:
        return rise["mean"] <= threshold.most_rise
    return rise["mean"] >= threshold.least_rise and rise["low"] > threshold.least_low


def line(name: str, summary: Mapping[str, Any], right: bool) -> str:
    """The headline before and after, and the rise with its interval."""
    before, after = summary["heldout_before"]["headline"], summary["heldout_after"]["headline"]
    rise = summary["heldout_rise"]
    interval = f"[{rise['low']:+.3f}, {rise['high']:+.3f}]"
    return (
        f"{name:16} before {before['pass_at_1']:.3f}  after {after['pass_at_1']:.3f}  rise {rise['mean']:+.3f} "
        f"{interval}  {rise['num_problems']} problems  {'ok' if right else 'WRONG'}"
    )


def main() -> None:
    prefix = sys.argv[1]
    failed = False
    for name in (AS_IT_IS, "learning-rate-0", "shuffled-rewards"):
        summary = json.loads((Path(f"{prefix}-{name}") / "summary.json").read_text())
        right = is_right(summary["heldout_rise"], THRESHOLD, is_control=name != AS_IT_IS)
        failed |= not right
        print(line(name, summary, right))
    sys.exit(failed)


if __name__ == "__main__":
    main()
