"""Several sequences in one row: none sees another, and all have the logprobs and gradients that they have alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stream_grpo.learner.batching import Microbatch, Scored, make_train_batch
from stream_grpo.learner.figures import figures_of_batch, padding_share
from stream_grpo.learner.first_pass import Tensors, tensors_of
from stream_grpo.learner.forward import PLAIN, Distribution, LanguageModel
from stream_grpo.learner.shared_prompts import PADDING, shared_prompts
from stream_grpo.learner.trials import gap_of_rows
from stream_grpo.types import RolloutGroup
from tests.learner.conftest import make_group, make_rollout
from tests.learner.test_shared_prompts import gpt2, llama, seeded

CPU = torch.device("cpu")
VOCAB = 11


def by_reward(rewards_B: Any, valid_B: Any, *_: Any) -> Scored:
    return Scored(np.nan_to_num(rewards_B), valid_B)


def groups_of(shape: Sequence[tuple[int, Sequence[int]]]) -> list[RolloutGroup]:
    """Groups of (tokens of the prompt, tokens of each response)."""
    rng = np.random.default_rng(0)
    groups = []
    for number, (num_prompt, lengths) in enumerate(shape):
        prompt = rng.integers(1, VOCAB, num_prompt).tolist()
        rollouts = [make_rollout(prompt, rng.integers(1, VOCAB, n).tolist(), float(i)) for i, n in enumerate(lengths)]
        groups.append(make_group(f"g{number}", rollouts))
    return groups


def batch_of(groups: Sequence[RolloutGroup], *, share_prompts: bool = True, packing: bool = True) -> Any:
    return make_train_batch(
        groups, by_reward, vocab_size=VOCAB, microbatch_tokens=1000, attention_cost=0.01,
        share_prompts=share_prompts, packing=packing,
    )  # fmt: skip


def the_microbatch(groups: Sequence[RolloutGroup], **settings: bool) -> Microbatch:
    (microbatch,) = batch_of(groups, **settings).minibatches[0].microbatches
    assert isinstance(microbatch, Microbatch)
    return microbatch


MIXED = [(5, (7, 1, 4)), (2, (5, 2, 9, 3)), (3, (1,)), (4, (21, 2))]
"""Rows of 17, 21, 4 and 27 tokens with prompts shared: one of 27, of 21 + 4 and of 17."""


def test_a_row_goes_on_with_the_next_prompt() -> None:
    # 7 8 | 1 2 | 3, then 9 | 4 4: positions begin again, and no token sees one of the other block.
    ids = np.array([[7, 8, 1, 2], [7, 8, 3, 0], [9, 4, 4, 0]])
    lengths, num_prompt = np.array([4, 3, 3]), np.array([2, 2, 1])
    rows = shared_prompts(ids, lengths, num_prompt, np.array([0, 0, 0]), np.array([0, 0, 1]))
    assert rows.is_packed
    assert rows.token_ids_RL.tolist() == [[7, 8, 1, 2, 3, 9, 4, 4]]
    assert rows.position_ids_RL.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert rows.block_RL.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert rows.part_RL.tolist() == [[0, 0, 1, 1, 2, 0, 1, 1]]
    assert rows.prompt_start_B.tolist() == [0, 0, 5]
    assert rows.start_B.tolist() == [2, 4, 6]
    # Of tokens 1, 2, 3: in the second sequence token 2 comes behind the prompt's last, and 3 is padding.
    assert rows.before(lengths, first=0).tolist() == [[0, 1, 2], [0, 1, 4], [5, 6, 7]]
    assert rows.sees()[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("share_prompts", [True, False])
def test_padding_vanishes(share_prompts: bool) -> None:
    groups = groups_of(MIXED)
    padded = batch_of(groups, share_prompts=share_prompts, packing=False)
    packed = batch_of(groups, share_prompts=share_prompts)
    # 10 sequences of 12, 6, 9, 7, 4, 11, 5, 4, 25, 6: 89 of 250 tokens. With prompts shared 17, 21, 4, 27: 69 of 108.
    assert figures_of_batch(padded)["padding_share"] == pytest.approx(1 - (69 / 108 if share_prompts else 89 / 250))
    after = figures_of_batch(packed)["padding_share"]
    assert after is not None
    assert after < 0.2
    assert padding_share([]) is None


def test_rows_have_the_tokens_of_the_sequences() -> None:
    microbatch = the_microbatch(groups_of(MIXED), share_prompts=False)
    assert microbatch.row_B is not None
    rows = shared_prompts(
        microbatch.token_ids_BT, microbatch.lengths_B, microbatch.num_prompt_B, microbatch.row_B, microbatch.block_B
    )
    for index, length in enumerate(microbatch.lengths_B.tolist()):
        row, num_prompt = microbatch.row_B[index], int(microbatch.num_prompt_B[index])
        prompt, start = int(rows.prompt_start_B[index]), int(rows.start_B[index])
        seen = [*range(prompt, prompt + num_prompt), *range(start, start + length - num_prompt)]
        assert rows.token_ids_RL[row, seen].tolist() == microbatch.token_ids_BT[index, :length].tolist()
        assert rows.position_ids_RL[row, seen].tolist() == list(range(length))
        assert np.flatnonzero(rows.sees()[row, seen[-1]]).tolist() == seen
    # A softmax over nothing is NaN: padding sees padding.
    assert (rows.part_RL == PADDING).any()
    assert rows.sees().any(axis=2).all()


def figures_of(model: LanguageModel, distribution: Distribution, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    logprobs, entropy = model.logprobs(distribution, tensors.targets, entropy="gradient")
    wanted = tensors.mask_BK & logprobs.isfinite()  # outside the support of a filter a logprob is -inf
    order = torch.argsort(tensors.advantage_B, stable=True)
    logprobs, entropy = (torch.where(wanted, x, 0.0)[order] for x in (logprobs, entropy))
    weights = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None] * (1 + torch.arange(logprobs.shape[1]) % 3)
    torch.autograd.backward((logprobs * weights[: len(logprobs)] + entropy * weights[: len(logprobs)] ** 2).sum())
    gradient = torch.cat([p.grad.flatten() for p in model.module.parameters()])
    return logprobs.detach(), entropy.detach(), gradient, wanted[order]


@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 1e-9), (llama, 1e-5)])
@pytest.mark.parametrize("distribution", [Distribution(temperature=0.7), Distribution(temperature=1.3, top_k=4)])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("max_positions", [None, 1000, 8], ids=["all logits", "those wanted", "in pieces"])
def test_logprobs_entropy_and_gradients_are_those_of_the_sequences(
    distribution: Distribution,
    make: Callable[[], Any],
    tolerance: float,
    share_prompts: bool,
    max_positions: int | None,
) -> None:
    # Each rollout's reward is another, so that the sequences are known by it in whatever order they lie.
    groups = groups_of([(5, (7, 1, 4)), (2, (5, 2, 9, 3)), (3, (1,)), (4, (21,))])
    number = iter(range(100))
    groups = [
        make_group(group.group_id, [with_reward(rollout, float(next(number))) for rollout in group.rollouts])
        for group in groups
    ]
    results = []
    for packing in (False, True):
        microbatch = the_microbatch(groups, share_prompts=packing and share_prompts, packing=packing)
        tensors = tensors_of(microbatch, CPU)
        assert (tensors.shared is not None and tensors.shared.is_packed) == packing
        model = seeded(make)
        asked = LanguageModel(
            call=model, module=model, dtype=torch.float64, max_positions=max_positions if packing else None
        )
        results.append(figures_of(asked, distribution, tensors))
    plain, packed = results
    assert torch.equal(plain[3], packed[3])
    assert int(plain[3].sum()) > 10
    for of_sequences, of_rows in zip(plain[:3], packed[:3], strict=True):
        assert float((of_sequences - of_rows).abs().max()) < tolerance


def branching(number: int, num_prompt: int, num_trunk: int, lengths: Sequence[int]) -> RolloutGroup:
    """A group whose responses begin with the same tokens, which nothing is learnt from."""
    rng = np.random.default_rng(number)
    prompt, trunk = rng.integers(1, VOCAB, num_prompt).tolist(), rng.integers(1, VOCAB, num_trunk).tolist()
    rollouts = [
        make_rollout(prompt, [*trunk, *rng.integers(1, VOCAB, n).tolist()], 10.0 * number + i)
        for i, n in enumerate(lengths)
    ]
    own = [r.loss_mask & (np.arange(len(r.token_ids)) >= num_prompt + num_trunk) for r in rollouts]
    return make_group(f"g{number}", [replace(r, loss_mask=mask) for r, mask in zip(rollouts, own, strict=True)])


@pytest.mark.parametrize("max_positions", [1000, 8])
def test_groups_that_branch_are_packed_though_no_target_is_near_a_prompt(max_positions: int) -> None:
    groups = [branching(1, 2, 6, (5, 1, 3)), branching(2, 4, 3, (2, 1)), branching(3, 3, 9, (1,))]
    results = []
    for packing in (False, True):
        tensors = tensors_of(the_microbatch(groups, packing=packing), CPU)
        model = seeded(gpt2)
        asked = LanguageModel(
            call=model, module=model, dtype=torch.float64, max_positions=max_positions if packing else None
        )
        results.append(figures_of(asked, PLAIN, tensors))
    assert tensors.shared is not None
    assert tensors.shared.is_packed
    # The earliest target is the eighth token of the second group: logits are wanted from the seventh on, behind all
    # prompts. Rows of 2 + 3 x 6 + 9 = 29 tokens, and of 4 + 2 x 3 + 3 = 13 and 3 + 9 + 1 = 13.
    assert tensors.shared.token_ids_RL.shape == (2, 29)
    assert tensors.shared.first == 6
    assert int(tensors.shared.at_BJ.min()) >= 0
    plain, packed = results
    # 5 + 1 + 3, 2 + 1 and 1 targets.
    assert torch.equal(plain[3], packed[3])
    assert int(plain[3].sum()) == 13
    for of_sequences, of_rows in zip(plain[:3], packed[:3], strict=True):
        assert float((of_sequences - of_rows).abs().max()) < 1e-9


def with_reward(rollout: Any, reward: float) -> Any:
    ids, num_prompt = rollout.token_ids.tolist(), rollout.num_prompt_tokens
    return make_rollout(ids[:num_prompt], ids[num_prompt:], reward)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("max_positions", [None, 8])
def test_no_sequence_sees_another(make: Callable[[], Any], share_prompts: bool, max_positions: int | None) -> None:
    microbatch = the_microbatch(groups_of(MIXED), share_prompts=share_prompts)
    assert microbatch.block_B is not None
    model = seeded(make)
    asked = LanguageModel(call=model, module=model, dtype=torch.float64, max_positions=max_positions)

    def logprobs(ids: np.ndarray[Any, Any]) -> torch.Tensor:
        tensors = tensors_of(replaced(microbatch, ids), CPU)
        with torch.no_grad():
            found, _ = asked.logprobs(PLAIN, tensors.targets)
        return torch.where(tensors.mask_BK, found, 0.0)

    before = logprobs(microbatch.token_ids_BT)
    for changed in range(len(microbatch.lengths_B)):
        # Every token of its response is another: nothing moves in the others, not by a bit.
        ids, num_prompt = microbatch.token_ids_BT.copy(), int(microbatch.num_prompt_B[changed])
        to = slice(num_prompt, int(microbatch.lengths_B[changed]))
        ids[changed, to] = (ids[changed, to] + 3) % VOCAB
        after = logprobs(ids)
        same = [torch.equal(before[i], after[i]) for i in range(len(before))]
        assert same == [i != changed for i in range(len(before))]


def test_no_sequence_sees_the_prompt_of_another_block() -> None:
    microbatch = the_microbatch(groups_of(MIXED))
    assert microbatch.block_B is not None
    model = seeded(llama)
    asked = LanguageModel(call=model, module=model, dtype=torch.float64, max_positions=None)
    found = []
    for shift in (0, 3):
        ids = microbatch.token_ids_BT.copy()
        block = microbatch.block_B == microbatch.block_B[-1]
        ids[block, : int(microbatch.num_prompt_B[-1])] += shift
        tensors = tensors_of(replaced(microbatch, ids % VOCAB), CPU)
        with torch.no_grad():
            found.append(asked.logprobs(PLAIN, tensors.targets)[0])
    same = [torch.equal(found[0][i][m], found[1][i][m]) for i, m in enumerate(tensors.mask_BK)]
    assert same == [bool(other) for other in ~block]


def replaced(microbatch: Microbatch, ids: np.ndarray[Any, Any]) -> Microbatch:
    return replace(microbatch, token_ids_BT=ids)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("packing", [True, False])
def test_a_model_that_keeps_sequences_apart_is_told_from_one_that_does_not(
    make: Callable[[], Any], packing: bool
) -> None:
    model = seeded(make)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # of a fresh model attention moves little
    asked = LanguageModel(call=model, module=model, dtype=torch.float64, max_positions=None)
    assert gap_of_rows(asked, PLAIN, VOCAB, CPU, packing=packing) < 1e-5

    def causal(**inputs: Any) -> Any:
        """Takes no mask of ours: every token sees all before it."""
        return model(**{name: value for name, value in inputs.items() if name != "attention_mask"})

    blind = LanguageModel(call=causal, module=model, dtype=torch.float64, max_positions=None)
    assert gap_of_rows(blind, PLAIN, VOCAB, CPU, packing=packing) > 1e-3
