"""Draws how often two rollouts stand in the wrong order by the noise of their environment, measured and by formula.

Pairs of rollouts, one better by `gap`, are played in a noisy environment of known variance as trajectories and their
replicas are; a point is the share of pairs that stand in the wrong order, a line `noise.wrong_order_share`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from stream_grpo.environments.instance import Call, Instances
from stream_grpo.environments.noise import wrong_order_share
from stream_grpo.environments.protocol import End, Start, Step
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.sampler.underway import replica_seed

OUT = Path(__file__).parents[1] / "docs" / "images" / "environment_noise.png"
GAP = 1.0
NOISES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
REPLICAS = (1, 2, 4, 8, 16)
NOISE_OF_REPLICAS = 2.0
_PROBLEM = ProblemRow(problem_id="noisy", answer="-", verifier="environment")


class Noisy:
    """The score of an action is the number that it is, and normal noise of deviation `std`.

    The share `common` of the noise's variance is of the seed alone, the rest of seed and action: chance that goes
    another way where the policy does.
    """

    def __init__(self, problem: ProblemRow, *, std: float, common: float) -> None:
        self._std, self._common = std, common

    def reset(self, seed: int, snapshot: bytes | None) -> Start:
        """All begin in one state."""
        self._seed = seed
        return Start(snapshot=b"one state")

    def step(self, action: str) -> Step:
        """Ends at once."""
        of_seed, of_both = (random.Random(f"{self._seed}{name}").gauss(0.0, 1.0) for name in ("", f"/{action}"))
        noise = math.sqrt(self._common) * of_seed + math.sqrt(1 - self._common) * of_both
        return Step(end=End.SUCCESS, score=float(action) + self._std * noise)


class Line(NamedTuple):
    """A way to compare rollouts."""

    label: str
    color: str
    common: float
    """Share of the noise's variance that one seed decides for both."""
    has_one_seed: bool
    num_replicas: int = 1

    @property
    def shared(self) -> float:
        """The share that both rollouts really have in common: without one seed nothing."""
        return self.common if self.has_one_seed else 0.0


BY_NOISE = (
    Line("a seed each", "#c8553d", 0.9, has_one_seed=False),
    Line("a seed each, 4 replicas", "#d9c27a", 0.9, has_one_seed=False, num_replicas=4),
    Line("one seed, half of the chance in common", "#7fa6d6", 0.5, has_one_seed=True),
    Line("one seed, nine tenths in common", "#2a5d9f", 0.9, has_one_seed=True),
    Line("one seed, all of it in common", "#444444", 1.0, has_one_seed=True),
)


def score(environments: Instances, action: str, seed: int, num_replicas: int) -> float:
    """Mean over the trajectory and its replicas, which have its actions and other seeds."""
    scores = []
    for number in range(num_replicas):
        seed_here = replica_seed(seed, number)
        call = Call(trajectory="t", problem=_PROBLEM, seed=seed_here, actions=(action,), open_loop=True)
        step = environments.answer(call).step
        scores.append(math.nan if step is None or step.score is None else step.score)
    return fmean(scores)


def measured(line: Line, noise: float, num_pairs: int, num_replicas: int) -> float:
    """Share of pairs in the wrong order."""
    environments = Instances(partial(Noisy, std=noise, common=line.common))
    rng, num_wrong = random.Random(f"{line.label}/{noise}/{num_replicas}"), 0
    for _ in range(num_pairs):
        seed = rng.getrandbits(62)
        other = seed if line.has_one_seed else rng.getrandbits(62)
        worse, better = ((str(value), of) for value, of in ((0.0, seed), (GAP, other)))
        num_wrong += score(environments, *worse, num_replicas) > score(environments, *better, num_replicas)
    return num_wrong / num_pairs


def formula(line: Line, noise: float, num_replicas: int) -> float:
    """The same by the formula."""
    return wrong_order_share(GAP, noise_std=noise, common=line.shared, num_replicas=num_replicas)


def draw_noise(axis: Axes, num_pairs: int) -> list[dict[str, float | str]]:
    """By noise over gap; the points."""
    found: list[dict[str, float | str]] = []
    fine = [i / 100 for i in range(5, int(100 * NOISES[-1]) + 20)]
    for line in BY_NOISE:
        curve = [formula(line, noise, line.num_replicas) for noise in fine]
        axis.plot(fine, curve, color=line.color, linewidth=1.2, label=line.label, zorder=1)
        shares = [measured(line, noise, num_pairs, line.num_replicas) for noise in NOISES]
        points(axis, NOISES, shares, num_pairs, line.color)
        found += [row(line, noise, line.num_replicas, share) for noise, share in zip(NOISES, shares, strict=True)]
    axis.set_xlabel(r"noise of a score over the gap, $\sigma / \Delta$")
    axis.set_title("pairs in the wrong order", loc="left")
    return found


def draw_replicas(axis: Axes, num_pairs: int) -> list[dict[str, float | str]]:
    """By replicas, at one noise; the points."""
    found: list[dict[str, float | str]] = []
    for line in (line for line in BY_NOISE if line.num_replicas == 1):
        fine = range(REPLICAS[0], REPLICAS[-1] + 1)
        axis.plot(fine, [formula(line, NOISE_OF_REPLICAS, m) for m in fine], color=line.color, linewidth=1.2)
        shares = [measured(line, NOISE_OF_REPLICAS, num_pairs, m) for m in REPLICAS]
        points(axis, REPLICAS, shares, num_pairs, line.color)
        found += [row(line, NOISE_OF_REPLICAS, m, share) for m, share in zip(REPLICAS, shares, strict=True)]
    axis.set_xscale("log", base=2)
    axis.set_xticks(REPLICAS, [str(m) for m in REPLICAS])
    axis.set_xlabel("replicas of the environment M")
    axis.set_title(rf"the same by replicas, at $\sigma$ = {NOISE_OF_REPLICAS:g} $\Delta$", loc="left")
    return found


def points(axis: Axes, places: Sequence[float], shares: Sequence[float], num_pairs: int, color: str) -> None:
    """Measured shares with their 95 % intervals."""
    errors = [1.96 * math.sqrt(share * (1 - share) / num_pairs) for share in shares]
    axis.errorbar(places, shares, yerr=errors, fmt="o", markersize=4, color=color, ecolor=color, capsize=2, zorder=2)


def row(line: Line, noise: float, num_replicas: int, share: float) -> dict[str, float | str]:
    expected = formula(line, noise, num_replicas)
    return {"way": line.label, "noise": noise, "replicas": num_replicas, "measured": share, "formula": expected}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=OUT, help="picture to write")
    parser.add_argument("--pairs", type=int, default=2000, help="of rollouts, for each point")
    parser.add_argument("--json", action="store_true", help="a last line with all points")
    options = parser.parse_args()
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (by_noise, by_replicas) = plt.subplots(1, 2, figsize=(10, 4.4), constrained_layout=True, sharey=True)
    found = [*draw_noise(by_noise, options.pairs), *draw_replicas(by_replicas, options.pairs)]
    by_noise.set_ylim(-0.01, 0.5)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, title="lines: formula; points: measured")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)
    farthest = max(found, key=lambda point: abs(float(point["measured"]) - float(point["formula"])))
    print(f"{len(found)} points of {options.pairs} pairs; farthest from the formula: {farthest}")
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
