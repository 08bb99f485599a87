"""The rules of the stream on counts of groups: tickets, when a step begins, the parts of an age. Pure.

They are those of the buffer, where the proof of the age bound stands (`buffer/selectors.py`). Here groups are counted
by the version of their oldest token, as there may be millions of them; the tests hold both against each other. All
versions are of one branch, so that an age is a difference.

Words: A is `max_policy_age`, n is groups-per-step, `learner` is the learner's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Parts(NamedTuple):
    """Where the age of a group at lease comes from, in learner steps."""

    publish_lag: int
    in_flight: int
    in_queue: int


def room(live: int, lag: int, *, max_policy_age: int, groups_per_step: int) -> int:
    """Tickets that may be issued: until live = (A + 1 - lag) n."""
    return max(0, (max_policy_age + 1 - lag) * groups_per_step - live)


def block_size(missing: int, expected_share: float) -> int:
    """Tickets of a block at `max_policy_age` 0: ceil(missing / expected share with signal)."""
    return math.ceil(missing / expected_share - 1e-9)


def may_begin(
    num_available: int,
    left_behind: Iterable[tuple[int, int]],
    in_flight: Mapping[int, int],
    *,
    learner: int,
    max_policy_age: int,
    groups_per_step: int,
    waits: bool,
) -> bool:
    """Whether the learner's next step begins.

    It needs n available groups. Where it waits, for every k >= 0 at most k n of the live groups left behind may have k
    or fewer steps left; with nothing in flight there is nobody to wait for. `left_behind` are (version, groups) of the
    available ones that the step does not take, `in_flight` groups by the version that their tickets were issued for.
    """
    if num_available < groups_per_step:
        return False
    if not waits or not in_flight:
        return True
    by_steps_left = [0] * (max_policy_age + 1)
    for version, count in (*left_behind, *in_flight.items()):
        by_steps_left[max(0, min(max_policy_age, max_policy_age - (learner - version)))] += count
    total = 0
    for k, count in enumerate(by_steps_left):
        total += count
        if total > k * groups_per_step:
            return False
    return True


def parts(version: int, *, issued_at: int, inserted_at: int, learner: int) -> Parts:
    """The parts of the age of `version` against the learner; the others are where the learner was before."""
    publish_lag = max(0, issued_at - version)
    grown = max(publish_lag, inserted_at - version, 0)
    return Parts(publish_lag, grown - publish_lag, learner - version - grown)
