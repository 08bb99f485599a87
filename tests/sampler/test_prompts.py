"""Prompts become ids once, with one begin token; too long a prompt is refused with its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.sampler.prompts import PromptRefused, Prompts, end_token_ids

BEGIN, END = 0, 1
TEMPLATE = "<s>{% for message in messages %}u{{ message.content }}{% endfor %}a"


def tokenizer(*, adds_begin: bool = True, template: str | None = None) -> Any:
    """Ids: <s> 0, </s> 1, then a, b, ... z from 2."""
    vocab = {"<s>": BEGIN, "</s>": END} | {chr(ord("a") + i): i + 2 for i in range(26)}
    backend = Tokenizer(WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = Split("", "isolated")
    if adds_begin:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


def config(prompt_format: str = "text", path: str = "m") -> Config:
    model = {"path": path, "max_length_tokens": 8, "prompt_format": prompt_format}
    return parse({"model": model, "sampler": {"max_new_tokens": 4, "group_size": 2}}, source="test")


def problem(prompt: Any) -> Problem:
    return Problem(problem_id="p9", prompt=prompt, answer="", verifier="exact")


def test_a_prompt_gets_the_begin_token_that_its_tokenizer_adds() -> None:
    # a = 2, c = 4
    assert Prompts(config(), tokenizer()).token_ids(problem("ac")) == (BEGIN, 2, 4)
    assert Prompts(config(), tokenizer(adds_begin=False)).token_ids(problem("ac")) == (2, 4)


@pytest.mark.parametrize("adds_begin", [True, False])
def test_c18_template_and_tokenizer_together_write_one_begin_token(adds_begin: bool) -> None:
    chat = Prompts(config("chat"), tokenizer(adds_begin=adds_begin, template=TEMPLATE))
    # <s> u b a = 0, 22, 3, 2
    expected = (BEGIN, 22, 3, 2)
    assert chat.token_ids(problem(({"role": "user", "content": "b"},))) == expected
    assert chat.token_ids(problem("b")) == expected


def test_a_begin_token_in_the_text_is_not_doubled() -> None:
    assert Prompts(config(), tokenizer()).token_ids(problem("<s>ac")) == (BEGIN, 2, 4)
    assert Prompts(config(), tokenizer()).token_ids(problem("<s><s>ac")) == (BEGIN, 2, 4)


def test_a_prompt_too_long_is_refused_by_id_with_the_numbers() -> None:
    prompts = Prompts(config(), tokenizer())
    # 8 tokens in all, 4 of the response: 4 for the prompt, the begin token included.
    assert len(prompts.token_ids(problem("abc"))) == 4
    with pytest.raises(PromptRefused, match=r"problem p9: a prompt of 5 tokens, at most 4 fit"):
        prompts.token_ids(problem("abcd"))


def test_prompts_of_the_wrong_form_are_refused() -> None:
    with pytest.raises(PromptRefused, match="p9: the prompt has no tokens"):
        Prompts(config(), tokenizer(adds_begin=False)).token_ids(problem(""))
    with pytest.raises(PromptRefused, match="chat messages where prompts are text"):
        Prompts(config(), tokenizer()).token_ids(problem(({"role": "user", "content": "b"},)))
    with pytest.raises(ValueError, match="no chat template"):
        Prompts(config("chat"), tokenizer())


def test_a_verifier_reads_no_special_tokens() -> None:
    text = Prompts(config(), tokenizer()).decode([2, 4, END])
    assert text.replace(" ", "") == "ac"


def test_the_fingerprint_changes_with_tokenizer_and_template() -> None:
    plain = Prompts(config(), tokenizer()).fingerprint
    assert plain == Prompts(config(), tokenizer(template=TEMPLATE)).fingerprint
    assert plain != Prompts(config(), tokenizer(adds_begin=False)).fingerprint
    chat = [Prompts(config("chat"), tokenizer(template=t)).fingerprint for t in (TEMPLATE, TEMPLATE + "b")]
    assert len({plain, *chat}) == 3


def test_every_end_token_of_the_folder_ends_a_response(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_token_ids(tmp_path, tokenizer()) == {END, 5, 6}
    assert end_token_ids(tmp_path / "nothing", tokenizer()) == {END}
