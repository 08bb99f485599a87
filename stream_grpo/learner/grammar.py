"""The tokens that a grammar left to the sampler at every draw, found again from what was sampled. Only xgrammar.

B sequences, T tokens, V vocabulary. vLLM runs xgrammar over what it samples and sets the logits of all other tokens to
-inf. The same grammar over the same ids gives the same masks here, so that the learner's logprobs are of the
distribution that was sampled from, and a token that had no alternative has logprob 0 and no gradient.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray
from torch import Tensor

from stream_grpo.errors import ConfigError, GrammarError
from stream_grpo.learner.forward import Support
from stream_grpo.types import RolloutGroup


class Grammar:
    """A structural tag over the tokens of one model; every action begins in its first state."""

    def __init__(
        self,
        structural_tag: str,
        tokenizer: Any,
        *,
        vocab_size: int | None,
        end_token_ids: Iterable[int],
        calls: Sequence[str] = (),
    ) -> None:
        """`tokenizer`: of transformers; `vocab_size`: the width of the model's logits, None: that of the tokenizer;
        `calls`: whole actions that the model must be able to write.

        Raises ConfigError for a grammar that is none, a tokenizer that xgrammar does not take, marks of a call that are
        not in the text of their tokens, and tokens that cannot write one of `calls` or go on after an opening mark.
        """
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
            compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(structural_tag)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ConfigError(
                f"environment.grammar = true: grammar or tokenizer are not what xgrammar takes: {error}; use false, "
                f"or another environment or model"
            ) from error
        self._end_token_ids = sorted(end_token_ids)
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._end_token_ids)
        self._vocab_size = int(info.vocab_size)
        self._tokenizer = tokenizer
        self._words_1W: Any = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        tag = json.loads(structural_tag)
        for mark in [*_marks(tag, "begin"), *_marks(tag, "end")]:
            _require_text(mark, tokenizer)
        for mark in _marks(tag, "begin"):
            self._require_a_way_on(mark)
        for call in calls:
            self._require_writable(call, tokenizer)

    def _require_writable(self, call: str, tokenizer: Any) -> None:
        """Every token of a call, and its end after it."""
        self._matcher.reset()
        ids = tokenizer.encode(call, add_special_tokens=False)
        num_accepted = 0
        while num_accepted < len(ids) and self._accepts(ids[num_accepted]):
            num_accepted += 1
        is_whole = num_accepted == len(ids) and any(self._accepts(token_id) for token_id in self._end_token_ids)
        self._matcher.reset()
        if not is_whole:
            written = tokenizer.decode(ids[:num_accepted])
            raise ConfigError(
                f"environment.grammar = true: the tokens of this model cannot write the call {call!r}: after "
                f"{written!r} they have no way on; use false, or a call format that its tokens can write"
            )

    def _accepts(self, token_id: int) -> bool:
        return token_id < self._vocab_size and bool(self._matcher.accept_token(token_id))

    def _require_a_way_on(self, mark: str) -> None:
        self._matcher.reset()
        if not self._matcher.accept_string(mark):
            return
        self._matcher.fill_next_token_bitmask(self._words_1W)
        self._matcher.reset()
        if not bool((self._words_1W != 0).any()):
            raise ConfigError(
                f"environment.grammar = true: after {mark!r} no token of this model can follow in a valid call; use "
                f"false, or a call format that its tokens can write"
            )

    def check(self, groups: Iterable[RolloutGroup]) -> None:
        """Raise GrammarError for the first token of a valid rollout that this grammar does not leave to its draw.

        A recipe that clips or masks may get a finite loss of such a token, whose logprob is -inf, and learn from it.
        """
        for group in groups:
            for index, rollout in enumerate(group.rollouts):
                turn_T = np.where(rollout.loss_mask, rollout.turn, -1)
                if rollout.valid and (at := self._forbidden(rollout.token_ids, turn_T)) is not None:
                    raise GrammarError(
                        f"group {group.group_id}, rollout {index}: {self._named(rollout.token_ids, turn_T, at)}: the "
                        f"grammar does not allow it there, so that sampler {group.sampler_id} draws under another one "
                        f"(environment.grammar), or with another tokenizer; it needs the model folder, the environment "
                        f"and the version of xgrammar that the learner has"
                    )

    def _forbidden(self, ids_T: NDArray[Any], turn_T: NDArray[Any]) -> int | None:
        """Where the first one is in a sequence. What stands behind the end of an action has no mask, and is none."""
        for action in _actions(turn_T):
            self._matcher.reset()
            for at in action.tolist():
                if not self._accepts(int(ids_T[at])):
                    return int(at)
                if self._matcher.is_terminated():
                    break
        return None

    def _named(self, ids_T: NDArray[Any], turn_T: NDArray[Any], at: int) -> str:
        """A token in words: what it is, and what of its action stands before it."""
        before = [int(ids_T[i]) for i in range(at) if turn_T[i] == turn_T[at]]
        text, written = (self._tokenizer.decode(ids) for ids in ([int(ids_T[at])], before))
        return f"token {at}, id {int(ids_T[at])} ({text!r}), sampled after {written!r} in action {int(turn_T[at])}"

    def support(self, token_ids_BT: Tensor, turns_BT: Tensor) -> Support:
        """What each token was drawn from; the first mask, of all tokens, for those that nobody sampled.

        `turns_BT`: the action that a token is part of, -1 where it was not sampled. A token that the grammar does not
        allow, which `check` refuses, ends its action: it is outside of its mask, and what follows it has the first one.
        """
        ids_BT, turn_BT = token_ids_BT.cpu().numpy(), turns_BT.cpu().numpy()
        everything = np.full(self._words_1W.shape[1], -1, np.int32)
        masks = {everything.tobytes(): 0}
        index_BT = np.zeros(ids_BT.shape, np.int64)
        for row in range(len(ids_BT)):
            for action in _actions(turn_BT[row]):
                self._follow(ids_BT[row], action, index_BT[row], masks)
        words_MW = np.stack([np.frombuffer(words, np.int32) for words in masks])
        masks_MV = torch.from_numpy(_bits(words_MW, self._vocab_size)).to(token_ids_BT.device)
        return Support(masks_MV, torch.from_numpy(index_BT).to(token_ids_BT.device))

    def _follow(
        self, ids_T: NDArray[np.int64], action: NDArray[np.int64], index_T: NDArray[np.int64], masks: dict[bytes, int]
    ) -> None:
        self._matcher.reset()
        for at in action.tolist():
            self._matcher.fill_next_token_bitmask(self._words_1W)
            index_T[at] = masks.setdefault(self._words_1W.numpy().tobytes(), len(masks))
            if not self._matcher.accept_token(int(ids_T[at])) or self._matcher.is_terminated():
                return


def _actions(turn_T: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Where the tokens of each action are."""
    sampled = np.flatnonzero(turn_T >= 0)
    return np.split(sampled, np.flatnonzero(np.diff(turn_T[sampled])) + 1)


