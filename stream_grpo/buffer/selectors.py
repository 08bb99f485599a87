"""Which groups a step takes, and whether it waits. Orders are functions; pure; the proof of the age bound.

Words: A is `max_policy_age`, n is groups-per-step, of which only the fresh places count: those that are not left to
groups trained on before. A group's age is that of its oldest token. While it is in flight it is the largest age of the
weights its ticket was issued for, of the last version of every branch from theirs on that a restore has left
(`Lineage.age_in_flight`), and of the tokens of its newest partial. Its steps left are A minus its age. Live = in flight
+ buffered + leased.

Premises: the learner publishes a version only after the buffer has answered that the step is trained, or the start
noted; a sampler samples with published weights alone, and its weights never go back (a sampler that breaks this is
caught by the check of every token, at insert and at lease).

Claim, with `too_old = wait`: no group that is leased is older than A, no group is too old while it waits, and waiting
for the in-flight ones always ends. What the other settings keep of this stands at the end.

    I.   At every moment, for every k >= 0, at most (k + 1) n live groups have k or fewer steps left.
    II.  No live group has fewer than 0 steps left.

Proof, by induction over what can happen.

*Issue.* A ticket for weights that lag the learner by g has L = A - g steps left, and is issued only while
live < (A + 1 - g) n = (L + 1) n. After it live <= (L + 1) n, so (I) holds for all k >= L; for k < L nothing changed.
With g > A nothing is issued, so L >= 0 and (II) holds.

*A target below the maximum.* The learner may ask that new tickets be issued as if T <= A were the maximum, while
live < (T + 1 - g) n. This is stricter than the condition above, whatever T was before and however it moves, so that (I)
and (II) hold as they do without it: steps left are always counted from A, and tickets issued under a larger T stay as
they are. What T could break is progress, and it does not while it is at least publish_interval - 1, by which weights
may lag until the next publish: see *Waiting ends*. A group that is issued again is no new one, and is judged by A.

*Issue again*, to weights that lag by g, with a prefix whose oldest token is p old: the group has A - max(g, p) steps
left, p = 0 without a prefix. It leaves the count first, and enters it where an issue with that lag would have room, as
above; or where it gains steps left or keeps those it had, which lowers no count of (I). With max(g, p) > A the prefix
is left behind, and with g > A nothing is issued, so that (II) holds. The second case is the common one: no token of a
prefix is older than its group was in flight, as *Insert* says, so that weights as young as those of its first owner
always go on from it, however full the stream is.

*Insert.* No token is older than its group's age in flight, so steps left can only grow, which helps (I) and (II). For
age is the distance in the tree of versions, and along a path of a tree the distance to any point is largest at one of
the two ends. The versions a sampler may use while it holds a ticket lie on paths from that of the ticket to the last
one of its branch, from there to the last one of the next branch, and so on to the learner. The ends of these paths are
what the age in flight is taken over, and the learner itself, of age 0. *Any other end* of a group only lowers counts.

*Step.* Step u takes n groups and begins only if for every k >= 0 at most k n of the live groups left behind have k or
fewer steps left. For k = 0: none left behind has 0 steps left. The step makes every group one older: what had k + 1 or
fewer steps left now has k or fewer, and of these there are at most (k + 1) n. That is (I), and (II) follows from k = 0.
The leased n themselves had 0 or more steps left at lease, which is the bound.

*Waiting ends.* If nothing more were in flight and n or more groups were buffered, the step could begin: by (I) at most
(k + 1) n have k or fewer steps left, and the n with the fewest are taken, so at most k n of those stay. Hence what
forbids a step is always a group in flight, or too few groups. A group in flight, a straggler of any length included,
arrives or passes its deadline and ends as stale; either way the count of those in flight falls. With too few groups
live < n or some are in flight; with live < n a sampler whose weights lag by no more than T (A where there is no target)
gets a ticket, and weights lag by no more than publish_interval - 1 <= T once a sampler has applied what is published.
So a step begins after finitely many arrivals and deadlines, as long as some groups have signal. Only this order has the
property: any other may leave behind a group with 0 steps left. QED

*Restore.* Ages across branches may be any, and the branch that is left gives every ticket in flight one more version to
be as old as. `keep_in_order` walks the groups in the order and keeps one with s >= 0 steps left only while fewer than
(s + 1) n are kept, which is (I) and (II) again. Afterwards a step of the new branch makes every one of these ages one
larger, as the proof of *Step* asks: all lie on branches that were left. A step that the checkpoint contains, but whose
report was lost, is counted as trained before the restore.

*Further uses.* With its first use a group stops being live, so that it enters no count above, and no step waits for it.
It is a candidate for the reused places of a step only while every token of it is at most A old at that step, and the
fresh places are filled without it. So neither claim depends on it. A restore undoes the uses that the checkpoint does
not contain; whether a group may be used again afterwards is judged by the same check, against the learner as it is.

*The other settings: drop, requeue, baseline_only.* A step never waits for a group in flight. Before it is filled, every
buffered group with an age above A ends as stale, and ages do not change between that and the lease: so the bound holds
by this check alone, in any order and whatever the tickets allowed; (I) need not hold. What is lost is that no group
gets too old: stragglers do. Progress is as above, and simpler: with n groups young enough the step begins; with fewer,
live < n, or some are in flight, which arrive or pass their deadline.

*baseline_only* asks the same of a part of a group. Its age is that of the oldest token of those valid rollouts that are
wholly at most A old; where there is none, of the youngest of all, which is above A, and the group ends as stale. The
learner trains on a rollout if and only if no token of it is above A, by the same distance, from the same version and
forks that the lease was granted for. So no trained token is older than A, and each batch has something of each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stream_grpo.config_stream import Selector


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live group as the order sees it."""

    group_id: str
    """Sorts by issue."""
    age: int
    """Of its oldest token that would be trained; while it is in flight, of the oldest that it may bring."""
    sampler_id: str = ""
    reward_variance: float = 0.0
    """Of its valid rewards; 0 while it is in flight."""
    num_uses: int = 0
    """Steps that have trained on it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups of a step in their order, or why it must wait."""

    batch: tuple[str, ...]
    cause: str


