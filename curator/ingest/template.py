"""How many tokens a prompt has once the chat template is applied, from a tokenizer's folder alone.

The template is rendered as the transformers library does it, with jinja2; that library itself is not needed.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

from curator.errors import PoolError
from curator.ingest.columns import Prompt

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """The tokenizer of a folder, and its chat template where it has one."""

    def __init__(self, folder: Path) -> None:
        """Raises PoolError where the folder has no tokenizer.json, or a package is missing."""
        self._folder = folder
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise PoolError(f"--tokenizer {folder}: the package tokenizers is not installed") from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise PoolError(f"--tokenizer {folder}: no tokenizer.json there; name the folder of a model or tokenizer")
        self._tokenizer: Any = Tokenizer.from_file(str(path))
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        self._special = {name: _content(config[name]) for name in _SPECIAL if config.get(name)}
        source = _template_source(folder, config)
        self._template = None if source is None else _compiled(source, folder)

    def render(self, prompt: Prompt) -> str:
        """The text that is sampled from; a prompt of text stands as it is where there is no template.

        Raises ValueError where the template refuses the messages, or messages have no template.
        """
        if self._template is None:
            if not isinstance(prompt, str):
                raise ValueError("chat messages, and the tokenizer has no chat template")
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except Exception as error:
            # A template is a program of somebody else's; whatever it raises is about these messages.
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return text

    def num_tokens(self, prompt: Prompt) -> int:
        """Tokens of the rendered prompt; the begin token counts once, whoever adds it. Raises ValueError."""
        text = self.render(prompt)
        has_begin = bool(self._special.get("bos_token")) and text.startswith(self._special["bos_token"])
        return len(self._tokenizer.encode(text, add_special_tokens=not has_begin and self._template is None).ids)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        # Several templates by name; the others are for tools and documents.
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source


def _compiled(source: str, folder: Path) -> Any:
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise PoolError(f"--tokenizer {folder}: its chat template needs the package jinja2") from error
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise PoolError(f"--tokenizer {folder}: its chat template cannot be read: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
