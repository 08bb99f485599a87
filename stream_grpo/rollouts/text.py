"""Groups as a person reads them, and as plain values. Pure: the text of tokens comes from an argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from stream_grpo.buffer.ledger import Ledger
from stream_grpo.rollouts.views import GroupLine
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import PolicyVersion, Rollout

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""

COLUMNS = ("group", "problem", "domain", "state", "why", "age", "reward", "spread", "tokens", "sampler", "came in")
NUMBERS = frozenset({"age", "reward", "spread", "tokens"})
"""Columns that are set flush right."""
ACCOUNT_COLUMNS = ("fate", "groups", "unique tokens", "share")


def cells(line: GroupLine) -> tuple[str, ...]:
    """A group as the cells of COLUMNS."""
    view, facts = line.view, line.facts
    return (
        view.group_id,
        view.problem_id,
        facts.domain,
        view.state,
        view.reason,
        _optional(line.age),
        _optional(line.reward_mean, ".3f"),
        f"{facts.spread:.3f}",
        f"{view.num_tokens}",
        view.sampler_id,
        when(view.came_at_s),
    )


def plain(line: GroupLine) -> dict[str, Any]:
    """A group as plain values."""
    view, facts = line.view, line.facts
    return {
        "group_id": view.group_id,
        "problem_id": view.problem_id,
        "domain": facts.domain,
        "state": view.state,
        "reason": view.reason,
        "age": line.age,
        "rewards": list(facts.rewards),
        "num_passed": facts.num_passed,
        "num_failed": facts.num_failed,
        "num_unscored": facts.num_unscored,
        "num_truncated": facts.num_truncated,
        "num_tokens": view.num_tokens,
        "versions": sorted(map(list, facts.versions)),
        "made": list(view.made) if view.made else None,
        "sampler_id": view.sampler_id,
        "came_at_s": view.came_at_s,
        "seconds": facts.seconds,
    }


def when(unix_s: float) -> str:
    """Local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _optional(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def account_rows(ledger: Ledger) -> Iterator[tuple[str, str, str, str]]:
    """The account as rows of ACCOUNT_COLUMNS, the sum last."""
    fields = ledger.as_fields()
    groups, tokens = dict(fields["groups"]), dict(fields["tokens"])
    groups |= {"buffered": groups.pop("accepted") + groups.pop("leased"), "in_flight": groups.pop("ticketed")}
    generated = tokens.pop("generated")
    for fate, count in tokens.items():
        num_groups = groups.pop(fate, None)
        yield fate, _count(num_groups), f"{count:,}", f"{count / generated:.1%}" if generated else "-"
    total = sum(count for state, count in fields["groups"].items() if state != "refused")
    yield "in all", f"{total:,}", f"{generated:,}", ""


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def group_text(line: GroupLine, data: bytes, decode: Decode, *, with_tokens: bool = False) -> Iterator[tuple[str, str]]:
    """A group as (style, text) blocks: what it is, the prompt, then every completion with its reward and evidence.

    `with_tokens`: a row for every token of a response, too.
    """
    group, view = decode_group(data), line.view
    yield "title", f"group {group.group_id}  {view.state}{f': {view.reason}' if view.reason else ''}"
    yield "fact", f"problem {group.problem_id}  domain {group.domain or '-'}  sampler {group.sampler_id}"
    at = f" at learner {view.learner}" if view.learner else " now"
    made = f", trained into {view.made}" if view.made else ""
    yield "fact", f"versions {spans(line.facts.versions)}  age {_optional(line.age)}{at}{made}"
    yield (
        "fact",
        (
            f"dispatched {when(group.dispatched_at_s)}, took {line.facts.seconds:.1f} s  "
            f"configuration {group.config_hash}"
        ),
    )
    yield "fact", f"reward mean {_optional(line.reward_mean, '.3f')}, spread {line.facts.spread:.3f}"
    yield "heading", "prompt"
    first = group.rollouts[0]
    yield "text", decode(first.token_ids[: first.num_prompt_tokens].tolist())
    for number, rollout in enumerate(group.rollouts):
        yield "heading", _heading(number, rollout)
        for style, start, end in _parts(rollout):
            yield style, decode(rollout.token_ids[start:end].tolist())
        yield "fact", _logprobs(rollout, decode)
        if rollout.reward.evidence:
            yield "fact", f"{rollout.reward.verifier} {rollout.reward.verifier_version}: {rollout.reward.evidence}"
        if rollout.reward.components:
            yield "fact", "components " + ", ".join(f"{k} {v:g}" for k, v in rollout.reward.components.items())
        if with_tokens:
            yield "tokens", "\n".join(_token_rows(rollout, decode))


def _heading(number: int, rollout: Rollout) -> str:
    reward = rollout.reward
    mixed = "" if rollout.mixed_context_from is None else ", partly on a KV cache of older weights"
    num_before = rollout.num_sampled_tokens - rollout.num_target_tokens
    trunk = f" ({num_before} of the trunk of its group, not trained)" if num_before else ""
    return (
        f"rollout {number}  {reward.decision}  reward {_optional(reward.reward, 'g')}  "
        f"{rollout.num_sampled_tokens} tokens{trunk}, ended by {rollout.end_reason}  "
        f"versions {spans(rollout.versions())}{mixed}"
    )


def spans(versions: frozenset[PolicyVersion] | set[PolicyVersion]) -> str:
    """Versions as first to last."""
    if not versions:
        return "-"
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first} to {last}"


def _parts(rollout: Rollout) -> Iterator[tuple[str, int, int]]:
    """The stretches of a response with their styles: `text` that is trained, `trunk` that was sampled for the group and
    is not, and `context` in between."""
    start = rollout.num_prompt_tokens
    is_trained, is_sampled = rollout.loss_mask, rollout.is_sampled
    kind = is_trained.astype(np.int8) + is_sampled
    edges = (np.flatnonzero(kind[start + 1 :] != kind[start:-1]) + 1 + start).tolist()
    bounds = [start, *edges, len(rollout.token_ids)]
    for begin, end in pairwise(bounds):
        if begin < end:
            yield "text" if is_trained[begin] else "trunk" if is_sampled[begin] else "context", begin, end


def _logprobs(rollout: Rollout, decode: Decode) -> str:
    sampled = np.flatnonzero(rollout.is_sampled)
    if not len(sampled):
        return "no sampled token"
    logprobs = rollout.behavior_logprobs[sampled]
    lowest = int(sampled[logprobs.argmin()])
    text = decode([int(rollout.token_ids[lowest])])
    return (
        f"logprob mean {logprobs.mean():.3f}, lowest {logprobs.min():.3f} at token "
        f"{lowest - rollout.num_prompt_tokens} {text!r}"
    )


def _token_rows(rollout: Rollout, decode: Decode) -> Iterator[str]:
    is_sampled = rollout.is_sampled
    for at in range(rollout.num_prompt_tokens, len(rollout.token_ids)):
        token_id = int(rollout.token_ids[at])
        version = PolicyVersion(int(rollout.version_branch[at]), int(rollout.version_step[at]))
        if is_sampled[at]:
            known = f"{rollout.behavior_logprobs[at]:9.4f}  {version!s:>8}"
        else:
            known = f"{'context':>9}  {'':>8}"
        note = "" if rollout.loss_mask[at] or not is_sampled[at] else "  trunk, not trained"
        yield f"{at - rollout.num_prompt_tokens:>5}  {token_id:>7}  {known}  {decode([token_id])!r}{note}"
