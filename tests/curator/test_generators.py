"""Problems of reasoning-gym, and prompts as a chat template renders them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from curator.errors import PoolError, RowRefused
from curator.ingest.formats import Row
from curator.ingest.importer import ImportPlan, prepare
from curator.ingest.reading import Source
from curator.ingest.reasoning_gym import reasoning_gym_source
from curator.ingest.rows import RowReader
from curator.ingest.template import ChatTemplate

PARTS = {"datasets": [{"name": "chain_sum", "weight": 2}, {"name": "leg_counting", "config": {"max_animals": 3}}]}


def generated(family: str, num: int, **options: Any) -> list[Row]:
    rows = []
    for number, row in islice(reasoning_gym_source(family, **options).rows, num):
        assert not isinstance(row, RowRefused)
        assert number == len(rows) + 1
        rows.append(row)
    return rows


@pytest.mark.parametrize("family", ["chain_sum", "simple_equations", "knights_knaves", "word_sorting"])
def test_an_entry_depends_on_seed_plus_index_alone(family: str) -> None:
    whole = generated(family, 6, seed=3, size=6)
    assert whole[4:] == [
        {**row, "extra": whole[4 + i]["extra"]} for i, row in enumerate(generated(family, 2, seed=7, size=2))
    ]


def test_the_parts_of_a_composite_are_mixed_and_go_on_alike_in_the_next_block() -> None:
    # A block holds 1,000 entries: entry 1,000 comes from a second generator, whose seed is 1,000 further on.
    rows = generated("composite", 1003, seed=0, size=None, config=PARTS)
    assert {row["domain"] for row in rows} == {"chain_sum", "leg_counting"}
    later = generated("composite", 3, seed=1000, size=3, config=PARTS)
    assert [row["prompt"] for row in rows[1000:]] == [row["prompt"] for row in later]
    assert [row["problem_id"] for row in rows[1000:]] == [row["problem_id"] for row in later]


def test_an_entry_that_depends_on_seed_and_index_has_both_in_its_id() -> None:
    assert [row["problem_id"] for row in generated("acre", 2, seed=3, size=2)] == ["acre/3.0", "acre/3.1"]


def test_other_settings_make_other_ids() -> None:
    (plain,), (hard,) = (generated("chain_sum", 1, seed=0, size=1, config=c) for c in ({}, {"max_terms": 3}))
    assert plain["problem_id"] == "chain_sum/0"
    assert hard["problem_id"].startswith("chain_sum-")


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("chain_summ", {}, "no family of that name; known: ab, acre"),
        ("chain_sum", {"terms": 3}, "a setting is refused: .*terms"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "a setting is refused"),
        ("chain_sum", {"seed": 3}, "seed in the config; give --seed and --size instead"),
        ("composite", {}, "a setting is refused: expected .*, received {}"),
        ("composite", {"datasets": [{"name": "chain_sum", "config": {"size": 3}}]}, "size in the config"),
    ],
)
def test_a_setting_that_is_wrong_is_told_before_anything_is_generated(
    family: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        reasoning_gym_source(family, seed=0, size=1, config=config)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
CHAT = ({"role": "system", "content": "Be short. "}, {"role": "user", "content": "what is it"})


def make_tokenizer(folder: Path, template: str | None) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<unk>", "<s>", "</s>", "what", "is", "it", "Be", "short", ".", "<|", "|>", "user", "system", "assistant"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_the_template_is_rendered_as_transformers_does_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer(tmp_path / "t", TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        list(CHAT), tokenize=False, add_generation_prompt=True
    )
    assert (
        ChatTemplate(folder).render(CHAT) == theirs == "<s><|system|>Be short.</s><|user|>what is it</s><|assistant|>"
    )


def test_tokens_are_counted_after_the_template_with_one_begin_token(tmp_path: Path) -> None:
    template = ChatTemplate(make_tokenizer(tmp_path / "t", TEMPLATE))
    # <s> <| user |> what is it </s> <| assistant |>
    assert template.num_tokens("what is it") == 11
    plain = ChatTemplate(make_tokenizer(tmp_path / "p", None))
    # <s> what is it; the text has no begin token, the tokenizer adds it.
    assert plain.num_tokens("what is it") == plain.num_tokens("<s>what is it") == 4
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        plain.num_tokens(CHAT)


def test_a_template_of_its_own_file_and_one_of_several_are_found(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "t", None)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert ChatTemplate(folder).render("a") == "a!"
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}?"}]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": several}))
    assert ChatTemplate(folder).render("a") == "a?"


def test_c48_a_prompt_is_refused_by_its_length_after_the_template(tmp_path: Path) -> None:
    # Of "what" alone 1 token is the prompt's own, 8 are the template's; with three words they are 11.
    rows = [{"prompt": "what", "answer": "1"}, {"prompt": "what is it", "answer": "1"}]
    tools = {"prompt": [{"role": "tool", "content": "x"}], "answer": "1"}
    plan = ImportPlan(
        sources=[Source(Path("a.jsonl"), iter(enumerate([*rows, tools], start=1)))],
        reader=RowReader(default_verifier="exact"),
        template=ChatTemplate(make_tokenizer(tmp_path / "t", TEMPLATE)),
        max_prompt_tokens=10,
    )
    report = prepare(plan, tmp_path).report
    assert {reason: [place.row for place in places] for reason, places in report.refused.items()} == {
        "the prompt has more than 10 tokens after the template": [2],
        "the chat template refuses the messages: no tools": [3],
    }
    assert report.tokens == (9, 9.0, 9.0, 9)
    assert report.examples == ["<s><|user|>what</s><|assistant|>\n=> 1 (exact)"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"no tokenizer\.json there; name the folder"):
        ChatTemplate(tmp_path)
    broken = make_tokenizer(tmp_path / "t", "{% if %}")
    with pytest.raises(PoolError, match="its chat template cannot be read"):
        ChatTemplate(broken)
