"""What metrics cost, as a share of a learner step of a recorded run.

In the learner: the figures of groups and batch, and the line; this time is taken from training. In the launcher: all
lines between two steps through alarms, pace, console (as a terminal and not), W&B offline, TensorBoard and Prometheus;
it is another process, that has nothing else to do. Processor time on one thread, median of many; the groups are drawn
as large as the recorded run's. A learner step is the median of `step_s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from stream_grpo.alarms import Alarms
from stream_grpo.config_alarms import Alarms as Limits
from stream_grpo.learner.batching import Scored, TrainBatch, make_train_batch
from stream_grpo.learner.figures import figures_of_batch, figures_of_groups
from stream_grpo.metrics import MetricsLog
from stream_grpo.pace.panel import panel
from stream_grpo.pace.watch import PaceWatch
from stream_grpo.sinks.prometheus import PrometheusSink
from stream_grpo.sinks.tensorboard import TensorBoardSink
from stream_grpo.sinks.wandb_sink import WandbSink
from stream_grpo.types import Decision, EndReason, RewardResult, Rollout, RolloutGroup

RECORDED = Path("tests/data/metrics_run.jsonl")
GROUP_SIZE, GOAL = 16, 0.01
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="a run folder; default: the recorded one of the tests")
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    options = parser.parse_args()
    path = options.run / "metrics.jsonl" if options.run else RECORDED
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    step_s = statistics.median(line["step_s"] for line in steps)
    learner = learner_s(steps[-1])
    launcher = launcher_s(lines, len(steps))
    print(f"a learner step: {step_s:.3f} s, {len(lines) / len(steps):.1f} lines a step")
    for title, parts in (("learner", learner), ("launcher", launcher)):
        for name, seconds in {**parts, "all": sum(parts.values())}.items():
            print(f"{title:9} {name:12} {1000 * seconds:8.3f} ms  {seconds / step_s:7.2%}")
    shares = {"learner_share": sum(learner.values()) / step_s, "launcher_share": sum(launcher.values()) / step_s}
    print(f"goal: learner under {GOAL:.0%} of a step")
    if options.json:
        print(json.dumps({"step_s": step_s, "learner_s": learner, "launcher_s": launcher, **shares}))


def learner_s(step: Line) -> dict[str, float]:
    """Seconds of each part for one step."""
    groups = drawn_groups(step["num_groups"], step["response_tokens_mean"])
    batch = batch_of(groups)
    line = {**step, **figures_of_groups(groups), **figures_of_batch(batch)}
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsLog(Path(folder), "learner")
        found = {
            "figures": median_s(lambda: (figures_of_groups(groups), figures_of_batch(batch))),
            "writer": median_s(lambda: log.write("step", line)),
        }
        log.close()
    return found


def launcher_s(lines: list[Line], num_steps: int) -> dict[str, float]:
    """Seconds of each part for all lines of one step."""
    alarms, pace, panels = Alarms(Limits(), "float32"), PaceWatch(num_steps), PaceWatch(num_steps)

    def draw(line: Line) -> None:
        panels.take(line)
        panel(panels.now(), num_steps)

    with tempfile.TemporaryDirectory() as folder:
        sinks = {
            "W&B": WandbSink(Path(folder), "bench", "bench", "offline", {}),
            "TensorBoard": TensorBoardSink(Path(folder), 0.0),
            "Prometheus": PrometheusSink("bench", 0),
        }
        parts: dict[str, Callable[[Line], object]] = {"alarms": alarms.take, "pace": pace.take, "panel": draw}
        parts |= {name: sink.write for name, sink in sinks.items()}
        found = {name: in_all_s(take, lines) / num_steps for name, take in parts.items()}
        for sink in sinks.values():
            sink.finish({})
    return found


def median_s(act: Callable[[], object], num: int = 50) -> float:
    """Processor time of one call."""
    return statistics.median(in_all_s(lambda _: act(), [None]) for _ in range(num))


def in_all_s(take: Callable[[Any], object], items: Iterable[Any]) -> float:
    """Processor time of one call for each item, together."""
    begun = time.thread_time()
    for item in items:
        take(item)
    return time.thread_time() - begun


def drawn_groups(num_groups: int, mean_tokens: float) -> list[RolloutGroup]:
    """Groups as a run has them: every response is another one, half of them right, three components of the reward."""
    rng = np.random.default_rng(0)
    return [
        RolloutGroup(
            group_id=f"g{number}", owner_epoch=0, problem_id=f"p{number}", domain=f"d{number % 6}",
            sampler_id="sampler-0", ticket_step=0, config_hash="", dispatched_at_s=0.0, finished_at_s=1.0,
            rollouts=tuple(drawn_rollout(rng, mean_tokens) for _ in range(GROUP_SIZE)),
        )
        for number in range(num_groups)
    ]  # fmt: skip


def drawn_rollout(rng: np.random.Generator, mean_tokens: float) -> Rollout:
    """One rollout after 16 tokens of prompt."""
    num_response, right = max(1, int(rng.gamma(4, mean_tokens / 4))), bool(rng.random() < 0.5)
    length = 16 + num_response
    mask = np.arange(length) >= 16
    return Rollout(
        token_ids=rng.integers(0, 1000, length).astype(np.int32),
        num_prompt_tokens=16,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_branch=np.where(mask, 0, -1).astype(np.int32),
        version_step=np.where(mask, 0, -1).astype(np.int32),
        turn=np.zeros(length, np.int16),
        end_reason=EndReason.EOS,
        seed=0,
        reward=RewardResult(
            decision=Decision.PASS if right else Decision.FAIL, reward=float(right), verifier="exact",
            verifier_version="1", components={"score": float(right), "style": rng.random(), "length": 0.5},
            evidence=f"answer {rng.integers(100)}, expected 7",
        ),
    )  # fmt: skip


def batch_of(groups: list[RolloutGroup]) -> TrainBatch:
    """With an advantage for every rollout."""

    def advantages(rewards_B: np.ndarray, *_: object) -> Scored:
        return Scored(rewards_B - rewards_B.mean(), np.ones(len(rewards_B), bool))

    return make_train_batch(groups, advantages, vocab_size=1000, microbatch_tokens=2048)


if __name__ == "__main__":
    main()
