"""The account: every group is in one state, every sampled token has one fate. A fold over transitions.

    generated = trained + baseline_only + masked + stale + no_signal + invalid + refused + evaluation
                + buffered + in_flight

`generated` are the tokens that reached the buffer, refused copies of a group included. `refused` counts those copies:
the group they are a copy of has its own state. `in_flight` are those of the newest partial of every ticket; a record
that comes after it adds only what is new, and what it does not have of it is stale. `evaluation` are the tokens of
held-out problems, sampled between the groups: of no group, reported once for every evaluated version.

`reused` is a second column: the tokens that a step trained on after the step that gave them their fate, once for each
such step. A restore takes off the uses that its checkpoint does not contain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.errors import LedgerError
from stream_grpo.types import Fate, PolicyVersion

TOKEN_FATES = (
    "trained",
    "baseline_only",
    "masked",
    "stale",
    "no_signal",
    "invalid",
    "refused",
    "evaluation",
    "buffered",
    "in_flight",
)

_ENDS = frozenset({Kind.TRAINED, Kind.STALE, Kind.NO_SIGNAL, Kind.INVALID})
_LEGAL: dict[Kind | None, frozenset[Kind]] = {
    None: frozenset({Kind.TICKETED}),
    Kind.TICKETED: frozenset({Kind.TICKETED, Kind.PARTIAL, Kind.ACCEPTED, Kind.STALE, Kind.NO_SIGNAL, Kind.INVALID}),
    Kind.ACCEPTED: frozenset({Kind.LEASED, Kind.RESCORED, Kind.STALE, Kind.INVALID}),
    Kind.LEASED: frozenset({Kind.TRAINED, Kind.RESTORED, Kind.STALE, Kind.INVALID}),
    # Until the oldest kept checkpoint contains it, a restore takes the end of a trained group back.
    Kind.TRAINED: frozenset({Kind.RESTORED, Kind.STALE, Kind.INVALID}),
}
_STATES = frozenset().union(*_LEGAL.values())
_STATE_AFTER = {Kind.RESTORED: Kind.ACCEPTED, Kind.PARTIAL: Kind.TICKETED, Kind.RESCORED: Kind.TICKETED}
"""Where it is not the kind of the row."""


@dataclass(slots=True)
class Account:
    """A group as the account sees it, until its end is final."""

    state: Kind
    tokens: Counter[str] = field(default_factory=Counter)
    """The group's sampled tokens by fate."""


