"""What it saves to share prompts and to pack rows: seconds of forward and backward, and how gradients differ.

The real learner engine on a model folder, or on random weights of the size of SmolLM2-135M; one batch of groups with
long prompts and short responses, or the last ones that a run trained on (`--run`). Each sequence a row; prompts shared;
rows packed; both: in turns, the fastest of each. Prints ratios to the first, and what the learner would have chosen.
With `--json` a last line with all of it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.config_file import load_run
from stream_grpo.config_learner import Learner
from stream_grpo.learner.batching import Microbatch, Minibatch, Scored, TrainBatch, make_train_batch
from stream_grpo.learner.engine import LearnerEngine
from stream_grpo.learner.figures import figures_of_batch
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import Distribution
from stream_grpo.rollouts.views import Groups, journal_of
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import Decision, EndReason, RewardResult, Rollout, RolloutGroup

WAYS: dict[str, tuple[bool, bool]] = {
    "plain": (False, False),
    "shared": (True, False),
    "packed": (False, True),
    "both": (True, True),
}
"""Whether prompts are shared, and rows packed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; by default random weights of SmolLM2-135M's size")
    parser.add_argument("--run", type=Path, help="a run whose last groups are taken")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--microbatch-tokens", type=int, help="by default those of the run, or 4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one group and one round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.groups, arguments.rounds = 1, 1
    if arguments.microbatch_tokens is None:
        of_run = arguments.run and load_run(arguments.run.resolve()).learner.microbatch_tokens
        arguments.microbatch_tokens = of_run or 4096
    with tempfile.TemporaryDirectory() as name:
        model = arguments.model or random_model(Path(name))
        learner = Learner(
            num_threads=arguments.threads, microbatch_tokens=arguments.microbatch_tokens, zero_stage=0, packing=True
        )
        engine = LearnerEngine(
            model, learner=learner, recipe=PRESETS[DEFAULT].recipe, dtype=arguments.dtype,
            distribution=Distribution(temperature=1.0), seed=0,
        )  # fmt: skip
        result = measured(engine, arguments)
        engine.close()
    for way, found in result["ways"].items():
        print(
            f"{way}: {found['tokens']:,} tokens in {found['microbatches']} microbatches, {found['padding_share']:.0%} "
            f"padding, {found['seconds']:.3f} s, {found['speedup']:.2f} times as fast; "
            f"gradients differ by {found['gradient_gap']:.1e} of their norm"
        )
    print(f"chosen by itself: {result['chosen']}")
    if arguments.json:
        print(json.dumps(result))


def random_model(directory: Path) -> Path:
    """SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def measured(engine: LearnerEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways in turns; the fastest of each."""
    if arguments.run:
        groups = recorded(arguments.run, arguments.groups)
    else:
        groups = [make_group(number, arguments, engine.vocab_size) for number in range(arguments.groups)]

    def batch(way: tuple[bool, bool], attention_cost: float | None) -> TrainBatch:
        return make_train_batch(
            groups, by_reward, vocab_size=engine.vocab_size, microbatch_tokens=arguments.microbatch_tokens,
            attention_cost=attention_cost, share_prompts=way[0], packing=way[1],
        )  # fmt: skip

    # Sharing is shown where it would not be chosen too; which rows are packed depends on what attention costs.
    costs = {"plain": None, "shared": 0.0}
    batches = {name: batch(way, costs.get(name, engine.attention_cost)) for name, way in WAYS.items()}
    best = dict.fromkeys(batches, math.inf)
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(arguments.rounds):
        for way, train_batch in batches.items():
            begun = time.perf_counter()
            gradients[way] = gradient(engine, train_batch.minibatches[0])
            best[way] = min(best[way], time.perf_counter() - begun)
    chosen = batch(WAYS["both"], engine.attention_cost).minibatches[0].microbatches
    ways = {
        way: {
            "seconds": best[way],
            "speedup": best["plain"] / best[way],
            "tokens": sum(computed(m) for m in train_batch.minibatches[0].microbatches),
            "microbatches": len(train_batch.minibatches[0].microbatches),
            "padding_share": figures_of_batch(train_batch)["padding_share"],
            "gradient_gap": float((gradients["plain"] - gradients[way]).norm() / gradients["plain"].norm()),
        }
        for way, train_batch in batches.items()
    }
    return {"ways": ways, "chosen": named(chosen), "attention_cost": engine.attention_cost}


