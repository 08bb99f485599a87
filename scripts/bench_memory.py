"""What logits in pieces and activation checkpointing save: peak memory and seconds of forward and backward.

The real learner engine on a model folder, or on random weights of the size of SmolLM2-135M; one batch of groups. All
logits at once; in pieces; in pieces with layers computed again: in turns, in one process, whose peak the kernel counts
anew for each. Memory is what comes on top of weights, gradients and what was there before. Prints ratios to the first.
With `--json` a last line with all of it. Linux with glibc alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks import made, page
from benchmarks.one_batch import by_reward, engine_of, made_groups, parser_of, passed
from benchmarks.page import table

from stream_grpo.learner.batching import make_train_batch
from stream_grpo.learner.engine import LearnerEngine
from stream_grpo.learner.recompute import recompute_activations

WAYS: dict[str, tuple[bool, bool]] = {
    "all logits": (False, False),
    "in pieces": (True, False),
    "in pieces, layers again": (True, True),
}
"""Whether logits are made in pieces, and layers computed again."""


def main() -> None:
    parser = parser_of(__doc__, prompt_tokens=32, response_tokens=64, rounds=2)
    parser.add_argument("--microbatch-tokens", type=int, default=4096)
    parser.add_argument("--logits-bytes", type=int, default=64 << 20)
    parser.add_argument("--quick", action="store_true", help="one group and one round")
    parser.add_argument("--page", type=Path, help="write a section there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.groups, arguments.rounds = 1, 1
    with engine_of(arguments, logits_bytes=arguments.logits_bytes) as engine:
        found = measured(engine, arguments)
    for way, figures in found.items():
        print(
            f"{way}: {figures['peak_mib']:,.0f} MiB on top, {figures['memory']:.2f} of the first; "
            f"{figures['seconds']:.2f} s, {figures['time']:.2f} of the first; "
            f"gradients differ by {figures['gradient_gap']:.1e} of their norm"
        )
    if arguments.page:
        page.put(
            arguments.page,
            "bench_memory",
            "Memory of a learner step",
            section(found, arguments),
            is_quick=arguments.quick,
            command=made.command("bench_memory", sys.argv[1:]),
            say=print,
        )
    if arguments.json:
        print(json.dumps(found))


def section(found: dict[str, dict[str, float]], arguments: argparse.Namespace) -> str:
    """The section in docs/benchmarks.md."""
    rows = [
        (
            way,
            f"{figures['peak_mib']:,.0f} MiB",
            f"{figures['memory']:.2f}",
            f"{figures['seconds']:.2f}",
            f"{figures['time']:.2f}",
            f"{figures['gradient_gap']:.1e}",
        )
        for way, figures in found.items()
    ]
    heads = ("way", "peak on top", "of the first", "seconds", "of the first", "gap of gradients, of their norm")
    model = "a model folder" if arguments.model else "random weights of SmolLM2-135M's size"
    return "\n\n".join(
        [
            f"Forward and backward on {model}, {arguments.dtype}: {arguments.groups} groups of {arguments.group_size}, "
            f"prompts of {arguments.prompt_tokens} tokens, responses of about {arguments.response_tokens}. Memory is "
            f"what comes on top of weights and gradients.",
            table(heads, rows),
        ]
    )


def measured(engine: LearnerEngine, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All ways in turns; the fastest and the smallest of each."""
    groups = made_groups(arguments, engine.vocab_size)
    batch = make_train_batch(
        groups, by_reward, vocab_size=engine.vocab_size, microbatch_tokens=arguments.microbatch_tokens,
        attention_cost=engine.attention_cost,
    ).minibatches[0]  # fmt: skip
    seconds, peaks = dict.fromkeys(WAYS, math.inf), dict.fromkeys(WAYS, math.inf)
    gradients: dict[str, torch.Tensor] = {}
    # The first pass of a process is slower, and leaves buffers behind that later ones find.
    passed(engine, replace(batch, microbatches=batch.microbatches[:1]))
    for _ in range(arguments.rounds):
        for way, choices in WAYS.items():
            for weight in engine._module.parameters():
                weight.grad = torch.zeros_like(weight)  # there before, and no part of what comes on top
            with set_to(engine, *choices):
                before, begun = reset_peak(), time.perf_counter()
                passed(engine, batch)
                seconds[way] = min(seconds[way], time.perf_counter() - begun)
                peaks[way] = min(peaks[way], status("VmHWM") - before)
            found = [weight.grad for weight in engine._module.parameters() if weight.grad is not None]
            gradients[way] = torch.cat([gradient.float().flatten() for gradient in found])
    plain = next(iter(WAYS))
    return {
        way: {
            "peak_mib": peaks[way] / 2**20,
            "memory": peaks[way] / peaks[plain],
            "seconds": seconds[way],
            "time": seconds[way] / seconds[plain],
            "gradient_gap": float((gradients[way] - gradients[plain]).norm() / gradients[plain].norm()),
        }
        for way in WAYS
    }


@contextmanager
def set_to(engine: LearnerEngine, in_pieces: bool, recomputes: bool) -> Iterator[None]:
    """An engine as it would be under these settings."""
    policy, module = engine._policy, engine._module
    assert policy.max_positions is not None
    if not in_pieces:
        engine._policy = replace(policy, max_positions=None)
    if recomputes:
        recompute_activations(module)
    yield
    engine._policy = policy
    layers: Any = module
    layers.gradient_checkpointing_disable()


def reset_peak() -> float:
    """Have the kernel count the peak anew; returns the bytes in memory now, without what is only kept for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> float:
    """Bytes of a figure of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return float(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
