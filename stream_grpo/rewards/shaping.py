"""Terms that are added to a reward: length near the limit, repetition, poverty of words, truncation. Pure.

They read token ids as sampled, never text, and the step on the group's ticket decides which of them act: for every
rollout of the group, whenever it is scored. A rollout without a reward stays without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stream_grpo.config_rewards import Shaping
from stream_grpo.types import Decision, EndReason, RewardResult, Rollout, RolloutGroup

PREFIX = "shaping."
"""Before the name of a term in the components of a result."""


def shaped_group(group: RolloutGroup, shaping: Shaping, *, max_new_tokens: int) -> RolloutGroup:
    """The group with its rewards shaped by the step of its ticket. Raises ValueError where that has been done."""
    step = group.ticket_step
    # The trunk of a branching group counts for each of its rollouts, as it does for their limit.
    num_before = group.num_trunk_tokens
    results = [
        shaped(rollout, shaping, step=step, max_new_tokens=max_new_tokens, num_before=num_before)
        for rollout in group.rollouts
    ]
    if all(result is rollout.reward for result, rollout in zip(results, group.rollouts, strict=True)):
        return group
    rollouts = (replace(r, reward=result) for r, result in zip(group.rollouts, results, strict=True))
    return replace(group, rollouts=tuple(rollouts))


def shaped(rollout: Rollout, shaping: Shaping, *, step: int, max_new_tokens: int, num_before: int = 0) -> RewardResult:
    """The result of a rollout with every term that acts at `step` added to its reward and named in its components.

    `num_before`: tokens of its actions before those that are trained; they count for its length.
    Decision and evidence stay those of the verifier; left out for truncation, a rollout is `unknown` and says so.
    Raises ValueError where terms have been added before.
    """
    result = rollout.reward
    if any(name.startswith(PREFIX) for name in result.components):
        raise ValueError(f"the reward has been shaped before: {dict(result.components)}")
    if result.reward is None:
        return result
    if shaping.truncated == "leave_out" and rollout.end_reason is EndReason.LENGTH:
        evidence = f"left out, cut at {max_new_tokens} tokens; the verifier said {result.decision}: {result.evidence}"
        return replace(result, decision=Decision.UNKNOWN, reward=None, evidence=evidence)
    num_tokens = num_before + rollout.num_target_tokens
    terms = _terms(rollout, shaping, step=step, num_tokens=num_tokens, max_new_tokens=max_new_tokens)
    if not terms:
        return result
    components = {**result.components, **{PREFIX + name: value for name, value in terms.items()}}
    return replace(result, reward=result.reward + sum(terms.values()), components=components)


def overlong(num_tokens: int, *, max_tokens: int, cache: int) -> float:
    """0 up to max_tokens - cache, falling linearly to -1 at max_tokens and beyond.

    ((max_tokens - cache) - n) / cache in between: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).
    """
    if not 0 < cache <= max_tokens:
        raise ValueError(f"cache {cache}: expected above 0 and at most max_tokens {max_tokens}")
    return min(0.0, max(-1.0, (max_tokens - cache - num_tokens) / cache))


def repeated_share(token_ids: Sequence[int], *, n: int) -> float:
    """1 - distinct n-grams / n-grams: the share that stood there before; 0 for fewer than n + 1 tokens.

    The complement of distinct-n (Li et al., arXiv 1510.03055).
    """
    num_grams = len(token_ids) - n + 1
    if num_grams < 2:
        return 0.0
    return 1 - len({tuple(token_ids[i : i + n]) for i in range(num_grams)}) / num_grams


def type_token_ratio(token_ids: Sequence[int], *, window: int) -> float:
    """Mean over all windows of distinct tokens / window; of a shorter response over all of it, 1 for an empty one.

    The moving average does not fall with length, as the plain ratio does (MATTR, Covington and McFall, 2010).
    """
    size = min(window, len(token_ids))
    if size == 0:
        return 1.0
    counts = Counter(token_ids[:size])
    total = len(counts)
    for leaves, enters in zip(token_ids, token_ids[size:], strict=False):
        counts[leaves] -= 1
        if not counts[leaves]:
            del counts[leaves]
        counts[enters] += 1
        total += len(counts)
    return total / (size * (len(token_ids) - size + 1))


def _sampled_ids(rollout: Rollout) -> list[int]:
    ids: list[int] = rollout.token_ids[rollout.loss_mask].tolist()
    return ids


def _terms(rollout: Rollout, shaping: Shaping, *, step: int, num_tokens: int, max_new_tokens: int) -> dict[str, float]:
    """Every term that acts at this step, 0 or less, by name."""
    terms: dict[str, float] = {}
    if shaping.overlong_tokens is not None:
        penalty = overlong(num_tokens, max_tokens=max_new_tokens, cache=shaping.overlong_tokens)
        terms["overlong"] = shaping.overlong_weight * penalty
    if shaping.repetition_weight and step >= shaping.repetition_from_step:
        share = repeated_share(_sampled_ids(rollout), n=shaping.repetition_ngram)
        terms["repetition"] = -shaping.repetition_weight * share
    if shaping.type_token_weight and step >= shaping.type_token_from_step:
        ratio = type_token_ratio(_sampled_ids(rollout), window=shaping.type_token_window)
        lack = max(0.0, 1 - ratio / shaping.type_token_floor)
        terms["type_token"] = -shaping.type_token_weight * lack
    return terms
