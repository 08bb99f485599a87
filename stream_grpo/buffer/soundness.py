"""What would make a gradient wrong without a word: the learner's checks of a rollout, on a whole record at once. Pure.

Arrays are flat over the tokens of all rollouts. A rollout that is not valid enters no gradient and is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOGPROB_TOLERANCE = 1e-6
"""How far above 0 rounding may carry a logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a record, N in all, of R rollouts."""

    token_ids: NDArray[np.int32]
    """[N]"""
    loss_mask: NDArray[np.bool_]
    """[N]"""
    behavior_logprobs: NDArray[np.float32]
    """[N]"""
    version_step: NDArray[np.int32]
    """[N]"""
    rollout: NDArray[np.int64]
    """[N] which rollout a token is of."""
    position: NDArray[np.int64]
    """[N] index of a token in its rollout."""
    lengths: NDArray[np.int64]
    """[R] tokens of each rollout."""
    num_prompt: NDArray[np.int64]
    """[R] tokens of each prompt."""


def fault_of(tokens: Tokens, valid: NDArray[np.bool_], vocab_size: int | None = None) -> str:
    """What is wrong with the valid rollouts of a record, the rollout named; empty where nothing is.

    `valid`: [R]. `vocab_size` None takes any id from 0.
    """
    lengths, num_prompt = tokens.lengths, tokens.num_prompt
    halves = valid & ((num_prompt <= 0) | (num_prompt >= lengths))
    if halves.any():
        r = int(halves.argmax())
        found = f"rollout {r} has {num_prompt[r]} prompt tokens of {lengths[r]}"
        return f"tokens: {found}, a prompt and a response are needed"
    is_valid = valid[tokens.rollout]
    is_target = tokens.loss_mask & is_valid
    logprobs, ids = tokens.behavior_logprobs, tokens.token_ids
    # Written so that NaN is outside.
    is_logprob = (logprobs <= LOGPROB_TOLERANCE) & (logprobs > -np.inf)
    is_id = (ids >= 0) & (ids < (np.iinfo(np.int32).max if vocab_size is None else vocab_size))
    for wrong, name, values, what in (
        (is_target & (tokens.position < num_prompt[tokens.rollout]), "loss mask", None, "is of the prompt and set"),
        (is_target & (tokens.version_step < 0), "versions", None, "is sampled and of no policy version"),
        (is_target & ~is_logprob, "logprobs", logprobs, "expected finite and at most 0"),
        (is_valid & ~is_id, "token ids", ids, f"outside the vocabulary of {vocab_size or 'any size'}"),
    ):
        if wrong.any():
            return _sentence(tokens, int(wrong.argmax()), name, values, what)
    return ""


def _sentence(tokens: Tokens, index: int, name: str, values: NDArray[Any] | None, what: str) -> str:
    value = "" if values is None else f" is {values[index]},"
    return f"{name}: token {tokens.position[index]} of rollout {tokens.rollout[index]}{value} {what}"
