"""How samplers and the learner speak with the buffer, typed, over `curator.wire`.

Every message and its answer stands in one table here; the buffer's process reads the same names. An answer that must
wait (no ticket free, no batch ready) is held back by the buffer for a moment and then says what it waits for, so that
no caller is ever blocked without a cause. An insert alone is held for as long as the journal's disk has no room for it.

    asked by   message      fields                                         answer
    sampler    hello        sampler_id                                     welcome   epoch
    sampler    goodbye      sampler_id, incarnation                        noted
    sampler    tickets      sampler_id, version, num_wanted, problems,     tickets   [ticket...], cause; body: prefixes
                            group_sizes (both by group)
    sampler    heartbeat    sampler_id, incarnation, tokens (by group)     noted
    sampler    partial      body: one encoded group, as far as it is       noted     is_kept, reason
    sampler    insert       body: one encoded group                        taken     fate, reason
    sampler    evaluated    sampler_id, version, num_tokens                noted
    learner    start        version, forks                                 started
    learner    lease        version, num_groups, target_policy_age         batch     cause, ages, staleness,
                                                                                     checkpoint_wanted; body: encoded
                                                                                     groups, used ones last
    learner    trained      version (after the step), group_ids, tokens    counted   ledger, ends, checkpoint_wanted
    learner    checkpointed version                                        noted
    anyone     ledger                                                      ledger    groups, tokens, reused, closes,
                                                                                     losses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from curator.wire import ERROR, Client, Message, RemoteError
from stream_grpo.transport.codec import decode_group, encode_group
from stream_grpo.types import Fate, Forks, PolicyVersion, RolloutGroup, Ticket, forks_from_plain, forks_to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The buffer's answer to an insert; given only once the group is durable."""

    group_id: str
    fate: Fate
    """accepted, or the group's end: no_signal, invalid, stale, refused."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Groups that the learner holds for one step; empty where `cause` says what is waited for."""

    groups: tuple[RolloutGroup, ...]
    ages: tuple[int, ...]
    """Policy age of each group at lease."""
    staleness: tuple[tuple[int, int, int], ...]
    """Its parts, in steps: publish lag, in flight, in queue."""
    cause: str
    """Why there are no groups yet; empty where there are."""
    checkpoint_wanted: bool = False
    """Whether the journal needs a checkpoint before the next is due, so that it may delete what is trained."""


