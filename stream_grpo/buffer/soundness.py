"""What would make a gradient wrong without a word: the learner's checks of a rollout, on its arrays. Pure.

A rollout that is not valid enters no gradient and is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

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

    def of(self, rollout: Rollout) -> Tokens:
        """Those of one rollout of the group."""
        part = slice(rollout.start, rollout.end)
        return Tokens(**{field.name: getattr(self, field.name)[part] for field in fields(self)})


class Rollout(NamedTuple):
    """One of the rollouts of a group, and where its tokens lie among those of all."""

    number: int
    """In the group."""
    num_prompt: int
    start: int
    end: int


def fault_of(group: Tokens, rollouts: Iterable[Rollout], vocab_size: int | None = None) -> str:
    """What is wrong with the first of the valid `rollouts` that is unsound; empty where none is.

    `group`: the tokens of all rollouts. `vocab_size` None takes any id from 0.
    """
    # One look at the whole group; which rollout it is matters only where something is wrong.
    looks_sound = not _token_fault(group, vocab_size)
    for rollout in rollouts:
        fault = _prompt_fault(rollout, group.loss_mask)
        if not (fault or looks_sound):
            fault = _token_fault(group.of(rollout), vocab_size)
        if fault:
            return fault.format(rollout=f"rollout {rollout.number}")
    return ""


def _prompt_fault(rollout: Rollout, loss_mask: NDArray[np.bool_]) -> str:
    num_tokens, num_prompt = rollout.end - rollout.start, rollout.num_prompt
    if not 0 < num_prompt < num_tokens:
        found = f"{{rollout}} has {num_prompt} prompt tokens of {num_tokens}"
        return f"tokens: {found}, a prompt and a response are needed"
    wrong = loss_mask[rollout.start : rollout.start + num_prompt]
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
