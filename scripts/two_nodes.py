"""Trains over two nodes of a Ray cluster, cuts the cable of one of them for a while, and looks at what becomes of it.

Both nodes are network namespaces of this machine, joined by a bridge, each with a Ray of its own whose files the other
does not see. The command, buffer, curator, a learner of two ranks and a sampler are on the first; on the second is a
sampler that gets all it needs over keyed sockets, weights included. Between the groups the sampler of the first node,
where the run's folder is, scores held-out problems every few steps. With `--learner-spread` the two share the run's
folder instead, and the second rank of the learner is on the second node: while the cable is cut the learner waits, and
goes on in the same processes. Needs root, for namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from namespaces import ROOT, Node, two_nodes

BIN = Path(sys.executable).parent
PORT = 6379
BEGIN_S, RUN_S = 300.0, 540.0
EVALUATED = 8
"""Held-out problems of an evaluation during training."""


class Failed(Exception):
    """The run did not do what it should; the message says what."""


def start_ray(first: Node, second: Node, folder: Path, *, spreads: bool) -> None:
    """A head node with room for all but one sampler, and one with room for that sampler; or each for half of all."""
    ray = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats", f"--object-store-memory={80 << 20}"]
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--num-cpus={2 if spreads else 3}"]
    first.start([*ray, *head, f"--node-ip-address={first.address}"], folder / "ray1.log")
    wait("Ray's head", lambda: "Ray runtime started" in (folder / "ray1.log").read_text(), 120)
    worker = [
        f"--address={first.address}:{PORT}",
        f"--num-cpus={2 if spreads else 1}",
        f"--node-ip-address={second.address}",
    ]
    second.start([*ray, *worker], folder / "ray2.log")
    wait("Ray's second node", lambda: "Ray runtime started" in (folder / "ray2.log").read_text(), 120)


def wait(whom: str, holds: Callable[[], bool], limit_s: float) -> float:
    """Until it holds; the seconds that took. Raises Failed."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > limit_s:
            raise Failed(f"{whom}: nothing within {limit_s:.0f} s")
        time.sleep(0.5)
    return time.monotonic() - begun


