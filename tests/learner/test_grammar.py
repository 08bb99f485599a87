"""The tokens that a grammar leaves to every draw, and logprobs over them."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stream_grpo.algo.loss import LossInputs, policy_loss
from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.environments.calls import Call, CallFormat, Malformed, find_call
from stream_grpo.errors import ConfigError, GrammarError
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import make_train_batch
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import Distribution, LanguageModel, Support, within
from stream_grpo.learner.grammar import Grammar
from stream_grpo.make_model import EOS, SPECIAL_TOKENS, new_model, new_tokenizer
from stream_grpo.types import Decision
from tests.learner.conftest import make_group, make_rollout

VOCABULARY = {token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *string.printable])}
JSON = CallFormat(open="[", close="]", tools={"python": "code", "sql": "query"})
PLAIN = CallFormat(open="[", close="]", body="plain", tools={"python": "code"})
MARKS = CallFormat(tools={"python": "code"})


def grammar(form: CallFormat, vocabulary: dict[str, int] = VOCABULARY) -> Grammar:
    tag = json.dumps(form.structural_tag())
    tokenizer = new_tokenizer(vocabulary)
    return Grammar(tag, tokenizer, vocab_size=len(vocabulary), end_token_ids=[EOS], calls=form.shortest_calls())


def ids_of(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def support(made: Grammar, *actions: list[int]) -> tuple[Support, torch.Tensor]:
    """Of one sequence: a token of a prompt, then the actions, nothing between them."""
    ids = torch.tensor([[5, *(token for action in actions for token in action)]])
    turns = torch.tensor([[-1, *(turn for turn, action in enumerate(actions) for _ in action)]])
    return made.support(ids, turns), ids


def is_allowed(made: Grammar, action: list[int]) -> bool:
    found, ids = support(made, action)
    return bool(found.masks_MV[found.index_BT[0, 1:], ids[0, 1:]].all())


CALL = '{"name": "python", "arguments": {"code": "1+2"}}'


@pytest.mark.parametrize(
    ("form", "text", "allowed"),
    [
        (PLAIN, "the answer is 51", True),
        (PLAIN, "so [12+39]", True),
        (PLAIN, "[x[0]", True),  # the body is `x[0`
        (PLAIN, "[12+39", False),  # not closed
        (PLAIN, "[1] and [2]", False),  # more than one
        (JSON, f"I ask [{CALL}]", True),
        (JSON, '[{"name":"sql","arguments":{"query":"select \\"a\\""}}]', True),
        (JSON, '[{"name": "rm", "arguments": {}}]', False),  # no such tool
        (JSON, '[{"name": "sql", "arguments": {"code": "1"}}]', False),  # not its argument
        (JSON, '[{"name": "sql"}]', False),
        (JSON, "[12+39]", False),
        (JSON, f"[{CALL}", False),
        (JSON, '[{"name": "python", "arguments": {"code": "x]"}}]', False),  # its text ends the call
        (MARKS, f"<tool_call>{CALL}</tool_call>", True),
        (MARKS, "a < b and a <tool b", True),
        (MARKS, "<tool_call>{}</tool_call>", False),
        (MARKS, '<tool_call>{"name": "python", "arguments": {"code": "a < b"}}</tool_call>', True),
        (MARKS, '<tool_call>{"name": "python", "arguments": {"code": "</tool_call>"}}</tool_call>', False),
    ],
)
def test_what_is_allowed_is_what_is_read_as_a_call_or_as_none(form: CallFormat, text: str, allowed: bool) -> None:
    assert is_allowed(grammar(form), [*ids_of(text), EOS]) == allowed
    if allowed:
        assert not isinstance(find_call(text, form), Malformed)
    else:
        assert isinstance(find_call(text, form), Malformed)


def test_text_is_free_until_a_call_begins_and_over_when_it_ends() -> None:
    found, _ = support(grammar(PLAIN), [*ids_of("a[1]"), EOS])
    letters = [VOCABULARY[character] for character in string.printable]
    of_a, of_open, of_body, of_close, of_end = found.masks_MV[found.index_BT[0, 1:]]
    for mask in (of_a, of_open):
        assert mask[letters].all()
        assert mask[EOS]
    for mask in (of_body, of_close):
        assert mask[letters].all()
        assert not mask[EOS]
    assert of_end.nonzero().flatten().tolist() == [EOS]


def test_every_action_begins_anew_also_where_nothing_was_observed_between_two() -> None:
    made = grammar(PLAIN)
    # The first was cut inside its call. Had it gone on, an end could not follow.
    found, ids = support(made, ids_of("[1"), [*ids_of("2"), EOS])
    assert found.masks_MV[found.index_BT[0, 1:], ids[0, 1:]].all()
    assert found.index_BT[0, 3] == found.index_BT[0, 1]
    as_one, _ = support(made, [*ids_of("[12"), EOS])
    assert not as_one.masks_MV[as_one.index_BT[0, 4], EOS]


@pytest.mark.parametrize(
    ("wrong", "at", "named"),
    [
        # Six tokens of prompt, seven and an end of an action, two observed, then `[{x`: behind `{` stands `"name"`.
        ("[{x", 18, "id {x} ('x'), sampled after '[{{' in action 1"),
        ("[", 17, "id 2 ('<eos>'), sampled after '[' in action 1"),
    ],
)
def test_a_sampled_token_that_the_grammar_forbids_is_named_where_it_stands(wrong: str, at: int, named: str) -> None:
    made, texts = grammar(JSON), ("no call", wrong)
    rollout = _trajectory(*texts)
    found, ids = support(made, *([*ids_of(text), EOS] for text in texts))
    # In the sequence of `support` one token of prompt, and nothing observed.
    is_allowed = found.masks_MV[found.index_BT[0], ids[0]]
    assert (~is_allowed).nonzero().flatten().tolist() == [at - 6 - 2 + 1]
    group = make_group("g17", [_trajectory("no call", f"[{CALL}]"), rollout])
    with pytest.raises(GrammarError) as error:
        made.check([make_group("g16", group.rollouts[:1]), group])
    assert str(error.value).startswith(f"group g17, rollout 1: token {at}, {named.format(x=VOCABULARY['x'])}: the gr")
    assert "sampler sampler-0 draws under another one (environment.grammar), or with another token" in str(error.value)
    # What is no rollout to learn from is none to stop for.
    unscored = replace(rollout.reward, decision=Decision.ENV_ERROR, reward=None)
    made.check([replace(group, rollouts=(group.rollouts[0], replace(rollout, reward=unscored)))])


def test_a_sampled_token_that_the_vocabulary_does_not_have_is_named_too() -> None:
    rollout = _trajectory("no call", "none")
    ids = np.where(np.arange(len(rollout.token_ids)) == 6, 500, rollout.token_ids)
    with pytest.raises(GrammarError, match=r"token 6, id 500 .*, sampled after '' in action 0"):
        grammar(JSON).check([make_group("g1", [replace(rollout, token_ids=ids)])])


def test_a_clipped_loss_of_a_token_that_is_forbidden_is_finite_so_that_nothing_else_would_tell() -> None:
    recipe = PRESETS["grpo"].recipe
    forbidden = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        policy_logprobs_BT=forbidden,
        behavior_logprobs_BT=torch.tensor([[0.0, -1.0]]).double(),
        advantage_BT=torch.ones(1, 2).double(),
        mask_BT=torch.tensor([[False, True]]),
        tokens_B=torch.ones(1),
        problem_tokens_B=torch.ones(1),
        age_BT=torch.zeros(1, 2, dtype=torch.int64),
        regularized_B=torch.ones(1, dtype=torch.bool),
    )
    # min(0 A, clip(0) A) with A = 1 is 0.
    assert policy_loss(recipe, inputs, denominator=1.0, kl_weight=0.0)[0].item() == 0.0


def test_what_nobody_sampled_has_the_mask_of_all() -> None:
    found, _ = support(grammar(JSON), ids_of("[{"))
    assert found.index_BT[0, 0] == 0
    assert found.masks_MV[0].all()
    assert found.masks_MV.shape[1] == len(VOCABULARY)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}], ids=["all", "top_k"])
def test_logprobs_are_those_of_a_softmax_over_what_was_allowed(filters: dict[str, Any]) -> None:
    torch.manual_seed(1)
    found, ids_BT = support(grammar(JSON), [*ids_of(f"[{CALL}]"), EOS])
    logits_BTV = torch.randn(*ids_BT.shape, len(VOCABULARY), dtype=torch.float64, requires_grad=True)
    # What was sampled is likely, so that no filter takes it out.
    with torch.no_grad():
        logits_BTV[0, :-1].scatter_add_(1, ids_BT[0, 1:, None], torch.full((ids_BT.shape[1] - 1, 1), 6.0).double())
    distribution = Distribution(temperature=0.7, **filters)
    allowed_BTV = within(logits_BTV, found)
    logprobs_BT = distribution.logprobs(allowed_BTV, ids_BT)
    entropy_BT = distribution.entropy(allowed_BTV, ids_BT, with_gradient=False)
    num_forced = 0
    for at in range(1, ids_BT.shape[1]):
        allowed = found.masks_MV[found.index_BT[0, at]].nonzero().flatten().tolist()
        scaled = {token: logits_BTV[0, at - 1, token].item() / 0.7 for token in allowed}
        kept = sorted(scaled.values(), reverse=True)[: filters.get("top_k", len(scaled))]
        total = sum(np.exp(value) for value in kept)
        chosen = scaled[int(ids_BT[0, at])]
        assert logprobs_BT[0, at].item() == pytest.approx(chosen - np.log(total), abs=1e-5 if filters else 1e-12)
        p = np.exp(np.array(kept) - np.log(total))
        assert entropy_BT[0, at].item() == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-5 if filters else 1e-12)
        if len(allowed) == 1:
            num_forced += 1
            assert logprobs_BT[0, at].item() == 0.0
    # "name", "arguments" and their colons at least leave no choice: a token is a character here.
    assert num_forced > 15
    (gradient,) = torch.autograd.grad(logprobs_BT.sum(), logits_BTV)
    assert torch.isfinite(gradient).all()
    for at in range(1, ids_BT.shape[1]):
        mask = found.masks_MV[found.index_BT[0, at]]
        assert (gradient[0, at - 1, ~mask] == 0).all()
        if mask.sum() == 1:
            assert (gradient[0, at - 1] == 0).all()


def test_rows_of_several_sequences_and_logits_in_pieces_give_the_same_logprobs() -> None:
    torch.manual_seed(0)
    model = new_model(vocabulary=VOCABULARY).double().eval()
    made, distribution = grammar(JSON), Distribution(temperature=0.7)
    texts = (f"[{CALL}]", "no call", "[{")
    groups = [make_group("g", [_trajectory(text, text, is_cut=True) for text in texts])]
    found: list[torch.Tensor] = []
    # Each sequence a row, prompts shared, one row for all; with logits of all positions, and of 5 at a time.
    ways: list[dict[str, Any]] = [{}, {"attention_cost": 0.0}]
    ways.append({"attention_cost": 0.0, "share_prompts": False, "packing": True})
    for rows in ways:
        batch = make_train_batch(
            groups,
            AdvantageMaker(PRESETS["grpo"].recipe),
            vocab_size=len(VOCABULARY),
            microbatch_tokens=10**6,
            **rows,
        )
        (micro,) = batch.minibatches[0].microbatches
        given = tensors_of(micro, torch.device("cpu"))
        assert given.turns_BT is not None
        assert (given.shared is None) == (not rows)
        allowed = made.support(given.token_ids_BT, given.turns_BT).of_last(given.num_last)
        order = np.lexsort(micro.token_ids_BT.T)
        for max_positions in (1000, 5):
            asked = LanguageModel(call=model, module=model, dtype=torch.float64, max_positions=max_positions)
            with torch.no_grad():
                both = asked.logprobs(distribution, given.targets, allowed, entropy="value")
            found.append(torch.stack([figure_BK[order][given.mask_BK[order]] for figure_BK in both]))
    assert found[0].shape == (2, sum(map(len, texts)) * 2)
    assert torch.isfinite(found[0]).all()
    for other in found[1:]:
        assert (found[0] - other).abs().max() < 1e-9


def _trajectory(first: str, second: str, *, is_cut: bool = False) -> Any:
    """A prompt, a text as an action, two tokens that were observed, another text; `is_cut`: no action has an end."""
    actions = [[*ids_of(text), *([] if is_cut else [EOS])] for text in (first, second)]
    rollout = make_rollout(ids_of("12+39="), [*actions[0], *ids_of("=,"), *actions[1]], float(len(first)))
    lengths = [6, len(actions[0]), 2, len(actions[1])]
    mask = rollout.loss_mask & ~np.repeat([False, False, True, False], lengths)
    return replace(
        rollout,
        loss_mask=mask,
        turn=np.repeat([0, 0, 0, 1], lengths).astype(np.int16),
        behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        version_branch=np.where(mask, 0, -1).astype(np.int32),
        version_step=np.where(mask, 0, -1).astype(np.int32),
    )


@pytest.mark.engine
@pytest.mark.parametrize("logits_bytes", [1 << 20, 1], ids=["whole", "in pieces"])
def test_the_learners_engine_has_them_of_policy_and_reference(
    tmp_path: Path, process_group: None, logits_bytes: int
) -> None:
    from stream_grpo.learner.engine import LearnerEngine

    torch.manual_seed(0)
    model = new_model(vocabulary=VOCABULARY).eval()
    model.save_pretrained(tmp_path)
    made, distribution = grammar(JSON), Distribution(temperature=0.7)
    kl = {"kl": "k3", "kl_place": "loss", "kl_weight": 0.1, "kl_reference": "fixed", "regularize_without_signal": False}
    recipe = Recipe.model_validate(PRESETS["rloo"].recipe.model_dump() | kl)
    engine = LearnerEngine(
        tmp_path,
        learner=Learner(logits_bytes=logits_bytes),
        recipe=recipe,
        dtype="float32",
        distribution=distribution,
        seed=0,
        grammar=made,
    )
    batch = make_train_batch(
        [make_group("g", [_trajectory(text, text, is_cut=True) for text in (f"[{CALL}]", "no call")])],
        AdvantageMaker(recipe),
        vocab_size=len(VOCABULARY),
        microbatch_tokens=10**6,
    )
    given = tensors_of(batch.minibatches[0].microbatches[0], engine.device)
    assert given.turns_BT is not None
    allowed = made.support(given.token_ids_BT, given.turns_BT)
    with torch.no_grad():
        logits_BTV = model(input_ids=given.token_ids_BT, use_cache=False).logits
        expected_BK = distribution.logprobs(within(logits_BTV, allowed), given.token_ids_BT)[:, -given.num_last :]
        policy_BK, _ = engine.logprobs(given.targets)
        reference_BK = engine.reference_logprobs(given.targets)
        free_BK, _ = engine.logprobs(replace(given.targets, turns_BT=None))
    engine.close()
    for found_BK in (policy_BK, reference_BK):
        assert (found_BK - expected_BK)[given.mask_BK].abs().max() < 1e-5
    # Without a grammar the alternatives that it took away would have a share.
    assert (free_BK - expected_BK)[given.mask_BK].min() < -1.0


def test_tokens_that_cannot_write_a_call_are_refused() -> None:
    without_braces = {token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *"0123456789+[]"])}
    with pytest.raises(ConfigError, match=r"after '\[' no token of this model can follow"):
        grammar(JSON, without_braces)
    grammar(PLAIN, without_braces)


def test_a_character_that_is_wanted_later_in_a_call_is_missed_at_the_start() -> None:
    # The brace can follow the mark; behind it a quotation mark must, and there is none.
    without_quotes = {
        token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *string.printable.replace('"', "")])
    }
    with pytest.raises(
        ConfigError, match=r"""cannot write the call '\[{"name":"python",.*: after '\[{' they have no"""
    ):
        grammar(JSON, without_quotes)
    grammar(PLAIN, without_quotes)


def test_every_tool_must_be_writable() -> None:
    # All that python and code need; of `sql` and `query` the letters q and u are missing.
    without_q = {token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *string.printable.replace("q", "")])}
    with pytest.raises(ConfigError, match=r"""after '\[{"name":"s' they have no way on"""):
        grammar(JSON, without_q)
    grammar(CallFormat(open="[", close="]", tools={"python": "code"}), without_q)


