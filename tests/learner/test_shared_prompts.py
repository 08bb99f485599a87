"""Prompts that are computed once: the same tokens, the same logprobs, the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from stream_grpo.learner.batching import Microbatch, Scored, make_train_batch
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import Distribution, has_windows, logits, shared_logits
from stream_grpo.learner.shared_prompts import PADDING, SharedPrompts, cost, pays, share, shared_prompts
from stream_grpo.types import Rollout, RolloutGroup
from tests.learner.conftest import make_group, make_rollout

MakeRollout = Callable[..., Rollout]
MakeGroup = Callable[..., RolloutGroup]
CHEAP = 0.0
"""Attention that costs nothing: prompts are shared wherever tokens are saved."""


def by_reward(rewards_B: Any, valid_B: Any, *_: Any) -> Scored:
    return Scored(np.nan_to_num(rewards_B), valid_B)


def microbatches(
    groups: Sequence[RolloutGroup], attention_cost: float | None, tokens: int = 1000
) -> tuple[Microbatch, ...]:
    batch = make_train_batch(groups, by_reward, vocab_size=11, microbatch_tokens=tokens, attention_cost=attention_cost)
    return batch.minibatches[0].microbatches


def rows_of(micro: Microbatch) -> SharedPrompts | None:
    if micro.row_B is None:
        return None
    return shared_prompts(micro.token_ids_BT, micro.lengths_B, micro.num_prompt_B, micro.row_B)


def test_a_row_is_a_prompt_and_its_responses(rollout: MakeRollout, group: MakeGroup) -> None:
    g = group("g", [rollout([7, 8], [1, 2, 3], 1.0), rollout([7, 8], [4], 0.0)])
    (micro,) = microbatches([g], CHEAP)
    prompts = rows_of(micro)
    assert prompts is not None
    # 2 + 3 + 1 tokens instead of 2 x 5; positions of the second response go on from the prompt's.
    assert prompts.token_ids_RL.tolist() == [[7, 8, 1, 2, 3, 4]]
    assert prompts.position_ids_RL.tolist() == [[0, 1, 2, 3, 4, 2]]
    assert prompts.part_RL.tolist() == [[0, 0, 1, 1, 1, 2]]
    # From the token after the last of the prompt on: 1, 2, 3 come after columns 1, 2, 3, and 4 after column 1.
    before = prompts.before(micro.lengths_B, first=1)
    assert before[0].tolist() == [1, 2, 3]
    assert before[1, :1].tolist() == [1]
    assert prompts.sees()[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_sequences_of_other_prompts_have_rows_of_their_own() -> None:
    rows, widths = share([(1, 2), (3,), (1, 2), (1, 2)], [4, 3, 6, 9], max_tokens=10)
    # 2 + 2 + 4 = 8 tokens; 7 more would be 15 of 10, so that they begin a row with a prompt of its own.
    assert rows == [[0, 2], [1], [3]]
    assert widths == [8, 3, 9]


def test_what_attention_costs_decides() -> None:
    # 16 sequences of 12 + 60 tokens as one row of 972: 972 (1 + 972 c) against 16 x 72 (1 + 72 c).
    assert cost([(1, 972)], attention_cost=0.0) == 972
    assert cost([(16, 72)], attention_cost=0.001) == pytest.approx(1152 * 1.072)
    assert pays(cost([(1, 972)], attention_cost=0.0), cost([(16, 72)], attention_cost=0.0))  # 972 of 1152
    assert not pays(cost([(1, 972)], attention_cost=0.001), cost([(16, 72)], attention_cost=0.001))  # 1917 of 1235


def test_prompts_are_not_shared_where_that_does_not_pay(rollout: MakeRollout, group: MakeGroup) -> None:
    g = group("g", [rollout([7, 8], [1, 2, 3], 1.0), rollout([7, 8], [4], 0.0)])
    assert all(micro.row_B is None for micro in microbatches([g], None))
    # 6 (1 + 6 c) against 2 x 5 (1 + 5 c): cheaper below c = 4 / (50 - 36), so never here; 6 of 10 tokens.
    assert microbatches([g], 0.2)[0].row_B is not None
    # A single response has nothing to share with.
    assert microbatches([group("h", [rollout([7, 8], [1], 1.0)])], CHEAP)[0].row_B is None


@st.composite
def groups_drawn(draw: st.DrawFn) -> list[RolloutGroup]:
    token = st.integers(1, 10)
    groups = []
    for number in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        responses = draw(st.lists(st.lists(token, min_size=1, max_size=7), min_size=1, max_size=5))
        rollouts = [make_rollout(prompt, response, float(i)) for i, response in enumerate(responses)]
        groups.append(make_group(f"g{number}", rollouts))
    return groups


@given(groups_drawn(), st.integers(4, 40))
def test_every_sequence_is_there_once_and_rows_are_bounded(groups: list[RolloutGroup], tokens: int) -> None:
    found, longest = [], max(len(r.token_ids) for g in groups for r in g.rollouts)
    for micro in microbatches(groups, CHEAP, tokens):
        prompts = rows_of(micro)
        for index, length in enumerate(micro.lengths_B.tolist()):
            ids = micro.token_ids_BT[index, :length].tolist()
            found.append(ids)
            if prompts is None:
                continue
            row, num_prompt = prompts.row_B[index], int(prompts.num_prompt_B[index])
            start = int(prompts.start_B[index])
            seen = [*range(num_prompt), *range(start, start + length - num_prompt)]
            assert prompts.token_ids_RL[row, seen].tolist() == ids
            assert prompts.position_ids_RL[row, seen].tolist() == list(range(length))
            # The last token sees all of its sequence and nothing else.
            assert np.flatnonzero(prompts.sees()[row, seen[-1]]).tolist() == seen
        if prompts is not None:
            assert prompts.part_RL.size <= max(tokens, longest)
    assert sorted(found) == sorted(r.token_ids.tolist() for g in groups for r in g.rollouts)


def test_padding_sees_something(rollout: MakeRollout, group: MakeGroup) -> None:
    # A softmax over nothing is NaN, which a mask does not keep out of gradients.
    long = group("l", [rollout([1], [2, 3, 4], 1.0), rollout([1], [5, 6, 7], 0.0)])
    short = group("s", [rollout([1, 2, 3], [5], 1.0), rollout([1, 2, 3], [6], 0.0)])
    (micro,) = microbatches([long, short], CHEAP)
    prompts = rows_of(micro)
    assert prompts is not None
    assert (prompts.part_RL == PADDING).any()
    assert prompts.sees().any(axis=2).all()


def gpt2() -> Any:
    """All of it in float64."""
    config = GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config)


def llama() -> Any:
    """Norms and angles are taken in float32 whatever the weights are."""
    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    model = make().double().eval()
    model.set_attn_implementation("sdpa")  # eager attention takes its softmax in float32
    return model


@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 1e-9), (llama, 1e-5)])
@pytest.mark.parametrize("distribution", [Distribution(temperature=0.7), Distribution(temperature=1.3, top_k=4)])
def test_logprobs_entropy_and_gradients_are_those_of_the_sequences(
    rollout: MakeRollout,
    group: MakeGroup,
    distribution: Distribution,
    make: Callable[[], Any],
    tolerance: float,
) -> None:
    rng = np.random.default_rng(0)

    def drawn(prompt: list[int], num_tokens: int) -> Rollout:
        return rollout(prompt, rng.integers(1, 11, num_tokens).tolist(), 1.0)

    groups = [
        group("a", [drawn([3, 1, 4, 1, 5], n) for n in (7, 1, 4)]),
        group("b", [drawn([9, 2], n) for n in (5, 2, 9, 3)]),
    ]
    (micro,) = microbatches(groups, CHEAP)
    prompts = rows_of(micro)
    assert prompts is not None
    tensors = tensors_of(micro, torch.device("cpu"))
    assert tensors.shared is not None
    ids_BK = tensors.token_ids_BT[:, -tensors.num_last :]
    results = []
    for shared in (False, True):
        model = seeded(make)
        if shared:
            logits_RLV = shared_logits(model, tensors.shared, torch.float64)
            logprobs = distribution.logprobs_at(logits_RLV, tensors.shared, tensors.token_ids_BT)
            entropy = distribution.entropy_at(logits_RLV, tensors.shared, with_gradient=True)
        else:
            logits_BKV = logits(model, tensors.token_ids_BT, tensors.num_last)
            logprobs = distribution.logprobs(logits_BKV, ids_BK)
            entropy = distribution.entropy(logits_BKV, ids_BK, with_gradient=True)
        wanted = tensors.mask_BK & logprobs.isfinite()  # outside the support of a filter a logprob is -inf
        weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).reshape(wanted.shape)
        loss = (torch.where(wanted, logprobs, 0.0) * weights + torch.where(wanted, entropy, 0.0) * weights**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((torch.where(wanted, logprobs, 0.0), torch.where(wanted, entropy, 0.0), gradient, wanted))
    plain, once = results
    assert bool((plain[3] == once[3]).all())
    assert int(plain[3].sum()) > 5
    for of_sequences, of_rows in zip(plain[:3], once[:3], strict=True):
        assert float((of_sequences - of_rows).detach().abs().max()) < tolerance


def test_a_layout_is_made_of_what_it_is_given() -> None:
    ids = np.array([[5, 6, 1, 0], [5, 6, 2, 3]])
    layout = shared_prompts(ids, np.array([3, 4]), np.array([2, 2]), np.array([0, 0]))
    assert layout.token_ids_RL.tolist() == [[5, 6, 1, 2, 3]]
    assert layout.start_B.tolist() == [2, 3]


def test_a_block_has_no_more_attention_scores_than_single_sequences_may_have(
    rollout: MakeRollout, group: MakeGroup
) -> None:
    # 100 tokens a block and sequences of 10: 1,000 scores, rows of 31 tokens at most. 4 + 4 x 6 = 28, then 4 + 2 x 6.
    g = group("g", [rollout([1, 2, 3, 4], [5] * 6, 1.0) for _ in range(6)])
    found = [shape_of(micro) for micro in microbatches([g], CHEAP, tokens=100)]
    assert found == [(1, 28), (1, 16)]  # 2 x 28^2 would be 1,568


def shape_of(micro: Microbatch) -> tuple[int, int]:
    rows = rows_of(micro)
    assert rows is not None
    return rows.token_ids_RL.shape[0], rows.token_ids_RL.shape[1]


@pytest.mark.parametrize(
    ("config", "has"),
    [
        (LlamaConfig(), False),
        (MistralConfig(sliding_window=4096), True),
        (MistralConfig(sliding_window=None), False),
        (Qwen2Config(use_sliding_window=False), False),
        (Gemma3TextConfig(), True),
    ],
)
def test_a_model_with_windows_shares_no_prompts(config: PretrainedConfig, has: bool) -> None:
    assert has_windows(config) == has