def named(microbatches: Sequence[Microbatch]) -> str:
    """Which of the ways they are."""
    counts = [
        (len(np.unique(m.row_B)), len(np.unique(m.block_B)), len(m.lengths_B))
        for m in microbatches
        if m.row_B is not None and m.block_B is not None
    ]
    packs = any(num_rows < num_blocks for num_rows, num_blocks, _ in counts)
    shares = any(num_blocks < num_sequences for _, num_blocks, num_sequences in counts)
    return {way: name for name, way in WAYS.items()}[shares, packs]


def recorded(run: Path, num_groups: int) -> list[RolloutGroup]:
    """The last groups that a run trained on, from its journal."""
    groups = Groups(journal_of(run))
    made = [(view.made, name) for name, view in groups.views.items() if view.made is not None]
    return [decode_group(groups.data(groups.views[name])) for _, name in sorted(made)[-num_groups:]]


def computed(microbatch: Microbatch) -> int:
    """Tokens of its forward pass, padding included."""
    shared = tensors_of(microbatch, torch.device("cpu")).shared
    return microbatch.token_ids_BT.size if shared is None else shared.token_ids_RL.numel()


def gradient(engine: LearnerEngine, minibatch: Minibatch) -> torch.Tensor:
    """Of the mean logprob of the target tokens, all weights in a row; cleared afterwards."""
    for microbatch in minibatch.microbatches:
        tensors = tensors_of(microbatch, engine.device)
        logprobs_BK, _ = engine.logprobs(tensors.targets)
        engine.backward(torch.where(tensors.mask_BK, logprobs_BK, 0.0).sum() / minibatch.num_tokens)
    module = engine._module
    found = torch.cat([p.grad.float().flatten() for p in module.parameters() if p.grad is not None])
    module.zero_grad(set_to_none=True)
    return found


def by_reward(rewards_B: np.ndarray, valid_B: np.ndarray, *_: object) -> Scored:
    """Any advantages: they are not looked at."""
    return Scored(np.nan_to_num(rewards_B), valid_B)


def make_group(number: int, arguments: argparse.Namespace, vocab_size: int) -> RolloutGroup:
    """Responses of 1/2 to 3/2 of the wanted length."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(1, vocab_size, arguments.prompt_tokens)
    shortest = max(1, arguments.response_tokens // 2)
    rollouts = []
    for index in range(arguments.group_size):
        response = rng.integers(1, vocab_size, rng.integers(shortest, 3 * shortest + 1))
        ids = np.concatenate([prompt, response]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        versions = np.where(mask, 0, -1).astype(np.int32)
        reward = RewardResult(decision=Decision.PASS, reward=float(index), verifier="exact", verifier_version="1")
        rollouts.append(
            Rollout(
                token_ids=ids, num_prompt_tokens=len(prompt), loss_mask=mask,
                behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32), version_branch=versions,
                version_step=versions, turn=np.zeros(len(ids), np.int16), end_reason=EndReason.EOS, seed=index,
                reward=reward,
            )
        )  # fmt: skip
    return RolloutGroup(
        group_id=f"g{number}", owner_epoch=0, problem_id=f"p{number}", domain="d", sampler_id="s", ticket_step=0,
        config_hash="c", dispatched_at_s=0.0, finished_at_s=1.0, rollouts=tuple(rollouts),
    )  # fmt: skip


if __name__ == "__main__":
    main()