def steps_left(group: Candidate, max_policy_age: int) -> int:
    """Steps that may still begin with this group waiting; below 0 it is too old."""
    return max_policy_age - group.age


Order = Callable[[Candidate], tuple[float, ...]]
"""What a step takes first: the least of these. Equal ones go by dispatch, oldest first."""


def fewest_steps_left(group: Candidate) -> tuple[float, ...]:
    """The oldest first, which has the fewest steps left. The only order that keeps (I)."""
    return (-group.age,)


def freshest_first(group: Candidate) -> tuple[float, ...]:
    """The youngest first."""
    return (group.age,)


def expected_signal(group: Candidate) -> tuple[float, ...]:
    """The largest variance of rewards first, which is the mean squared advantage: p (1 - p) for pass or fail."""
    return (-group.reward_variance, -group.age)


ORDERS: Mapping[Selector, Order] = {
    "fewest_steps_left": fewest_steps_left,
    "freshest_first": freshest_first,
    "expected_signal": expected_signal,
}
"""By the name that the configuration has for them."""


def in_order(groups: Iterable[Candidate], order: Order = fewest_steps_left) -> list[Candidate]:
    """By `order`, then oldest dispatched."""
    return sorted(groups, key=lambda group: (*order(group), group.group_id))


def select(
    available: Sequence[Candidate],
    in_flight: Sequence[Candidate],
    num_groups: int,
    max_policy_age: int,
    *,
    order: Order = fewest_steps_left,
    waits: bool = True,
) -> Selection:
    """The `num_groups` groups that a step takes of `available`, or the cause it must wait.

    Where it `waits` for groups in flight, the step begins only if for every k >= 0 at most k * num_groups of the live
    groups left behind have k or fewer steps left. The caller has taken out of `available` what is too old.
    """
    ordered = in_order(available, order)
    waited_for = in_order(in_flight)[:1]
    left_behind = in_order([*ordered[num_groups:], *in_flight])
    fits = not waits or all(
        count <= steps_left(group, max_policy_age) * num_groups for count, group in enumerate(left_behind, start=1)
    )
    # With nothing in flight the step begins: by (I) it fits, and to wait for nobody would be for ever.
    if len(ordered) >= num_groups and (fits or not waited_for):
        return Selection(tuple(group.group_id for group in ordered[:num_groups]), "")
    counts = f"{len(ordered)} groups buffered, {len(in_flight)} in flight, {num_groups} needed"
    if not waited_for:
        return Selection((), f"{counts}; no group is in flight")
    first = waited_for[0]
    left = steps_left(first, max_policy_age)
    return Selection((), f"{counts}; waits for group {first.group_id} of {first.sampler_id} with {left} steps left")


def keep_in_order(live: Iterable[Candidate], num_groups: int, max_policy_age: int) -> set[str]:
    """The groups that still have a place in the order after a restore."""
    kept: set[str] = set()
    for group in in_order(live):
        left = steps_left(group, max_policy_age)
        if left >= 0 and len(kept) < (left + 1) * num_groups:
            kept.add(group.group_id)
    return kept


def select_again(trained: Iterable[Candidate], num_groups: int, *, order: Order, max_uses: int) -> tuple[str, ...]:
    """Up to `num_groups` groups for a further use: the least used first, then by `order`.

    The caller has taken out of `trained` what is too old.
    """
    usable = [group for group in trained if group.num_uses < max_uses]
    usable = in_order(usable, lambda group: (group.num_uses, *order(group)))
    return tuple(group.group_id for group in usable[:num_groups])