class Ledger:
    """Groups by state and tokens by fate, kept by `apply`."""

    folded = (
        "_open",
        "_groups",
        "_tokens",
        "_num_ticketed",
        "_generated",
        "_num_reuses",
        "_reused",
        "evaluated",
        "ends",
        "lost_in_sampler",
    )

    def __init__(self) -> None:
        """An account without entries."""
        self._open: dict[str, Account] = {}
        self._groups: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._num_ticketed = 0
        self._generated = 0
        self._num_reuses, self._reused = 0, 0
        self.evaluated: set[PolicyVersion] = set()
        """Versions whose evaluation is in the account."""
        self.ends: Counter[str] = Counter()
        """Ends of groups by fate and reason, as `stale: deadline`."""
        self.lost_in_sampler = 0
        """Tokens that never came: what owners had beyond the newest partial by their last heartbeat, an estimate."""

    def check_row(self, row: Transition) -> None:
        """Raises LedgerError where a transition is not legal, or the learner's tokens of a group do not add up."""
        if row.kind is Kind.EVALUATED and row.version in self.evaluated:
            raise LedgerError(f"the evaluation of weights {row.version} is in the account already")
        if row.kind is Kind.REUSED:
            self._check_reused(row)
        if row.kind is Kind.REFUSED or row.kind not in _STATES:
            return
        account = self._open.get(row.group_id)
        before = account.state if account else None
        if row.kind not in _LEGAL.get(before, frozenset()):
            raise LedgerError(f"group {row.group_id}: {row.kind} cannot follow {before or 'nothing'}")
        if row.length and before is not Kind.TICKETED:
            raise LedgerError(f"group {row.group_id}: it is {before} and has a record, another cannot come")
        if row.kind is Kind.TRAINED and account:
            self._check_trained(row, account.tokens.total())
        self._check_dropped(row, account)

    def apply(self, row: Transition) -> None:
        """Enter a transition. Raises LedgerError, before anything is entered, where `check_row` does."""
        self.check_row(row)
        if row.kind is Kind.REFUSED:
            self._groups["refused"] += 1
            self._tokens["refused"] += row.num_tokens
            self._generated += row.num_tokens
            self.ends[f"refused: {row.reason.partition(':')[0]}"] += 1
        elif row.kind is Kind.EVALUATED:
            self.evaluated.add(row.version)
            self._tokens["evaluation"] += row.num_tokens
            self._generated += row.num_tokens
        elif row.kind in (Kind.REUSED, Kind.UNDONE):
            sign = 1 if row.kind is Kind.REUSED else -1
            self._num_reuses += sign
            self._reused += sign * row.trained_tokens
        elif row.kind in _STATES:
            self._move(row)

    def _move(self, row: Transition) -> None:
        account = self._open.get(row.group_id)
        if account is None:
            account = self._open[row.group_id] = Account(row.kind)
            self._num_ticketed += 1
        else:
            self._groups[account.state] -= 1
            self._tokens.subtract(account.tokens)
        account.state = _STATE_AFTER.get(row.kind, row.kind)
        account.tokens = self._tokens_after(row, account)
        self._groups[account.state] += 1
        self._tokens.update(account.tokens)
        if row.kind in _ENDS:
            self.ends[f"{row.kind}: {row.reason.partition(':')[0]}" if row.reason else row.kind.value] += 1
            if row.kind is not Kind.TRAINED:
                del self._open[row.group_id]

    def _tokens_after(self, row: Transition, account: Account) -> Counter[str]:
        kept = account.tokens.total() - row.dropped_tokens
        self._tokens["stale"] += row.dropped_tokens
        self.lost_in_sampler += row.lost_tokens
        if row.length:
            self._generated += row.num_tokens - kept
        total = row.num_tokens if row.length else kept
        match row.kind:
            case Kind.TRAINED:
                return Counter(
                    trained=row.trained_tokens, masked=row.masked_tokens, baseline_only=row.baseline_only_tokens
                )
            case Kind.STALE | Kind.NO_SIGNAL | Kind.INVALID:
                return Counter({row.kind.value: total})
            case Kind.TICKETED | Kind.PARTIAL | Kind.RESCORED:
                return Counter(in_flight=total)
            case _:
                return Counter(buffered=total)

    def _check_trained(self, row: Transition, num_tokens: int) -> None:
        reported = row.trained_tokens + row.masked_tokens + row.baseline_only_tokens
        if reported != num_tokens:
            raise LedgerError(
                f"group {row.group_id}: {num_tokens} sampled tokens, the learner accounts for {reported} "
                f"(trained {row.trained_tokens}, masked {row.masked_tokens}, baseline_only {row.baseline_only_tokens})"
            )

    def _check_reused(self, row: Transition) -> None:
        account = self._open.get(row.group_id)
        # A group whose end is final has no account any more; `stock` knows that it was trained.
        if account and account.state is not Kind.TRAINED:
            raise LedgerError(f"group {row.group_id}: {row.kind} cannot follow {account.state}")
        self._check_trained(row, row.num_tokens)

    def _check_dropped(self, row: Transition, account: Account | None) -> None:
        in_flight = account.tokens["in_flight"] if account else 0
        kept = in_flight - row.dropped_tokens
        if row.dropped_tokens < 0 or kept < 0:
            raise LedgerError(
                f"group {row.group_id}: {row.kind} drops {row.dropped_tokens} of {in_flight} tokens in flight"
            )
        if 0 < row.num_tokens < kept:
            raise LedgerError(f"group {row.group_id}: {row.num_tokens} tokens cannot hold the {kept} that go on")

    def forget(self, group_ids: Iterable[str]) -> None:
        """Trained groups that a kept checkpoint contains: their end is final."""
        for group_id in group_ids:
            self._open.pop(group_id, None)

    def gap(self) -> str:
        """What does not close, in words; empty where everything does."""
        tokens = sum(self._tokens[fate] for fate in TOKEN_FATES)
        if tokens != self._generated:
            gap = self._generated - tokens
            return f"{self._generated} tokens were generated, {tokens} have a fate, a gap of {gap}"
        groups = sum(count for state, count in self._groups.items() if state != Kind.REFUSED)
        if groups != self._num_ticketed:
            gap = self._num_ticketed - groups
            return f"{self._num_ticketed} groups were ticketed, {groups} have a state, a gap of {gap}"
        counts = (*self._tokens.items(), *self._groups.items(), ("reused", self._reused))
        negative = [name for name, count in counts if count < 0]
        return f"negative counts of {', '.join(negative)}" if negative else ""

    def check(self) -> None:
        """Raises LedgerError naming the gap where the account does not close."""
        gap = self.gap()
        if gap:
            raise LedgerError(f"the account does not close: {gap}")

    def as_fields(self) -> dict[str, Any]:
        """The account as plain values: `groups` by state, `tokens` by fate, further uses, and whether it `closes`.

        Beside it `lost_in_sampler`, an estimate that is no part of the sum.
        """
        tokens = {"generated": self._generated} | {fate: self._tokens[fate] for fate in TOKEN_FATES}
        groups = {fate.value: self._groups[fate.value] for fate in Fate}
        reused = {"uses": self._num_reuses, "tokens": self._reused}
        closes = not self.gap()
        return {
            "groups": groups,
            "tokens": tokens,
            "reused": reused,
            "closes": closes,
            "lost_in_sampler": self.lost_in_sampler,
        }
