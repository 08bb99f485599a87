"""Who is killed, in which order and where: drawn from a seed, so that a run of kills can be had again. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stream_grpo.failpoints import POINTS

PARTS = ("sampler", "learner", "buffer", "curator", "reward worker", "launcher", "all")
RAY_PARTS = ("raylet", "gcs")
ENDS_THE_RUN = ("launcher", "all", *RAY_PARTS)
"""After these the run is resumed; every other is started again by the launcher."""
LEAST = 2
"""Kills of each."""
MAX_SERVER_RESTARTS = 3
"""What `launch` grants buffer and curator in one start of a run."""
FIRST_POINTS = (
    "journal.segment_written",
    "answer.taken",
    "checkpoint.writing",
    "checkpoint.renaming",
    "publish.renaming",
    "answer.batch",
    "outcomes.flush",
    "sampler.weights_read",
    "learner.stepped",
    "outcomes.flushed",
    "journal.log_written",
    "checkpoint.renamed",
    "answer.counted",
)
"""Points in the order in which they are taken, all others after them."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill."""

    who: str
    point: str = ""
    """Where it happens; empty: wherever the process is."""
    passage: int = 1
    """Of the point."""
    after_steps: int = 0
    """Learner steps that are waited for first; 0: the processes may still be starting."""
    delay_s: float = 0.0
    """Waited after that."""


def victim_of(point: str) -> str:
    """The part that passes a point."""
    return POINTS[point].partition(":")[0]


def schedule(num_kills: int, seed: int, parts: Sequence[str], *, max_delay_s: float) -> list[Kill]:
    """`num_kills` kills, half of them at points, of each part at least LEAST, in a drawn order.

    Raises ValueError where `num_kills` are too few for that.
    """
    rng = random.Random(seed)
    points = [*FIRST_POINTS, *(name for name in POINTS if name not in FIRST_POINTS)]
    at_points = [_at_point(points[i % len(points)], rng) for i in range(num_kills // 2)]
    counts = Counter(kill.who for kill in at_points)
    who = [part for part in parts for _ in range(max(0, LEAST - counts[part]))]
    num_plain = num_kills - len(at_points)
    if len(who) > num_plain:
        raise ValueError(f"{num_kills} kills are too few: half of them at points and each of {len(parts)} parts twice")
    who += rng.choices(parts, k=num_plain - len(who))
    kills = at_points + [
        Kill(part, after_steps=rng.choice((0, 1, 1, 2)), delay_s=rng.uniform(0, max_delay_s)) for part in who
    ]
    return _in_order(kills, rng)


def _at_point(point: str, rng: random.Random) -> Kill:
    is_frequent = point.startswith(("journal.", "answer."))
    return Kill(victim_of(point), point, rng.randint(1, 4) if is_frequent else 1, rng.choice((0, 1)))


def _in_order(kills: Sequence[Kill], rng: random.Random) -> list[Kill]:
    """A drawn order in which no start of the run loses a server more often than its launcher starts it again."""
    order: list[Kill] = []
    left = rng.sample(kills, len(kills))
    losses: Counter[str] = Counter()
    while left:
        kill = next((kill for kill in left if losses[kill.who] < MAX_SERVER_RESTARTS), left[0])
        if kill.who in ENDS_THE_RUN:
            losses.clear()
        elif kill.who in ("buffer", "curator"):
            losses[kill.who] += 1
        left.remove(kill)
        order.append(kill)
    return order
