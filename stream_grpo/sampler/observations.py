"""What an environment says, as token ids: encoded once, and never together with what was sampled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from stream_grpo.config import Config
from stream_grpo.sampler.prompts import end_token_ids, load_tokenizer

# Stands for an action and for an observation while the template is taken apart; no template has it.
_ACTION, _OBSERVATION = "\x02action\x02", "\x02observation\x02"


class Observations:
    """From a text to the ids that follow an action: what stands before it, the text, what stands behind.

    In the text no special token is recognised, so that nothing an environment says can open a turn or end one.
    """

    def __init__(self, config: Config, tokenizer: Any = None) -> None:
        """`tokenizer`: as transformers gives it; by default that of the model folder.

        Raises ValueError for a chat template that cannot show an observation of `environment.observation_role`.
        """
        settings = config.environment
        tokenizer = load_tokenizer(config.model.path) if tokenizer is None else tokenizer
        self._max_tokens = settings.max_observation_tokens
        self._tokenizer = tokenizer
        before, after = settings.observation_prefix, settings.observation_suffix
        if config.model.prompt_format == "chat":
            before, after = _around(tokenizer, settings.observation_role)
        self._before, self._after = self._encode(before), self._encode(after)
        self._end_ids: Collection[int] = end_token_ids(config.model.path, tokenizer)
        if len(self._before) + len(self._after) >= self._max_tokens:
            raise ValueError(
                f"environment.max_observation_tokens = {self._max_tokens}: what stands around an observation has "
                f"{len(self._before) + len(self._after)} tokens; use more"
            )

    def token_ids(self, text: str, after: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids of an observation behind an action's ids `after`; at most `environment.max_observation_tokens`.

        A text that is longer loses its middle. An end token with which the template closes an action is left out where
        the action has one.
        """
        before = self._before
        if after and before and after[-1] in self._end_ids and before[0] in self._end_ids:
            before = before[1:]
        ids, room = self._encode(text, as_text=True), self._max_tokens - len(self._before) - len(self._after)
        if len(ids) > room:
            head = (room + 1) // 2
            ids = ids[:head] + ids[len(ids) - (room - head) :]
        return (*before, *ids, *self._after)

    def _encode(self, text: str, *, as_text: bool = False) -> list[int]:
        """The ids; `as_text`: no special token is recognised."""
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=as_text).input_ids)


def _around(tokenizer: Any, role: str) -> tuple[str, str]:
    """What the chat template writes between an action and an observation, and between that and the next action."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _ACTION},
        {"role": role, "content": _OBSERVATION},
    ]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # of the template's own language, which may raise anything
        raise ValueError(f"environment.observation_role = {role!r}: the chat template refuses it: {error}") from error
    between, found, after = text.partition(_ACTION)[2].partition(_OBSERVATION)
    if not found:
        raise ValueError(
            f"environment.observation_role = {role!r}: the chat template leaves such a message out; use another role"
        )
    return between, after
