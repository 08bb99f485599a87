"""Branching groups: one rollout plays the first actions for all, then each samples its own from that very state.

    the first    -- action 1 -- ... -- action d - 1 --+-- its action d    -- ... -- its end
    the others      (wait, hold no slot)              +-- theirs          -- ... -- their ends

Why what follows may be compared. The turn d is drawn from the group's seed before anything is sampled. Let h be the
history of the trunk: prompt, d - 1 actions, what they were answered. Given h, each rollout samples what comes next from
the policy by a seed of its own: G independent draws of one distribution, exchangeable, so that what the others got is
a baseline in which a rollout's own action has no part. Nothing is asked of how h came about: a trunk may be of any
weights.

A trunk may end before its turn d, by its action k. Then h is the history before that action. That the group branches
at k says something of this action, that it ended the trajectory: it is selected, no draw of the policy at h any more,
and is dropped. The first rollout samples anew with the others; given h their actions are independent of the dropped
one, which decides where the group branches and nothing else. At k = 1 nothing is left of the trunk, and the group is a
plain one.

A trunk that fails (its environment, its engine) ends its own rollout alone, as invalid; the others begin as a plain
group. All of this is bookkeeping: the engine of trajectories asks environments and samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from stream_grpo.config_environment import Environment
from stream_grpo.sampler.underway import Trunk, Underway


def num_trunk_actions(group_seed: int, settings: Environment) -> int:
    """Actions that a group's rollouts have in common: 0, or in a share `branch_share` of all groups 1 to
    `branch_turns` - 1, each as often. The same for a seed on every machine."""
    digest = hashlib.sha256(f"{group_seed}/branch".encode()).digest()
    if int.from_bytes(digest[:8], "big") >= settings.branch_share * 2**64:
        return 0
    last_turn = settings.max_steps if settings.branch_turns is None else settings.branch_turns
    return 1 + int.from_bytes(digest[8:16], "big") % (last_turn - 1)


def trunk_seed(seed: int) -> int:
    """The seed by which a rollout of `seed` samples the trunk, in [0, 2^63): what it samples later is none of it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/trunk".encode()).digest()[:8], "big") >> 1


@dataclass(slots=True)
class _Branching:
    """A group that branches."""

    num_members: int = 0
    leader: Underway | None = None
    """Plays the trunk; None before the first rollout has begun, and once that is done."""
    before: Trunk | None = None
    """The leader before its newest action."""
    trunk: Trunk | None = None
    """Known once the decision has come."""
    owner: str = ""
    """The request whose record has the trunk's tokens as sampled ones."""
    is_plain: bool = False
    """Whether its trunk has failed."""
    held: dict[str, Underway] = field(default_factory=dict)
    """By request id: those that wait for the trunk."""


class Branches:
    """The branching groups of one engine. Belongs to its thread, but for `num_held` and `as_fields`."""

    def __init__(self) -> None:
        self._groups: dict[str, _Branching] = {}
        self.num_held = 0
        """Trajectories that wait for the trunk of their group."""
        self._num_cut = self._num_failed = self._num_tokens_dropped = 0

    def as_fields(self) -> dict[str, int]:
        """Fields of a status."""
        return {
            "num_held": self.num_held,
            "num_trunks_cut": self._num_cut,
            "num_trunks_failed": self._num_failed,
            "num_trunk_tokens_dropped": self._num_tokens_dropped,
        }

    # -- who comes and goes -------------------------------------------------------------------------------------------

    def join(self, underway: Underway) -> Literal["begins", "waits", "goes on"]:
        """What a trajectory does that is new, or added again after an abort: it asks its environment to begin, waits
        for its group's trunk, or goes on from that at once."""
        if not underway.num_trunk_actions:
            return "begins"
        group = self._groups.setdefault(underway.group, _Branching())
        group.num_members += 1
        if group.is_plain:
            return "begins"
        if group.trunk is not None:
            underway.go_on_from(group.trunk, is_own=underway.request.request_id == group.owner)
            return "goes on"
        if group.leader is None:
            group.leader, underway.seed = underway, trunk_seed(underway.request.seed)
            return "begins"
        group.held[underway.request.request_id] = underway
        self.num_held += 1
        return "waits"

    def leave(self, underway: Underway, *, is_aborted: bool) -> None:
        """A trajectory is over. `is_aborted`: it may be added again, and then plays its group's trunk anew; a leader
        that ends in any other way leaves a plain group, whoever is added later."""
        if (group := self._groups.get(underway.group)) is None:
            return
        group.num_members -= 1
        if group.leader is underway:
            group.leader = group.before = None
            if not is_aborted:
                self._fail(group)
        elif group.held.pop(underway.request.request_id, None) is not None:
            self.num_held -= 1

    def turn(self) -> list[Underway]:
        """Forget groups that are over, between two engine steps: what is aborted to be sampled again with other weights
        is added before the next one. Returns the trajectories that begin without a trunk, because theirs has failed."""
        begin: list[Underway] = []
        for name, group in list(self._groups.items()):
            if not group.num_members:
                del self._groups[name]
                continue
            if group.leader is None and group.trunk is None and not group.is_plain:
                self._fail(group)
            if group.is_plain:
                begin += self._freed(group)
        return begin

    def _fail(self, group: _Branching) -> None:
        group.is_plain = True
        self._num_failed += 1

    # -- the trunk ----------------------------------------------------------------------------------------------------

    def leader_of(self, underway: Underway) -> Underway | None:
        """Who plays the trunk that this one waits for."""
        group = self._groups.get(underway.group)
        return None if group is None or underway.request.request_id not in group.held else group.leader

    def leads(self, underway: Underway) -> bool:
        """Whether it plays the trunk of its group."""
        group = self._groups.get(underway.group)
        return group is not None and group.leader is underway

    def is_decision(self, leader: Underway) -> bool:
        """Whether the trunk ends here, before the leader's next action."""
        self._groups[leader.group].before = leader.trunk()
        return leader.num_actions >= leader.num_trunk_actions

    def decide(self, leader: Underway) -> list[Underway]:
        """The trunk is what the leader was before its newest action, or is where it stands at the decision; all of the
        group, which now go on from there, the leader first."""
        group = self._groups[leader.group]
        trunk = group.before
        if trunk is None:
            raise ValueError(f"the trunk of {leader.group} ended before an action")
        self._num_cut += len(trunk.actions) < leader.num_trunk_actions
        self._num_tokens_dropped += leader.num_sampled - trunk.num_sampled
        members = [leader, *self._freed(group)]
        for underway in members:
            underway.go_on_from(trunk, is_own=underway is leader)
        group.trunk, group.owner = trunk, leader.request.request_id
        group.leader = group.before = None
        return members

    def _freed(self, group: _Branching) -> list[Underway]:
        freed = list(group.held.values())
        group.held.clear()
        self.num_held -= len(freed)
        return freed
