"""What the maths of a loss costs: time in `torch.exp`s and memory in tensors, for every preset.

[256, 4096] tokens in float32 on one thread. Time is processor time of forward and backward of `policy_loss` with its
statistics, best of several, over that of `torch.exp` of such a tensor in the same run; the two take turns. Memory is
the peak of what torch has allocated beyond the inputs during one forward and backward (its profiler's record of every
allocation and release), in tensors of that size: the gradient of the logprobs is one of them. m2po's bound is made
once per batch and is reported apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stream_grpo.algo.aggregate import BatchCounts, denominator
from stream_grpo.algo.log_ratio import log_ratio
from stream_grpo.algo.loss import LossInputs, policy_loss
from stream_grpo.algo.mask import outward, second_moment_bound
from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe, given

SHAPE = (256, 4096)
GROUP = 8
NUM_EXPS = 20
"""Timed in one go: about as long as the work they are compared with, so that what else runs slows both down."""
MAX_EXPS, MAX_TENSORS = 30.0, 8.0
"""The goals."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    parser.add_argument("--repeats", type=int, default=7, help="the best of so many counts")
    parser.add_argument("--only", nargs="*", choices=list(PRESETS), help="these presets alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = draw()
    figures: dict[str, dict[str, float]] = {}
    print(f"{'preset':12} {'exps':>6} {'tensors':>8}")
    for name in options.only or PRESETS:
        work = work_of(PRESETS[name].recipe, inputs)
        figures[name] = {"exps": round(exps(work, options.repeats), 2), "tensors": round(tensors(work), 2)}
        print(f"{name:12} {figures[name]['exps']:6.1f} {figures[name]['tensors']:8.2f}", flush=True)
    worst = {f"worst_{unit}": max(row[unit] for row in figures.values()) for unit in ("exps", "tensors")}
    bound = exps(lambda: bound_of(PRESETS["m2po"].recipe, inputs), options.repeats)
    print(f"m2po's bound over the whole batch: {bound:.1f} exps, once per learner step")
    print(f"goals: under {MAX_EXPS:g} exps and {MAX_TENSORS:g} tensors; worst {worst}")
    if options.json:
        print(json.dumps({"presets": figures, **worst, "second_moment_bound_exps": round(bound, 2)}))


def draw() -> LossInputs:
    """Ragged answers of 1 to 4096 tokens, sampled by policies of many ages; a tenth of a nat between policies."""
    torch.manual_seed(0)
    lengths_B = torch.randint(1, SHAPE[1] + 1, SHAPE[:1])
    tokens_B = lengths_B
    behavior_BT = -torch.rand(SHAPE).square() * 3
    start_BT = (behavior_BT + 0.1 * torch.randn(SHAPE)).clamp(max=0)
    return LossInputs(
        policy_logprobs_BT=(start_BT + 0.02 * torch.randn(SHAPE)).clamp(max=0).requires_grad_(),
        behavior_logprobs_BT=behavior_BT,
        advantage_BT=torch.randn(SHAPE[0], 1).expand(SHAPE),
        mask_BT=torch.arange(SHAPE[1]) < lengths_B.unsqueeze(1),
        tokens_B=tokens_B,
        problem_tokens_B=tokens_B.view(-1, GROUP).sum(dim=1).repeat_interleave(GROUP),
        age_BT=torch.randint(0, 16, (SHAPE[0], 1)).expand(SHAPE).contiguous(),
        regularized_B=torch.ones(SHAPE[0], dtype=torch.bool),
        start_logprobs_BT=start_BT,
        differs_BT=torch.ones(SHAPE, dtype=torch.bool),
    )


def work_of(recipe: Recipe, inputs: LossInputs) -> Callable[[], None]:
    """Forward and backward of a recipe on its inputs: the start of the step only where the recipe looks at it."""
    if recipe.proximal != "recomputed":
        inputs = inputs._replace(start_logprobs_BT=None)
    num_tokens, num_groups = int(inputs.tokens_B.sum()), SHAPE[0] // GROUP
    counts = BatchCounts(num_tokens, SHAPE[0], num_groups, SHAPE[0] * SHAPE[1])
    settings: dict[str, Any] = {"denominator": denominator(recipe.aggregation, counts)}
    if recipe.mask_second_moment is not None:
        settings["second_moment_bound"] = bound_of(recipe, inputs)

    def work() -> None:
        loss, _ = policy_loss(recipe, inputs, **settings)
        torch.autograd.grad(loss, inputs.policy_logprobs_BT)

    return work


@torch.no_grad()
def bound_of(recipe: Recipe, inputs: LossInputs) -> float:
    """m2po's bound as a learner step makes it, over all tokens that have moved outward."""
    R = log_ratio("token", inputs.policy_logprobs_BT, inputs.behavior_logprobs_BT, inputs.mask_BT)
    log_R_BT = R.log_ratio_BT
    moved = log_R_BT[inputs.mask_BT & outward(log_R_BT, inputs.advantage_BT)]
    return float(second_moment_bound(moved, tau=given(recipe.mask_second_moment)))


def exps(work: Callable[[], object], repeats: int) -> float:
    """Best time of the work over the best of `torch.exp`, in turns, each turn as long as the other."""
    x = torch.randn(SHAPE)

    def many_exps() -> None:
        for _ in range(NUM_EXPS):
            torch.exp(x)

    turns = [(seconds(work), seconds(many_exps)) for _ in range(repeats)]
    works, units = zip(*turns, strict=True)
    return float(min(works) / min(units) * NUM_EXPS)


def seconds(work: Callable[[], object]) -> float:
    """Of processor time: what else the machine does is not counted."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def tensors(work: Callable[[], None]) -> float:
    """Peak of allocated minus released bytes during the work, in float32 tensors of [256, 4096]."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    held = peak = 0
    events = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / (4 * SHAPE[0] * SHAPE[1])


if __name__ == "__main__":
    main()
