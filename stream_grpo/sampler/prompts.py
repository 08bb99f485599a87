"""Prompts to token ids, once per group, and sampled ids back to text for a verifier."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from curator.schema import Problem
from stream_grpo.config import Config


class PromptRefused(ValueError):
    """A problem whose prompt cannot be sampled; the message names it and the numbers."""


class Prompts:
    """The tokenizer of a run with its limits.

    A prompt has exactly one begin token where the tokenizer has that habit or the chat template writes it, whichever
    of the two does, and none otherwise.
    """

    def __init__(self, config: Config, tokenizer: Any = None) -> None:
        """`tokenizer`: as transformers gives it; by default that of the model folder.

        Raises ValueError for chat prompts where the tokenizer has no template.
        """
        tokenizer = load_tokenizer(config.model.path) if tokenizer is None else tokenizer
        if config.model.prompt_format == "chat" and not getattr(tokenizer, "chat_template", None):
            raise ValueError("model.prompt_format = 'chat': the tokenizer has no chat template")
        self._tokenizer, self._config = tokenizer, config
        self._decode = _decoder(tokenizer)
        begin = tokenizer.bos_token_id
        self._begin_ids: list[int] = [] if begin is None else [begin]
        self._adds_begin = bool(self._begin_ids) and tokenizer("").input_ids[:1] == self._begin_ids
        self.fingerprint = _fingerprint(tokenizer, config.model.prompt_format)
        """Of tokenizer and chat template."""

    def token_ids(self, problem: Problem) -> tuple[int, ...]:
        """The ids that are sampled from, and nothing else.

        Raises PromptRefused for a prompt without tokens, without the right form, or too long for a whole response.
        """
        text = self._text(problem)
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        while ids[:1] == self._begin_ids and ids[1:2] == self._begin_ids:
            ids = ids[1:]
        if self._adds_begin and ids[:1] != self._begin_ids:
            ids = self._begin_ids + ids
        self._check_length(problem, len(ids))
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self._decode(token_ids)

    def _text(self, problem: Problem) -> str:
        if self._config.model.prompt_format == "text":
            if not isinstance(problem.prompt, str):
                raise PromptRefused(f"problem {problem.problem_id}: chat messages where prompts are text")
            return problem.prompt
        messages = problem.prompt
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return text

    def _check_length(self, problem: Problem, num_tokens: int) -> None:
        limit = self._config.prompt_limit_tokens
        if num_tokens == 0:
            raise PromptRefused(f"problem {problem.problem_id}: the prompt has no tokens")
        if num_tokens > limit:
            raise PromptRefused(
                f"problem {problem.problem_id}: a prompt of {num_tokens} tokens, at most {limit} fit (beside "
                f"sampler.max_new_tokens = {self._config.sampler.max_new_tokens} in model.max_length_tokens = "
                f"{self._config.model.max_length_tokens})"
            )


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer  # takes seconds, which a caller with a tokenizer of its own saves

    return AutoTokenizer.from_pretrained(model_dir)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Ids to text without special tokens, as `tokenizer.decode` has it without clean-up.

    What stands between that call and the library that decodes takes twice as long as decoding a short response.
    """
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer)._decode is PreTrainedTokenizerFast._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def end_token_ids(model_dir: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's own, and those of the model's two configuration files."""
    found: set[int | None] = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = model_dir / name
        configured = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found |= set(configured) if isinstance(configured, list) else {configured}
    return frozenset(token_id for token_id in found if token_id is not None)


def _fingerprint(tokenizer: Any, prompt_format: str) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        str(getattr(tokenizer, "chat_template", None)) if prompt_format == "chat" else "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
