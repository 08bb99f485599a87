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
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import made, page
from benchmarks.one_batch import by_reward, engine_of, made_groups, parser_of, passed
from benchmarks.page import Goal, goals, table

from stream_grpo.config_file import load_run
from stream_grpo.learner.batching import Microbatch, Minibatch, TrainBatch, make_train_batch
from stream_grpo.learner.engine import LearnerEngine
from stream_grpo.learner.figures import figures_of_batch
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.rollouts.views import Groups, journal_of
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import RolloutGroup

WAYS: dict[str, tuple[bool, bool]] = {
    "plain": (False, False),
    "shared": (True, False),
    "packed": (False, True),
    "both": (True, True),
}
"""Whether prompts are shared, and rows packed."""
MIN_SPEEDUP = 2.0
"""The goal for shared prompts."""


def main() -> None:
    parser = parser_of(__doc__, prompt_tokens=100, response_tokens=16, rounds=3)
    parser.add_argument("--run", type=Path, help="a run whose last groups are taken")
    parser.add_argument("--microbatch-tokens", type=int, help="by default those of the run, or 4096")
    parser.add_argument("--quick", action="store_true", help="one group and one round")
    parser.add_argument("--page", type=Path, help="write a section there; docs/benchmarks.md has it of a real model")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.groups, arguments.rounds = 1, 1
    if arguments.microbatch_tokens is None:
        of_run = arguments.run and load_run(arguments.run.resolve()).learner.microbatch_tokens
        arguments.microbatch_tokens = of_run or 4096
    with engine_of(arguments, packing=True) as engine:
        result = measured(engine, arguments)
    for way, found in result["ways"].items():
        print(
            f"{way}: {found['tokens']:,} tokens in {found['microbatches']} microbatches, {found['padding_share']:.0%} "
            f"padding, {found['seconds']:.3f} s, {found['speedup']:.2f} times as fast; "
            f"gradients differ by {found['gradient_gap']:.1e} of their norm"
        )
    print(f"chosen by itself: {result['chosen']}")
    if arguments.page:
        page.put(
            arguments.page,
            "bench_prompts",
            "A group's prompt once",
            section(result, arguments),
            is_quick=arguments.quick,
            command=made.command("bench_prompts", sys.argv[1:]),
            say=print,
        )
    if arguments.json:
        print(json.dumps(result))


def section(result: dict[str, Any], arguments: argparse.Namespace) -> str:
    """The section in docs/benchmarks.md."""
    if arguments.run:
        about = f"The last {arguments.groups} groups that a run trained on"
    else:
        about = (
            f"{arguments.groups} groups of {arguments.group_size} rollouts, prompts of {arguments.prompt_tokens} "
            f"tokens, responses of about {arguments.response_tokens}"
        )
    rows = [
        (
            way,
            f"{found['tokens']:,}",
            str(found["microbatches"]),
            f"{found['padding_share']:.0%}",
            f"{found['seconds']:.2f}",
            f"{found['speedup']:.2f}",
            f"{found['gradient_gap']:.1e}",
        )
        for way, found in result["ways"].items()
    ]
    heads = ("rows", "tokens", "microbatches", "padding", "seconds", "times as fast", "gap of gradients, of their norm")
    model = "a model folder" if arguments.model else "random weights of SmolLM2-135M's size"
    shared = result["ways"]["shared"]["speedup"]
    return "\n\n".join(
        [
            f"Forward and backward on {model}, {arguments.dtype}, {arguments.threads} threads. {about}; the fastest of "
            f"{arguments.rounds} rounds.",
            table(heads, rows),
            goals([Goal("shared", shared, MIN_SPEEDUP)]),
            f"Chosen by itself: {result['chosen']}.",
        ]
    )


def measured(engine: LearnerEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways in turns; the fastest of each."""
    groups = recorded(arguments.run, arguments.groups) if arguments.run else made_groups(arguments, engine.vocab_size)

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
    passed(engine, minibatch)
    module = engine._module
    found = torch.cat([p.grad.float().flatten() for p in module.parameters() if p.grad is not None])
    module.zero_grad(set_to_none=True)
    return found


if __name__ == "__main__":
    main()
