"""What the owners of tickets say while they hold them: that they live, and what they have so far."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from stream_grpo.buffer.admission import config_changed
from stream_grpo.buffer.book import Book
from stream_grpo.buffer.facts import GroupFacts, batch_of_record
from stream_grpo.buffer.heartbeats import Heartbeats
from stream_grpo.buffer.partials import num_shared_tokens
from stream_grpo.buffer.tickets import InFlight
from stream_grpo.buffer.transitions import Kind


class Owners:
    """Follows who still holds which ticket. Heartbeats are in memory, all else is in the book."""

    def __init__(self, book: Book, *, now: float) -> None:
        """`now`: the start, in unix seconds, up to which every owner counts as heard."""
        self._book, self._rules = book, book.rules
        self._lineage, self._tickets, self._partials = book.lineage, book.tickets, book.partials
        self._heartbeats = Heartbeats(book.rules.ticket_timeout_s, now)

    def heartbeat(self, sampler_id: str, incarnation: int, tokens: Mapping[str, int], now: float) -> None:
        """A sampler holds these groups, with so many sampled tokens. What an earlier incarnation says is void."""
        if incarnation != self._tickets.epoch_of(sampler_id):
            return
        for group_id, num_tokens in tokens.items():
            held = self._tickets.get(group_id)
            if held and held.sampler_id == sampler_id and self._tickets.has_owner(group_id):
                self._heartbeats.heard(group_id, now, num_tokens)

    def release_silent(self, staged: Container[str], now: float) -> int:
        """Release the tickets whose owners were not heard of for too long, to be issued again; how many there were.

        Those of `staged` groups, which have come in, are not. Until a ticket is issued again its owner may still bring
        the group, or be heard and keep it.
        """
        if not self._heartbeats.is_time_to_look(now):
            return 0
        self._heartbeats.keep_only({held.ticket.group_id for held in self._tickets})
        released = {held.ticket.group_id for held in self._tickets.released()}
        silent = [
            held
            for held in self._tickets
            if held.ticket.group_id not in staged
            and held.ticket.group_id not in released
            and self._heartbeats.is_silent(held.ticket, now)
        ]
        for held in silent:
            row = self._book.row(Kind.LOST, now, held.ticket.group_id)
            self._book.write(replace(row, sampler_id=held.sampler_id, owner_epoch=held.ticket.owner_epoch))
        return len(silent)

    def partial(self, facts: GroupFacts, data: bytes, now: float) -> str:
        """Keep what its owner has so far of a group in flight, unless it is kept already; why it cannot be kept."""
        why = self._why_not_kept(facts)
        if why:
            return why
        num_shared, earlier = self.shared_tokens(facts.group_id, data)
        if earlier and num_shared == facts.num_tokens:
            return ""
        row = replace(
            self._book.row(Kind.PARTIAL, now, facts.group_id),
            problem_id=facts.problem_id,
            sampler_id=facts.sampler_id,
            owner_epoch=facts.owner_epoch,
            num_tokens=facts.num_tokens,
            dropped_tokens=earlier - num_shared,
        )
        self._book.write(row, data)
        self._partials.keep(facts, data)
        if self._tickets.has_owner(facts.group_id):
            self._heartbeats.heard(facts.group_id, now, facts.num_tokens)
        return ""

    def _why_not_kept(self, facts: GroupFacts) -> str:
        if self._rules.config_hash not in (None, facts.config_hash):
            return config_changed(facts.config_hash, self._rules.config_hash)
        try:
            for version in facts.versions:
                self._lineage.age(version)
        except ValueError as error:
            return f"version: {error}"
        return ""

    def shared_tokens(self, group_id: str, data: bytes) -> tuple[int, int]:
        """Tokens that a record shares with the newest partial of its group, and all tokens of that partial."""
        partial = self._partials.get(group_id)
        if partial is None:
            return 0, 0
        return num_shared_tokens(batch_of_record(partial.data), batch_of_record(data)), partial.num_tokens

    def released(self, now: float) -> list[InFlight]:
        """Tickets to be issued again, but for those whose owner was heard of since they were given up."""
        return [
            held
            for held in self._tickets.released()
            if not self._tickets.is_lost(held.ticket.group_id) or self._heartbeats.is_silent(held.ticket, now)
        ]

    def lost_tokens(self, group_id: str) -> int:
        """Tokens that the owner of a ticket had beyond its newest partial when it was last heard: an estimate."""
        partial = self._partials.get(group_id)
        return max(0, self._heartbeats.num_tokens(group_id) - (partial.num_tokens if partial else 0))

    def issued(self, group_id: str) -> None:
        """A ticket has a new owner."""
        self._heartbeats.forget(group_id)