class SamplerChannel:
    """A sampler's side: tickets and inserts, without waiting. Answers come from `poll`."""

    def __init__(self, client: Client, sampler_id: str) -> None:
        self._client, self._sampler_id = client, sampler_id
        self._tickets_asked: str | None = None
        self._inserts: dict[str, str] = {}
        self._evaluation_sent: str | None = None
        self.cause = ""
        """Why the buffer gave no tickets when it was last asked; empty where it did."""
        self._heartbeat_sent: str | None = None
        self._partials: dict[str, str] = {}
        self._not_kept: dict[str, str] = {}
        self._incarnation = 0

    def hello(self, timeout_s: float = 30.0) -> None:
        """Announce a new incarnation: tickets of an earlier one under this name are issued again, to anyone."""
        answer = self._client.call("hello", {"sampler_id": self._sampler_id}, timeout_s=timeout_s)
        self._incarnation = int(answer.fields["epoch"])

    def goodbye(self, timeout_s: float = 30.0) -> None:
        """Leave for good: the tickets that this incarnation still holds are issued again, to others, and at once."""
        fields = {"sampler_id": self._sampler_id, "incarnation": self._incarnation}
        self._client.call("goodbye", fields, timeout_s=timeout_s)

    @property
    def waits_for_tickets(self) -> bool:
        """Whether a request for tickets is on its way; there is never more than one."""
        return self._tickets_asked is not None

    @property
    def num_unacknowledged(self) -> int:
        """Groups and evaluations sent and not yet known to be durable."""
        return len(self._inserts) + self.waits_for_evaluation

    @property
    def num_partials_on_their_way(self) -> int:
        """Partials sent and not yet answered."""
        return len(self._partials)

    @property
    def unacknowledged_groups(self) -> list[str]:
        """Ids of the groups among them."""
        return list(self._inserts.values())

    @property
    def waits_for_heartbeat(self) -> bool:
        """Whether a heartbeat is on its way; there is never more than one."""
        return self._heartbeat_sent is not None

    def waits_for_partial(self, group_id: str) -> bool:
        """Whether a partial of this group is on its way; there is never more than one, so that none overtakes it."""
        return group_id in self._partials.values()

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether the account of an evaluation is on its way; there is never more than one."""
        return self._evaluation_sent is not None

    @property
    def has_credit(self) -> bool:
        """Whether one more message may be sent."""
        return self._client.has_credit

    def ask_tickets(
        self, version: PolicyVersion, num_wanted: int, problems: Mapping[str, str], group_sizes: Mapping[str, int] = {}
    ) -> None:
        """Ask for up to `num_wanted` tickets for the weights this sampler has applied.

        `problems`, `group_sizes`: the problem of each group picked since the last call, and how many rollouts it is to
        have, so that the buffer can tell whoever goes on with it. With 0 wanted that is all the message is for, and it
        is answered at once.
        """
        fields = {
            "sampler_id": self._sampler_id,
            "version": list(version),
            "num_wanted": num_wanted,
            "problems": dict(problems),
            "group_sizes": dict(group_sizes),
        }
        self._tickets_asked = self._client.post("tickets", fields)

    def insert(self, group: RolloutGroup) -> None:
        """Hand a finished group over; it stays this side's until `poll` gives its `Taken`."""
        message_id = self._client.post("insert", {"group_id": group.group_id}, (encode_group(group),))
        self._inserts[message_id] = group.group_id

    def heartbeat(self, tokens: Mapping[str, int]) -> None:
        """Say which groups this sampler holds, and how many tokens of each it has sampled."""
        fields = {"sampler_id": self._sampler_id, "incarnation": self._incarnation, "tokens": dict(tokens)}
        self._heartbeat_sent = self._client.post("heartbeat", fields)

    def hand_over_partial(self, group: RolloutGroup) -> None:
        """Hand over what there is of a group in progress, so that its tokens outlive this sampler."""
        message_id = self._client.post("partial", {"group_id": group.group_id}, (encode_group(group),))
        self._partials[message_id] = group.group_id

    def take_not_kept(self) -> dict[str, str]:
        """Groups whose partial the buffer has not kept since the last call, each with the reason."""
        not_kept, self._not_kept = self._not_kept, {}
        return not_kept

    def report_evaluation(self, version: PolicyVersion, num_tokens: int) -> None:
        """Account for the tokens of an evaluation. There is one of a version: a repeat is counted once."""
        fields = {"sampler_id": self._sampler_id, "version": list(version), "num_tokens": num_tokens}
        self._evaluation_sent = self._client.post("evaluated", fields)

    def poll(self, timeout_s: float = 0.0) -> tuple[list[Ticket], list[Taken]]:
        """What arrived: tickets and acknowledgements. Raises RemoteError where the buffer refuses a message."""
        tickets: list[Ticket] = []
        taken: list[Taken] = []
        for answer in self._client.poll(timeout_s):
            if answer.kind == ERROR:
                raise RemoteError(f"buffer: {answer.fields['reason']}")
            if answer.id == self._tickets_asked:
                self._tickets_asked, self.cause = None, answer.fields["cause"]
                tickets += _tickets_from_plain(answer.fields["tickets"], answer.body)
            elif answer.id == self._heartbeat_sent:
                self._heartbeat_sent = None
            elif answer.id in self._partials:
                group_id = self._partials.pop(answer.id)
                if not answer.fields["is_kept"]:
                    self._not_kept[group_id] = answer.fields["reason"]
            elif answer.id == self._evaluation_sent:
                self._evaluation_sent = None
            elif answer.id in self._inserts:
                group_id = self._inserts.pop(answer.id)
                taken.append(_taken(group_id, answer))
        return tickets, taken


