"""Who is killed, in which order and where: drawn from a seed, so that a run of kills can be had again. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, zip_longest

from stream_grpo.failpoints import POINTS

PARTS = ("sampler", "learner", "buffer", "curator", "reward worker", "launcher", "all")
RAY_PARTS = ("raylet", "gcs")
ENDS_THE_RUN = ("launcher", "all", *RAY_PARTS)
"""After these the run is resumed; every other is started again by the launcher."""
LEAST = 2
"""Kills of each."""
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
    least = least_kills(parts)
    if num_kills < least:
        raise ValueError(
            f"{num_kills} kills are too few: half of them at points and each of {len(parts)} parts {LEAST} times takes "
            f"at least {least}"
        )
    rng = random.Random(seed)
    at_points = [_at_point(point, rng) for point in _points(num_kills)]
    who = _owed(num_kills, parts)
    num_plain = num_kills - len(at_points)
    who += rng.choices(parts, k=num_plain - len(who))
    kills = at_points + [
        Kill(part, after_steps=rng.choice((0, 1, 1, 2)), delay_s=rng.uniform(0, max_delay_s)) for part in who
    ]
    return _in_order(kills, rng)


def least_kills(parts: Sequence[str]) -> int:
    """The fewest kills that a schedule may have; with each one more there is more room and no more is owed."""
    return next(n for n in count(1) if len(_owed(n, parts)) <= n - n // 2)


def _points(num_kills: int) -> list[str]:
    points = [*FIRST_POINTS, *(name for name in POINTS if name not in FIRST_POINTS)]
    return [points[i % len(points)] for i in range(num_kills // 2)]


def _owed(num_kills: int, parts: Sequence[str]) -> list[str]:
    """Who must be killed elsewhere, so that each part is killed LEAST times."""
    counts = Counter(map(victim_of, _points(num_kills)))
    return [part for part in parts for _ in range(max(0, LEAST - counts[part]))]


def _at_point(point: str, rng: random.Random) -> Kill:
    is_frequent = point.startswith(("journal.", "answer."))
    return Kill(victim_of(point), point, rng.randint(1, 4) if is_frequent else 1, rng.choice((0, 1)))


def _in_order(kills: Sequence[Kill], rng: random.Random) -> list[Kill]:
    """A drawn order in which the kills of each part are spread evenly over the starts of the run.

    So no start loses a server more often than its launcher starts it again, where that is possible at all.
    """
    ends = rng.sample(ended := [kill for kill in kills if kill.who in ENDS_THE_RUN], len(ended))
    starts: list[list[Kill]] = [[] for _ in range(len(ends) + 1)]
    for who in sorted({kill.who for kill in kills} - set(ENDS_THE_RUN)):
        mine = [kill for kill in kills if kill.who == who]
        first = rng.randrange(len(starts))
        for i, kill in enumerate(rng.sample(mine, len(mine))):
            starts[(first + i) % len(starts)].append(kill)
    order: list[Kill] = []
    for start, end in zip_longest(starts, ends):
        order += rng.sample(start, len(start))
        order += [end] if end else []
    return order
