"""The tokens that a grammar left to the sampler at every draw, found again from what was sampled. Only xgrammar.

B sequences, T tokens, V vocabulary. vLLM runs xgrammar over what it samples and sets the logits of all other tokens to
-inf. The same grammar over the same ids gives the same masks here, so that the learner's logprobs are of the
distribution that was sampled from, and a token that had no alternative has logprob 0 and no gradient.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray
from torch import Tensor

from stream_grpo.errors import ConfigError
from stream_grpo.learner.forward import Support

_BITS = 32


class Grammar:
    """A structural tag over the tokens of one model; every action begins in its first state."""

    def __init__(
        self, structural_tag: str, tokenizer: Any, *, vocab_size: int | None, end_token_ids: Iterable[int]
    ) -> None:
        """`tokenizer`: of transformers; `vocab_size`: the width of the model's logits, None: that of the tokenizer.

        Raises ConfigError for a grammar that is none, a tokenizer that xgrammar does not take, and tokens by which
        nothing can follow the opening mark of a call.
        """
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
            compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(structural_tag)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ConfigError(
                f"environment.grammar = true: grammar or tokenizer are not what xgrammar takes: {error}; use false, "
                f"or another environment or model"
            ) from error
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_token_ids))
        self._vocab_size = int(info.vocab_size)
        self._words_1W: Any = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        for mark in _opening_marks(json.loads(structural_tag)):
            self._require_a_way_on(mark)

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

    def support(self, token_ids_BT: Tensor, turns_BT: Tensor) -> Support:
        """What each token was drawn from; the first mask, of all tokens, for those that nobody sampled.

        `turns_BT`: the action that a token is part of, -1 where it was not sampled. A token that the grammar does not
        allow, which no sampler of this run samples, ends its action: it is outside of its mask, and what follows it
        has the first one.
        """
        ids_BT, turn_BT = token_ids_BT.cpu().numpy(), turns_BT.cpu().numpy()
        everything = np.full(self._words_1W.shape[1], -1, np.int32)
        masks = {everything.tobytes(): 0}
        index_BT = np.zeros(ids_BT.shape, np.int64)
        for row in range(len(ids_BT)):
            sampled = np.flatnonzero(turn_BT[row] >= 0)
            turns = turn_BT[row, sampled]
            for action in np.split(sampled, np.flatnonzero(np.diff(turns)) + 1):
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


def _bits(words_MW: NDArray[np.int32], num: int) -> NDArray[np.bool_]:
    """Bit i of word w as element 32 w + i."""
    bits_MWI = (words_MW[:, :, None] >> np.arange(_BITS, dtype=np.int32)) & 1
    bits: NDArray[np.bool_] = bits_MWI.reshape(len(words_MW), -1)[:, :num].astype(np.bool_)
    return bits


def _opening_marks(tag: Any) -> list[str]:
    """Where a call begins, of the tags with triggers in a structural tag."""
    if isinstance(tag, list):
        return [mark for part in tag for mark in _opening_marks(part)]
    if not isinstance(tag, dict):
        return []
    if tag.get("type") == "triggered_tags":
        return [one["begin"] for one in tag["tags"] if isinstance(one["begin"], str)]
    return [mark for part in tag.values() for mark in _opening_marks(part)]