def _taken(group_id: str, answer: Message) -> Taken:
    return Taken(group_id=group_id, fate=Fate(answer.fields["fate"]), reason=answer.fields["reason"])


class LearnerChannel:
    """The learner's side: lease a batch, say that it was trained."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def start(self, version: PolicyVersion, forks: Forks, timeout_s: float = 60.0) -> None:
        """Announce the version training starts from, at the first start and after every restore."""
        fields = {"version": list(version), "forks": forks_to_plain(forks)}
        self._client.call("start", fields, timeout_s=timeout_s)

    def lease(
        self,
        version: PolicyVersion,
        num_groups: int,
        timeout_s: float = 60.0,
        *,
        target_policy_age: int | None = None,
    ) -> Lease:
        """Ask for the groups of the step that starts from `version`. A repeat gives the same groups.

        `target_policy_age` takes the place of the maximum in the rule of tickets from now on; it is told with every
        lease, as a buffer that begins anew knows of none. None: the maximum.
        """
        asked = {"version": list(version), "num_groups": num_groups, "target_policy_age": target_policy_age}
        answer = self._client.call("lease", asked, timeout_s=timeout_s)
        groups = tuple(decode_group(data) for data in answer.body)
        fields = answer.fields
        staleness = tuple((lag, in_flight, in_queue) for lag, in_flight, in_queue in fields["staleness"])
        return Lease(
            groups=groups,
            ages=tuple(fields["ages"]),
            staleness=staleness,
            cause=fields["cause"],
            checkpoint_wanted=fields.get("checkpoint_wanted", False),
        )

    def trained(
        self,
        version: PolicyVersion,
        group_ids: Sequence[str],
        tokens: Mapping[str, Mapping[str, int]],
        timeout_s: float = 60.0,
    ) -> Mapping[str, Any]:
        """Report a finished step; `version` is the one it made.

        `tokens`: for every group its sampled tokens by fate (trained, masked, baseline_only). Returns the ledger, how
        many groups came to each of its `ends`, and `checkpoint_wanted` as in `Lease`.
        """
        fields = {
            "version": list(version),
            "group_ids": list(group_ids),
            "tokens": {group: dict(by_fate) for group, by_fate in tokens.items()},
        }
        return self._client.call("trained", fields, timeout_s=timeout_s).fields

    def ledger(self) -> Mapping[str, Any]:
        """The account as it is now; see `read_ledger`."""
        return read_ledger(self._client)

    def checkpointed(self, version: PolicyVersion, timeout_s: float = 60.0) -> None:
        """Say that the oldest kept checkpoint is of `version`: what it contains is final."""
        self._client.call("checkpointed", {"version": list(version)}, timeout_s=timeout_s)


def read_ledger(client: Client, timeout_s: float = 30.0) -> Mapping[str, Any]:
    """The account as it is now: `groups` and `tokens` by fate, `reused`, whether it `closes`, and `losses` to age."""
    return client.call("ledger", timeout_s=timeout_s).fields


def tickets_to_plain(tickets: Sequence[Ticket]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Tickets as the fields of a message, and the prefixes that some of them have as its body."""
    plain = [{**asdict(ticket), "prefix": bool(ticket.prefix)} for ticket in tickets]
    return plain, [ticket.prefix for ticket in tickets if ticket.prefix]


def _tickets_from_plain(plain: Sequence[Mapping[str, Any]], body: Sequence[bytes]) -> list[Ticket]:
    prefixes = iter(body)
    return [Ticket(**{**ticket, "prefix": next(prefixes) if ticket["prefix"] else b""}) for ticket in plain]


def version_of(fields: Mapping[str, Any]) -> PolicyVersion:
    """The `version` field of a message."""
    branch, step = fields["version"]
    return PolicyVersion(int(branch), int(step))


def forks_of(fields: Mapping[str, Any]) -> dict[int, PolicyVersion]:
    """The `forks` field of a message."""
    return forks_from_plain(fields["forks"])