@pytest.mark.parametrize(("form", "mark"), [(MARKS, "<tool_call>"), (PLAIN, "]")])
def test_marks_that_no_environment_reads_are_refused(form: CallFormat, mark: str) -> None:
    tokenizer = new_tokenizer(VOCABULARY)
    tokenizer.add_special_tokens({"additional_special_tokens": [mark]})
    tag = json.dumps(form.structural_tag())
    with pytest.raises(ConfigError, match=f"the mark '{mark}' of a call is read back as ''"):
        Grammar(tag, tokenizer, vocab_size=len(tokenizer), end_token_ids=[EOS])
    # An added token that is no special one is read as it is written.
    tokenizer = new_tokenizer(VOCABULARY)
    tokenizer.add_tokens([mark])
    Grammar(tag, tokenizer, vocab_size=len(tokenizer), end_token_ids=[EOS], calls=form.shortest_calls())


@pytest.mark.parametrize("form", [JSON, PLAIN, MARKS])
def test_the_shortest_calls_are_read_as_calls_of_every_tool(form: CallFormat) -> None:
    calls = [find_call(text, form) for text in form.shortest_calls()]
    assert calls == [Call(tool, {argument: ""}) for tool, argument in form.tools.items()]


def test_what_xgrammar_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.grammar = true: grammar or tokenizer are not what"):
        Grammar("{}", new_tokenizer(VOCABULARY), vocab_size=len(VOCABULARY), end_token_ids=[EOS])
    with pytest.raises(ConfigError, match="grammar or tokenizer are not what xgrammar takes"):
        Grammar(json.dumps(PLAIN.structural_tag()), object(), vocab_size=9, end_token_ids=[EOS])


def test_a_call_is_read_back_as_it_was_written() -> None:
    assert find_call(f"[{CALL}]", JSON) == Call("python", {"code": "1+2"})
