"""Calls under a grammar on the real engine: they are valid, and their logprobs are those that the learner has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream_grpo.config_environment import Environment
from stream_grpo.environments.calls import Call, CallFormat, Malformed, find_call
from stream_grpo.environments.loading import grammar_of
from stream_grpo.sampler.trajectories import TrajectoryEngine
from stream_grpo.types import EndReason, Episode
from tests.sampler.acting import PROBLEM
from tests.sampler.test_waiting_kv import PROMPT as LONG
from tests.sampler.test_waiting_kv import Fixed, Telling
from tests.sampler.tiny import END, TEMPERATURE, VOCAB, Setup, engine_on, request, run, tiny_models, version

pytestmark = pytest.mark.engine

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789[]{}":,\\ +-*/=#.\n()<>_!'[: VOCAB - 2]
FORM = CallFormat(open="[", close="]", tools={"python": "code"})
OPTIONS = {"open": "[", "close": "]"}
PROMPTS = [(0, 5 + i, 9, 11) for i in range(6)]
TOP_K = 20


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with engine_of_characters(tmp_path_factory.mktemp("model"), prefix_cache=True) as made:
        yield made


@contextmanager
def engine_of_characters(folder: Path, **sampler: Any) -> Iterator[Setup]:
    config, models = tiny_models(folder, **sampler)
    with_characters(folder)
    environment = Environment(name="calculator", options=OPTIONS, grammar=True, max_steps=1)
    filtered = config.sampler.model_copy(update={"top_k": TOP_K})
    config = config.model_copy(update={"environment": environment, "sampler": filtered})
    with engine_on(config, models, folder) as made:
        yield made


def with_characters(folder: Path) -> None:
    """A tokenizer of the same size in which every token but two is a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *CHARACTERS])}
    assert len(vocab) == VOCAB
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def text_of(generation: Any) -> str:
    return "".join(CHARACTERS[i - 2] for i in generation.token_ids.tolist() if i >= 2)


def requests(grammar: str | None, num: int = 60) -> list[Any]:
    made = [request(f"r/{i}", seed=i, prompt=PROMPTS[i % len(PROMPTS)], num_tokens=100) for i in range(num)]
    return [replace(one, grammar=grammar) for one in made]


def logprobs_of_learner(
    setup: Setup, grammar: str | None, prompt: tuple[int, ...], ids: list[int], turns: list[int] | None = None
) -> Any:
    """[R] by the learner's own functions on the transformers model, and how many tokens each was drawn from.

    `turns`: the action of every response token, -1 where it was observed; None: one action.
    """
    import torch

    from stream_grpo.learner.forward import Distribution, within
    from stream_grpo.learner.grammar import Grammar
    from stream_grpo.sampler.prompts import load_tokenizer

    ids_BT = torch.tensor([[*prompt, *ids]])
    turns_BT = torch.tensor([[-1] * len(prompt) + (turns or [0] * len(ids))])
    support, num_allowed = None, torch.full_like(ids_BT, VOCAB)
    if grammar is not None:
        made = Grammar(grammar, load_tokenizer(setup.folder), vocab_size=VOCAB, end_token_ids=[END])
        support = made.support(ids_BT, turns_BT)
        num_allowed = support.masks_MV[support.index_BT].sum(-1)
    with torch.no_grad():
        logits_BTV = setup.models[0](ids_BT).logits
        distribution = Distribution(temperature=TEMPERATURE, top_k=TOP_K)
        logprobs_BT = distribution.logprobs(within(logits_BTV, support), ids_BT)
    return logprobs_BT[0, len(prompt) :].numpy(), num_allowed[0, len(prompt) :].numpy()


def compare(setup: Setup, grammar: str | None, done: dict[str, Any], asked: list[Any]) -> int:
    """The number of tokens without an alternative; all have the learner's logprobs, these exactly 0."""
    gaps: list[float] = []
    num_forced = 0
    for one in asked:
        found = done[one.request_id]
        assert found.end_reason in (EndReason.EOS, EndReason.LENGTH)
        expected, num_allowed = logprobs_of_learner(setup, grammar, one.prompt_ids, found.token_ids.tolist())
        assert (found.logprobs[num_allowed == 1] == 0.0).all()
        assert (expected[num_allowed == 1] == 0.0).all()
        num_forced += int((num_allowed == 1).sum())
        gaps += np.abs(found.logprobs - expected).tolist()
    # Two implementations of one model with peaked logits. A token too many or too few would be far more.
    assert max(gaps) < 1e-3
    assert sum(gaps) / len(gaps) < 1e-5
    return num_forced