class Training:
    """The run, as its command and its folder show it."""

    def __init__(
        self, node: Node, models: Path, folder: Path, num_steps: int, evaluate_every: int, *, spreads: bool
    ) -> None:
        self.dir, self._log = folder / "runs" / "r", folder / "train.log"
        settings: dict[str, object] = {
            "run.root": folder / "runs",
            "run.name": "r",
            "run.num_steps": num_steps,
            "model.path": models / "model",
            "pool.files": json.dumps([str(models / "pool.jsonl")]),
            "evaluation.files": json.dumps([str(models / "heldout.jsonl")]),
            "evaluation.num_problems": 0,
            "evaluation.interval": evaluate_every,
            "evaluation.interval_problems": EVALUATED,
            "evaluation.interval_samples": 1,
            "cluster.address": f"{node.address}:{PORT}",
            **({"cluster.learner": "spread"} if spreads else {"cluster.node_root": folder / "node2"}),
            "sampler.num_samplers": 2,
            "sampler.group_size": 8,
            "sampler.max_num_seqs": 64,
            "sampler.kv_cache_bytes": 64 << 20,
            "learner.num_ranks": 2,
            "learner.zero_stage": 2,
            "learner.checkpoint_interval": 20,
            "stream.groups_per_step": 8,
            "stream.ticket_timeout_s": 10,
            "stream.partial_interval_s": 2,
            "tracking.dashboard": "false",
            "tracking.wandb": "disabled",
        }
        options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        config = str(ROOT / "configs" / "arithmetic-cpu.toml")
        command = [sys.executable, "-m", "stream_grpo.cli", "train", config, *options]
        self.process = node.start(command, self._log)

    @property
    def output(self) -> str:
        """What it has said."""
        return self._log.read_text()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Of its metrics."""
        path = self.dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in found if line["event"] == event]

    @property
    def step(self) -> int:
        """The newest learner step."""
        return max((line["step"] for line in self.lines("step")), default=0)

    def sampler(self, name: str) -> dict[str, Any]:
        """The newest status of one."""
        return next((line for line in reversed(self.lines("status")) if line["part"] == name), {})

    def until(self, whom: str, holds: Callable[[], bool], limit_s: float) -> float:
        """As `wait`. Raises Failed with the output where the run ends before."""

        def holds_or_ended() -> bool:
            if self.process.poll() is not None and not holds():
                raise Failed(
                    f"{whom}: the run ended before, exit code {self.process.returncode}:\n{self.output[-4000:]}"
                )
            return holds()

        return wait(whom, holds_or_ended, limit_s)


def samplers_by_node(run_dir: Path) -> dict[str, str]:
    """The name of the sampler on each node, as the run says by order."""
    command = [sys.executable, "-m", "stream_grpo.cli", "samplers", str(run_dir), "--json"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {sampler["node"]: sampler["name"] for sampler in json.loads(said)["samplers"]}


def check(
    models: Path, folder: Path, num_steps: int, cut_s: float, evaluate_every: int, *, spreads: bool
) -> dict[str, Any]:
    """Train, cut, mend, end. Raises Failed."""
    with two_nodes(folder) as (first, second):
        start_ray(first, second, folder, spreads=spreads)
        training = Training(first, models, folder, num_steps, evaluate_every, spreads=spreads)
        training.until("the first steps", lambda: training.step >= 3, BEGIN_S)
        by_node = samplers_by_node(training.dir)
        if by_node.keys() != {first.address, second.address}:
            raise Failed(f"one sampler on each node was expected, found {by_node}")
        if not first.runs("learner") or second.runs("learner-1") != spreads:
            raise Failed(f"learner-1 on the {'second' if spreads else 'first'} node was expected")
        far = by_node[second.address]
        training.until(f"groups of {far}", lambda: training.sampler(far).get("num_groups_done", 0) > 0, 60)
        outage = cut_and_mend(training, second, far, cut_s, spreads=spreads) if cut_s else {}
        training.until("the end", lambda: training.process.poll() is not None, RUN_S)
        if training.process.returncode:
            raise Failed(f"exit code {training.process.returncode}:\n{training.output[-4000:]}")
        summary = json.loads((training.dir / "summary.json").read_text())
        refused = {
            part: next(line["wire_refused"] for line in reversed(training.lines("status")) if line["part"] == part)
            for part in ("buffer", "curator", *([] if spreads else ["weights"]))
        }
        pulled = folder / "node2" / "r" / far / "weights"
        found = {
            "steps": summary["steps"],
            **outage,
            "ledger_closes": summary["ledger_closes"],
            "lost_in_sampler": summary["lost_in_sampler"],
            "groups": summary["groups"],
            "evaluated_steps": evaluated_steps(training, None if spreads else by_node[first.address], evaluate_every),
            "evaluation_tokens": summary["tokens"]["evaluation"],
            "restarts": training.output.count(" again ("),
            "wire_refused": refused,
            "weights_pulled": [] if spreads else sorted(path.name for path in pulled.iterdir()),
        }
        if summary["steps"] != num_steps or not summary["ledger_closes"] or found["restarts"]:
            raise Failed(json.dumps(found))
        return found


def cut_and_mend(training: Training, node: Node, far: str, cut_s: float, *, spreads: bool) -> dict[str, Any]:
    """Without the cable for so long, and until its sampler `far` is heard of again. Raises Failed."""
    before, version = training.step, training.sampler(far)["version"]
    node.cut()
    time.sleep(cut_s)
    during = training.step - before
    done, mended_at = training.sampler(far)["num_groups_done"], training.step
    node.mend()
    back_s = training.until(
        f"{far} after the cable came back",
        lambda: training.sampler(far)["num_groups_done"] > done and training.sampler(far)["version"] > version,
        90,
    )
    found = {"steps_while_cut": during, "step_when_mended": mended_at, "back_after_s": round(back_s, 1)}
    # A learner on both nodes makes no step without the cable, but for one that is under way.
    if not (during <= 1 if spreads else during >= 1):
        raise Failed(json.dumps(found))
    return found


def evaluated_steps(training: Training, by: str | None, every: int) -> list[int]:
    """The steps whose weights held-out problems were scored with, all of them by one sampler, `by` where it is given.

    Raises Failed where one is missing or was not whole. An evaluation holds the weights, so that a step of the grid
    may be passed over; the first is not, and the last weights are never evaluated.
    """
    if not every:
        return []
    lines = training.lines("evaluation")
    who, sizes = {line["source"] for line in lines}, {len(line["problems"]) for line in lines}
    steps = [int(line["step"]) for line in lines]
    if sizes != {EVALUATED} or len(who) != 1 or (by is not None and who != {by}) or not every <= steps[0] < 2 * every:
        raise Failed(f"evaluations every {every} steps, of {EVALUATED} problems by {by}: {sizes} by {who}, of {steps}")
    return steps


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--models", type=Path, help="folder of make-model")
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--cut", type=float, default=20.0, help="seconds without the cable; 0: it is not cut")
    arguments.add_argument(
        "--evaluate-every", type=int, default=10, help="evaluation.interval; 0: none during training"
    )
    arguments.add_argument("--learner-spread", action="store_true", help="a rank of the learner on each node")
    arguments.add_argument("--keep", action="store_true", help="keep the folder of the run and of all logs")
    chosen = arguments.parse_args()
    if os.geteuid() != 0:
        sys.exit("two_nodes: needs root, to make network namespaces (ip netns)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what takes the namespaces away
    folder = Path(tempfile.mkdtemp(prefix="sg-two-nodes-"))
    try:
        models = chosen.models
        if models is None:
            models = folder / "models"
            subprocess.run([sys.executable, "-m", "stream_grpo.cli", "make-model", str(models)], check=True, cwd=ROOT)
        found = check(
            models.resolve(), folder, chosen.steps, chosen.cut, chosen.evaluate_every, spreads=chosen.learner_spread
        )
    except Failed as error:
        sys.exit(f"two_nodes: {error}\nlogs: {folder}")
    if chosen.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))
    if not chosen.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
