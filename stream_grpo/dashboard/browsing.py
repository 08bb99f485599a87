"""Rollouts for the page: groups as a list; one with prompt, completions and the age of every token. Plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stream_grpo.dashboard.facts import Settings, Stamp, stamp_of
from stream_grpo.errors import ConfigError
from stream_grpo.rollouts.missing import what_is_missing
from stream_grpo.rollouts.text import plain
from stream_grpo.rollouts.views import Filters, groups_with, journal_of, newest_lines
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import Forks, PolicyVersion, Rollout, policy_age

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""
PAGE_GROUPS = 50
LIST_S = 10.0
"""What a list may take: a filter by reward reads the record of every group."""
MAX_SPANS = 1000
"""Stretches of one response that are shown apart; what comes after is one more."""


def groups_page(
    run_dir: Path, filters: Filters, limit: int = PAGE_GROUPS, timer: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """The newest groups that pass, the newest first; whether the time was over first; what is missing of the journal.

    Raises ConfigError where there is no journal, JournalError where it is damaged.
    """
    directory = journal_of(run_dir)
    until = timer() + LIST_S
    found = [plain(line) for line in newest_lines(directory, filters, limit, lambda: timer() > until)]
    is_cut = len(found) < limit and timer() > until
    return {"groups": found[::-1], "is_cut": is_cut, "missing": what_is_missing(directory)}


def group_page(run_dir: Path, group_id: str, decode: Decode | None) -> dict[str, Any]:
    """One group with its text. Raises ConfigError where there is none of this id, JournalError for damage."""
    groups = groups_with(journal_of(run_dir), group_id)
    view = groups.views.get(group_id)
    line = groups.line(view) if view else None
    if view is None or line is None:
        raise ConfigError(f"group {group_id}: no such group in {run_dir.name}, or its segment has left the disk")
    group = decode_group(groups.data(view))
    decode_or_ids = decode or _as_ids
    age_of = _age_against(view.learner or groups.lineage.learner, groups.lineage.forks)
    first = group.rollouts[0]
    return plain(line) | {
        "prompt": decode_or_ids(first.token_ids[: first.num_prompt_tokens].tolist()),
        "is_text": decode is not None,
        "learner": str(view.learner or groups.lineage.learner),
        "rollouts": [rollout_page(rollout, decode_or_ids, age_of) for rollout in group.rollouts],
    }


def rollout_page(rollout: Rollout, decode: Decode, age_of: Callable[[PolicyVersion], int | None]) -> dict[str, Any]:
    """One completion: its reward with evidence, and its text in stretches of one version."""
    reward, sampled = rollout.reward, rollout.behavior_logprobs[rollout.is_sampled]
    return {
        "decision": reward.decision.value,
        "reward": reward.reward,
        "verifier": f"{reward.verifier} {reward.verifier_version}".strip(),
        "evidence": reward.evidence,
        "components": dict(reward.components),
        "end_reason": rollout.end_reason.value,
        "num_tokens": rollout.num_sampled_tokens,
        "logprob_mean": float(sampled.mean()) if len(sampled) else None,
        "spans": list(_spans(rollout, decode, age_of)),
    }


def _spans(rollout: Rollout, decode: Decode, age_of: Callable[[PolicyVersion], int | None]) -> Iterator[dict[str, Any]]:
    """The response in stretches: of tokens that one version sampled on one kind of cache, or of context.

    The trunk of a branching group is sampled and not trained.
    """
    ids, sampled = rollout.token_ids.tolist(), rollout.is_sampled
    before = 0
    for start, end in pairwise(_edges(rollout)):
        # What these tokens add to the text of those before: alone, a first one may lose its space.
        text = decode(ids[before:end])[len(decode(ids[before:start])) :]
        before = start
        is_sampled = bool(sampled[start])
        version = PolicyVersion(int(rollout.version_branch[start]), int(rollout.version_step[start]))
        mixed_from = rollout.mixed_context_from
        yield {
            "text": text,
            "num_tokens": end - start,
            "version": str(version) if is_sampled else None,
            "age": age_of(version) if is_sampled else None,
            "is_trained": bool(rollout.loss_mask[start]),
            "mixed": is_sampled and mixed_from is not None and start >= mixed_from,
        }


def _edges(rollout: Rollout) -> list[int]:
    """Where stretches of the response begin, and where the last one ends."""
    start, size = rollout.num_prompt_tokens, len(rollout.token_ids)
    changes = np.zeros(size, np.bool_)
    for of_token in (rollout.loss_mask, rollout.version_branch, rollout.version_step):
        changes[1:] |= of_token[1:] != of_token[:-1]
    if rollout.mixed_context_from is not None and rollout.mixed_context_from < size:
        changes[rollout.mixed_context_from] = True
    inside = (np.flatnonzero(changes[start + 1 :]) + start + 1).tolist()[: MAX_SPANS - 1]
    return [start, *inside, size] if size > start else []


def _age_against(learner: PolicyVersion, forks: Forks) -> Callable[[PolicyVersion], int | None]:
    def age(version: PolicyVersion) -> int | None:
        if version.branch == learner.branch and version > learner:
            return 0  # weights that were published before their step was reported
        try:
            return policy_age(version, learner, forks)
        except ValueError:
            return None

    return age


def _as_ids(token_ids: Sequence[int]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)


def find_decoder(run_dir: Path) -> Decode | None:
    """How the tokenizer of a run reads tokens; None where there is no `tokenizer.json` of it."""
    model = Settings.read(run_dir).model
    for folder in (model, run_dir / "model"):
        if folder is not None and (path := folder / "tokenizer.json").is_file():
            return _decoder(path, stamp_of(path))
    return None


@lru_cache(maxsize=8)
def _decoder(path: Path, stamp: Stamp) -> Decode | None:
    """The decoder of a tokenizer's file, loaded once for each `stamp`: a large vocabulary takes a second."""
    try:
        from tokenizers import Tokenizer  # comes with the trainer, which the page does not need
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def filters_of(query: Mapping[str, str]) -> Filters:
    """The filters that a request names. Raises ConfigError for a value that is none."""
    return Filters(
        state=query.get("fate") or None,
        problem=query.get("problem") or None,
        domain=query.get("domain") or None,
        step=_number(query, "step", int),
        min_reward=_number(query, "min_reward", float),
        max_reward=_number(query, "max_reward", float),
    )


def _number(query: Mapping[str, str], name: str, of: Callable[[str], Any]) -> Any:
    text = query.get(name, "").strip()
    try:
        return of(text) if text else None
    except ValueError:
        raise ConfigError(f"{name} = {text[:40]!r}: expected a number") from None
