"""What would make a gradient wrong without a word: the learner's checks of a rollout, on its arrays. Pure.

A rollout that is not valid enters no gradient and is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOGPROB_TOLERANCE = 1e-6
"""How far above 0 rounding may carry a logprob."""
_MAX_ID = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a rollout: T of them, prompt and response together."""

    rollout: int
    """Its number in the group."""
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
    num_prompt: int


def fault_of(tokens: Tokens, vocab_size: int | None = None) -> str:
    """What is wrong with a valid rollout, which is named; empty where nothing is.

    `vocab_size` None takes any id from 0.
    """
    num_tokens, num_prompt = len(tokens.token_ids), tokens.num_prompt
    if not 0 < num_prompt < num_tokens:
        found = f"rollout {tokens.rollout} has {num_prompt} prompt tokens of {num_tokens}"
        return f"tokens: {found}, a prompt and a response are needed"
    mask, logprobs, ids = tokens.loss_mask, tokens.behavior_logprobs, tokens.token_ids
    most = _MAX_ID if vocab_size is None else vocab_size
    # Written so that NaN is outside.
    is_logprob = (logprobs <= LOGPROB_TOLERANCE) & (logprobs > -np.inf)
    # As unsigned numbers those below 0 are above every other.
    is_id = ids.view(np.uint32) < most
    checks: tuple[tuple[NDArray[np.bool_], str, NDArray[Any] | None, str], ...] = (
        (mask[:num_prompt], "loss mask", None, "is of the prompt and set"),
        (mask & (tokens.version_step < 0), "versions", None, "is sampled and of no policy version"),
        (mask & ~is_logprob, "logprobs", logprobs, "expected finite and at most 0"),
        (~is_id, "token ids", ids, f"outside the vocabulary of {vocab_size or 'any size'}"),
    )
    for wrong, name, values, what in checks:
        if wrong.any():
            position = int(wrong.argmax())
            value = "" if values is None else f" is {values[position]},"
            return f"{name}: token {position} of rollout {tokens.rollout}{value} {what}"
    return ""
