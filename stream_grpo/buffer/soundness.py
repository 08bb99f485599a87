"""What would make a gradient wrong without a word: the learner's checks of a rollout, on its arrays. Pure.

A rollout that is not valid enters no gradient and is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOGPROB_TOLERANCE = 1e-6
"""How far above 0 rounding may carry a logprob."""
_MAX_ID = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a rollout, T of them, prompt and response together; or those of all rollouts of a group in turn."""

    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T]"""
    behavior_logprobs: NDArray[np.float32]
    """[T]"""
    version_branch: NDArray[np.int32]
    """[T]"""
    version_step: NDArray[np.int32]
    """[T]"""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One of the rollouts of a group."""

    number: int
    """In the group."""
    num_prompt: int
    tokens: Tokens


def fault_of(group: Tokens, rollouts: Iterable[Rollout], vocab_size: int | None = None) -> str:
    """What is wrong with the first of the valid `rollouts` that is unsound; empty where none is.

    `group`: the tokens of all rollouts. `vocab_size` None takes any id from 0.
    """
    # One look at the whole group; which rollout it is matters only where something is wrong.
    looks_sound = not _token_fault(group, vocab_size)
    for rollout in rollouts:
        fault = _prompt_fault(rollout) or ("" if looks_sound else _token_fault(rollout.tokens, vocab_size))
        if fault:
            return fault.format(rollout=f"rollout {rollout.number}")
    return ""


def _prompt_fault(rollout: Rollout) -> str:
    num_tokens, num_prompt = len(rollout.tokens.token_ids), rollout.num_prompt
    if not 0 < num_prompt < num_tokens:
        found = f"{{rollout}} has {num_prompt} prompt tokens of {num_tokens}"
        return f"tokens: {found}, a prompt and a response are needed"
    wrong = rollout.tokens.loss_mask[:num_prompt]
    return f"loss mask: token {int(wrong.argmax())} of {{rollout}} is of the prompt and set" if wrong.any() else ""


def _token_fault(tokens: Tokens, vocab_size: int | None) -> str:
    mask, logprobs, ids = tokens.loss_mask, tokens.behavior_logprobs, tokens.token_ids
    # Written so that NaN is outside.
    is_logprob = (logprobs <= LOGPROB_TOLERANCE) & (logprobs > -np.inf)
    # As unsigned numbers those below 0 are above every other.
    is_id = ids.view(np.uint32) < (_MAX_ID if vocab_size is None else vocab_size)
    for right, name, values, what in (
        (~mask | (tokens.version_step >= 0), "versions", None, "is sampled and of no policy version"),
        (~mask | is_logprob, "logprobs", logprobs, "expected finite and at most 0"),
        (is_id, "token ids", ids, f"outside the vocabulary of {vocab_size or 'any size'}"),
    ):
        if not right.all():
            position = int(right.argmin())
            value = "" if values is None else f" is {values[position]},"
            return f"{name}: token {position} of {{rollout}}{value} {what}"
    return ""