def test_calls_are_valid_and_their_logprobs_are_those_over_what_the_grammar_allowed(setup: Setup) -> None:
    setup.apply(0, version(0))
    grammar = grammar_of("calculator", OPTIONS)
    asked = requests(grammar)
    done = run(setup, *asked)
    calls = [found for found in done.values() if "[" in text_of(found)]
    whole = [find_call(text_of(found), FORM) for found in calls if found.end_reason is EndReason.EOS]
    assert len(calls) >= 5
    assert len(whole) >= 1
    assert all(isinstance(call, Call) for call in whole)
    assert all(found.token_ids[-1] == END for found in done.values() if found.end_reason is EndReason.EOS)
    assert compare(setup, grammar, done, asked) > 20 * len(whole)
    # The same seeds without a grammar: what is no call is the same text, since all of it was allowed.
    free = run(setup, *requests(None))
    assert compare(setup, None, free, asked) == 0
    same = [name for name, found in done.items() if found not in calls]
    assert len(same) >= 5
    for name in same:
        assert free[name].token_ids.tolist() == done[name].token_ids.tolist()
    assert any(isinstance(find_call(text_of(found), FORM), Malformed) for found in free.values())


def test_a_structural_tag_of_ones_own_may_ask_for_a_call(setup: Setup) -> None:
    setup.apply(0, version(0))
    grammar = grammar_of("python:tests.environments.worlds.Summing", {})
    asked = requests(grammar, 12)
    done = run(setup, *asked)
    for found in done.values():
        body = text_of(found)
        assert body[0] == "["
        assert body[-1] == "]"
        assert body[1:-1].replace("+", "").isdigit()
    assert compare(setup, grammar, done, asked) >= 12


def test_a_grammar_outlives_a_change_of_weights_and_the_kv_cache(setup: Setup) -> None:
    setup.apply(0, version(0))
    grammar = grammar_of("python:tests.environments.worlds.Summing", {})
    for one in requests(grammar, 8):
        setup.engine.add(one)
    # The first steps sample nothing: the grammar is compiled meanwhile.
    while setup.engine.num_sampled([f"r/{i}" for i in range(8)]) < 8:
        assert setup.engine.step() == []
    setup.apply(1, version(1), recompute_kv=True)
    done: dict[str, Any] = {}
    while setup.engine.num_unfinished:
        done |= {generation.request_id: generation for generation in setup.engine.step()}
    for generation in done.values():
        body = text_of(generation)
        assert (body[0], body[-1]) == ("[", "]")
        assert body[1:-1].replace("+", "").isdigit()
        assert len(set(generation.versions)) == 2


def test_branching_groups_keep_to_the_grammar_and_read_the_histories_that_were_kept(setup: Setup) -> None:
    setup.apply(0, version(0))
    grammar = grammar_of("python:tests.environments.worlds.Summing", {})
    # A mark, up to six digits, a plus, up to six digits, a mark, the end: 16 tokens.
    settings = Environment(name="calculator", max_steps=3, max_turn_tokens=16, grammar=True, waiting_kv="keep")
    engine = TrajectoryEngine(setup.engine, Telling(), Fixed(), lambda ids: "act", settings, grammar)
    episode = Episode(group="b", seed=1, problem=PROBLEM, num_trunk_actions=1)
    asked = [replace(request(f"b/{i}", seed=i, prompt=LONG, num_tokens=48), episode=episode) for i in range(4)]
    for one in asked:
        engine.add(one)
    done: dict[str, Any] = {}
    while engine.num_unfinished:
        done |= {generation.request_id: generation for generation in engine.step()}
    trunks, num_compared = set(), 0
    for i, one in enumerate(asked):
        found = done[one.request_id]
        ids, observed, turns = found.token_ids.tolist(), found.trajectory.observed, found.trajectory.turn.tolist()
        assert found.end_reason is EndReason.MAX_STEPS
        num_trunk = found.trajectory.num_trunk_tokens
        trunks.add(tuple(ids[:num_trunk]))
        # The first has sampled the trunk, to the others it is context; what each sampled are calls and their ends.
        assert observed[:num_trunk].all() == (i > 0)
        played = np.where(observed, -1, turns)
        for turn in sorted(set(played.tolist()) - {-1}):
            text = "".join(CHARACTERS[token_id - 2] for token_id in np.array(ids)[played == turn] if token_id >= 2)
            assert re.fullmatch(r"\[[0-9]{1,6}\+[0-9]{1,6}\]", text), text
        expected, _ = logprobs_of_learner(setup, grammar, one.prompt_ids, ids, played.tolist())
        gaps = np.abs(found.logprobs - expected)[~observed]
        assert gaps.max() < 1e-3
        assert gaps.mean() < 1e-5
        num_compared += len(gaps)
    assert len(trunks) == 1
    # An action of the trunk and eight others, of four tokens and an end at least.
    assert num_compared >= 9 * 5
    # Two blocks of the prompt at least for each second and third action.
    assert engine.status()["num_history_cached"] >= 8 * 64


@pytest.mark.slow
def test_the_engine_in_processes_of_its_own_keeps_to_it_too(tmp_path: Path) -> None:
    with engine_of_characters(tmp_path, engine="async") as setup:
        grammar = grammar_of("python:tests.environments.worlds.Summing", {})
        asked = requests(grammar, 6)
        done = run(setup, *asked)
        assert all(text_of(found)[0] == "[" for found in done.values())
        assert compare(setup, grammar, done, asked) >= 6
