"""Tests of the teacher of the task `records`, and of its tokens."""

import random
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from stream_grpo import make_model, stock, stock_calls
from stream_grpo.arithmetic_calls import Part
from stream_grpo.lessons import LESSONS
from stream_grpo.stock import Request
from stream_grpo.stock_calls import MAX_STEPS, parts_of

KINDS = list(stock.POOL_COUNTS)
CONFIG = tomllib.loads((Path(__file__).parents[1] / "configs" / "agent-records-cpu.toml").read_text())


def drawn(kind: str, num: int) -> list[Request]:
    rng = random.Random(kind)
    return [stock.draw(kind, rng, held_out=False) for _ in range(num)]


def actions_of(parts: list[Part]) -> list[str]:
    return [part.text for part in parts if part.is_action]


def test_a_teacher_without_errors_reads_changes_and_says_that_it_is_done() -> None:
    request = Request("copy", ("bolt", "nut"))
    amount = stock.tables_of(request).amounts["bolt"]
    assert parts_of(request, random.Random(0)) == [
        Part("copy bolt nut:", is_action=False),
        Part("{select num from stock where item='bolt'}", is_action=True),
        Part(f"=[{amount}],", is_action=False),
        Part(f"{{update stock set num={amount} where item='nut'}}", is_action=True),
        Part("=ok,", is_action=False),
        Part("done", is_action=True),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_without_errors_plays_the_reference(kind: str) -> None:
    for request in drawn(kind, 20):
        expected = [f"{{{statement}}}" for statement in stock.reference_of(request)]
        assert actions_of(parts_of(request, random.Random(0))) == [*expected, "done"]


def test_what_the_teacher_is_told_of_he_says_again() -> None:
    told, rng = Counter[str](), random.Random(0)
    for request in drawn("restore", 300):
        parts = parts_of(request, rng, 0.5)
        for (before, seen), (_, after) in zip(pairwise(parts), pairwise(parts[1:]), strict=False):
            if before.is_action and (seen.text.startswith("=error: ") or seen.text == "=no rows,"):
                assert after.text[:7] == before.text[:7]  # "{select" or "{update" once more
                told[seen.text] += 1
    # A call without its mark, a query of the stock by `id`, and one of an entry that is not there.
    assert set(told) == {"=error: the call is not closed by '}',", "=error: no such column: id,", "=no rows,"}


def test_a_teacher_with_errors_ends_blocked_or_out_of_steps_too() -> None:
    rng = random.Random(1)
    last = [parts_of(request, rng, 0.9)[-1] for request in drawn("move", 200)]
    assert all(part.is_action for part in last)  # after an end nothing is observed
    assert any("ledger" in part.text for part in last)
    lengths = [len(actions_of(parts_of(request, rng, 0.9))) for request in drawn("restore", 200)]
    assert max(lengths) == MAX_STEPS


def test_the_configuration_is_that_of_the_teacher_and_holds_all_that_he_needs() -> None:
    environment, sampler = CONFIG["environment"], CONFIG["sampler"]
    assert environment["options"] == {"open": stock_calls.OPEN, "close": stock_calls.CLOSE, "body": "plain"}
    assert (environment["observation_prefix"], environment["observation_suffix"]) == ("=", ",")
    assert environment["max_steps"] == MAX_STEPS
    tokenizer = make_model.new_tokenizer(make_model.vocabulary_of("records"))
    rng = random.Random(2)
    for kind in KINDS:
        for request in drawn(kind, 100):
            prompt, *rest = parts_of(request, rng, 0.3)
            lengths = {part: len(tokenizer(part.text).input_ids) for part in rest}
            actions = [length + 1 for part, length in lengths.items() if part.is_action]  # and the end
            assert max(actions) <= environment["max_turn_tokens"]
            assert MAX_STEPS * max(actions) <= sampler["max_new_tokens"]
            seen = [length for part, length in lengths.items() if not part.is_action]
            assert max(seen, default=0) <= environment["max_observation_tokens"]
            assert len(tokenizer(prompt.text).input_ids) <= 8  # "move ", 4, 2, " ", item, " ", item, ":"
    room = 8 + sampler["max_new_tokens"] + MAX_STEPS * environment["max_observation_tokens"]
    assert room <= CONFIG["model"]["max_length_tokens"] <= make_model.MODEL_SHAPE["max_position_embeddings"]


def test_all_that_is_written_and_read_survives_the_tokenizer() -> None:
    vocabulary = make_model.vocabulary_of("records")
    tokenizer = make_model.new_tokenizer(vocabulary)
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    rng = random.Random(3)
    for kind in KINDS:
        for request in drawn(kind, 50):
            for text in [*(part.text for part in parts_of(request, rng, 0.4)), *stock.reference_of(request)]:
                ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
                assert tokenizer.unk_token_id not in ids, text
                assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_a_statement_has_few_tokens() -> None:
    tokenizer = make_model.new_tokenizer(make_model.vocabulary_of("records"))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("{update stock set num=407 where item='nut'}").input_ids)
    assert tokens == [
        "{",
        "update ",
        "stock",
        " set ",
        "num",
        "=",
        *"407",
        " where ",
        "item",
        "=",
        "'",
        "nut",
        "'",
        "}",
    ]


def test_training_covers_what_the_teacher_writes_with_its_ends_alone() -> None:
    token_ids_BT, targets_BT = make_model._batch(random.Random(0), 60, 0.2, "records")
    tokens = {i: token for token, i in make_model.vocabulary_of("records").items()}
    rng = random.Random(0)
    shares = LESSONS["records"].shares
    kinds = rng.choices(list(shares), weights=list(shares.values()), k=60)
    for kind, ids, targets in zip(kinds, token_ids_BT.tolist(), targets_BT.tolist(), strict=True):
        parts = LESSONS["records"].example(kind, rng, 0.2)
        whole = "".join(part.text + "<eos>" * part.is_action for part in parts)
        assert "".join(tokens[i] for i in ids).replace("<pad>", "") == whole
        trained = "".join(tokens[i] for i in targets if i != make_model.IGNORED)
        assert trained == "".join(f"{text}<eos>" for text in actions_of(parts))