def _bits(words_MW: NDArray[np.int32], num: int) -> NDArray[np.bool_]:
    """Bit i of word w as element 32 w + i; words are little-endian, as xgrammar writes them."""
    bits_MB = np.unpackbits(words_MW.astype("<i4").view(np.uint8), axis=1, count=num, bitorder="little")
    bits: NDArray[np.bool_] = bits_MB.view(np.bool_)
    return bits


def _require_text(mark: str, tokenizer: Any) -> None:
    """A mark that an environment reads as it is written."""
    read = tokenizer.decode(
        tokenizer.encode(mark, add_special_tokens=False), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # A tokenizer may put a space before the first word, or take it away.
    if read.strip() != mark.strip():
        raise ConfigError(
            f"environment.grammar = true: the mark {mark!r} of a call is read back as {read!r}: this tokenizer has no "
            f"tokens for it, or special ones, which no environment sees; use other marks, or false"
        )


def _marks(tag: Any, side: Literal["begin", "end"]) -> list[str]:
    """Where a call begins or ends, of the tags with triggers in a structural tag."""
    if isinstance(tag, list):
        return [mark for part in tag for mark in _marks(part, side)]
    if not isinstance(tag, dict):
        return []
    if tag.get("type") == "triggered_tags":
        return [one[side] for one in tag["tags"] if isinstance(one[side], str)]
    return [mark for part in tag.values() for mark in _marks(part, side)]
