"""Trains over two nodes of a Ray cluster, cuts the cable of one of them for a while, and looks at what becomes of it.

Both nodes are network namespaces of this machine, joined by a bridge, each with a Ray of its own whose files the other
does not see. The command, buffer, curator, a learner of two ranks and a sampler are on the first; on the second is a
sampler that gets all it needs over keyed sockets, weights included. With `--learner-spread` the two share the run's
folder instead, and the second rank of the learner is on the second node: while the cable is cut the learner waits, and
goes on in the same processes. Needs root, for namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
BRIDGE, NET = "sg-bridge", "10.77.0"
PORT = 6379
BEGIN_S, RUN_S = 300.0, 540.0


class Failed(Exception):
    """The run did not do what it should; the message says what."""


def ip(*words: str) -> None:
    """Of iproute2."""
    subprocess.run(["ip", *words], check=True)


class Node:
    """A network namespace with a private /tmp/ray, held by a process that sleeps."""

    def __init__(self, number: int, folder: Path) -> None:
        self.address, self.cable = f"{NET}.{number}", f"sg-cable{number}"
        self._name, self._ray = f"sg-node{number}", folder / f"ray{number}"
        self._environment = {
            "VLLM_HOST_IP": self.address,
            "GLOO_SOCKET_IFNAME": "lo",  # the name of this machine is no address of a namespace
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        }
        self._ray.mkdir(parents=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        ip("netns", "add", self._name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        ip("link", "set", self.cable, "master", BRIDGE, "up")
        ip("-n", self._name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", self._name, "link", "set", link, "up")
        ip("-n", self._name, "route", "add", "default", "via", f"{NET}.254")
        hold = f"mount --bind {self._ray} /tmp/ray && exec sleep infinity"
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self._name, "unshare", "--mount", "sh", "-c", hold], start_new_session=True
        )
        self._children: list[subprocess.Popen[str]] = []
        time.sleep(0.5)

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
        """Run something on this node, as the leader of a session of its own."""
        with log.open("w") as output:
            child = subprocess.Popen(
                ["nsenter", "-t", str(self._holder.pid), "-n", "-m", f"--wd={ROOT}", *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | self._environment,
            )
        self._children.append(child)
        return child

    def cut(self) -> None:
        """Pull the cable at the switch: packets get lost, and nobody is told."""
        ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        """Put it back."""
        ip("link", "set", self.cable, "up")

    def runs(self, part: str) -> bool:
        """Whether a process of this node writes the log of a part."""
        for pid in self._pids():
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/1").endswith(f"/logs/{part}.log"):
                    return True
        return False

    def _pids(self) -> list[int]:
        said = subprocess.run(["ip", "netns", "pids", self._name], capture_output=True, text=True).stdout
        return [int(pid) for pid in said.split()]

    def close(self) -> None:
        """End what runs here, and take the namespace away."""
        for child in reversed(self._children):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(20)
        for pid in self._pids():  # they live in this namespace, so they are ours
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._holder.wait(10)
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", self._name)


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes on one switch."""
    # Ray's own: without it nobody may join the cluster or run anything on it.
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(32))
    ip("link", "add", BRIDGE, "type", "bridge")
    nodes: list[Node] = []
    try:
        ip("addr", "add", f"{NET}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number in (1, 2):
            nodes.append(Node(number, folder))
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.close()
        ip("link", "del", BRIDGE)


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

    def __init__(self, node: Node, models: Path, folder: Path, num_steps: int, *, spreads: bool) -> None:
        self.dir, self._log = folder / "runs" / "r", folder / "train.log"
        settings: dict[str, object] = {
            "run.root": folder / "runs",
            "run.name": "r",
            "run.num_steps": num_steps,
            "model.path": models / "model",
            "pool.files": json.dumps([str(models / "pool.jsonl")]),
            "evaluation.files": json.dumps([str(models / "heldout.jsonl")]),
            "evaluation.num_problems": 0,
            "evaluation.interval": 10,
            "evaluation.interval_problems": 8,
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


def check(models: Path, folder: Path, num_steps: int, cut_s: float, *, spreads: bool) -> dict[str, Any]:
    """Train, cut, mend, end. Raises Failed."""
    with two_nodes(folder) as (first, second):
        start_ray(first, second, folder, spreads=spreads)
        training = Training(first, models, folder, num_steps, spreads=spreads)
        training.until("the first steps", lambda: training.step >= 3, BEGIN_S)
        by_node = samplers_by_node(training.dir)
        if by_node.keys() != {first.address, second.address}:
            raise Failed(f"one sampler on each node was expected, found {by_node}")
        if not first.runs("learner") or second.runs("learner-1") != spreads:
            raise Failed(f"learner-1 on the {'second' if spreads else 'first'} node was expected")
        far = by_node[second.address]
        training.until(f"groups of {far}", lambda: training.sampler(far).get("num_groups_done", 0) > 0, 60)
        before, version = training.step, training.sampler(far)["version"]
        second.cut()
        time.sleep(cut_s)
        during = training.step - before
        done, mended_at = training.sampler(far)["num_groups_done"], training.step
        second.mend()
        back_s = training.until(
            f"{far} after the cable came back",
            lambda: training.sampler(far)["num_groups_done"] > done and training.sampler(far)["version"] > version,
            90,
        )
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
            "steps_while_cut": during,
            "step_when_mended": mended_at,
            "back_after_s": round(back_s, 1),
            "ledger_closes": summary["ledger_closes"],
            "lost_in_sampler": summary["lost_in_sampler"],
            "groups": summary["groups"],
            "evaluations": len(training.lines("evaluation")),
            "restarts": training.output.count(" again ("),
            "wire_refused": refused,
            "weights_pulled": [] if spreads else sorted(path.name for path in pulled.iterdir()),
        }
        # A learner on both nodes makes no step without the cable, but for one that is under way.
        is_as_expected = during <= 1 if spreads else during >= 1
        if not is_as_expected or summary["steps"] != num_steps or not summary["ledger_closes"] or found["restarts"]:
            raise Failed(json.dumps(found))
        return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--models", type=Path, help="folder of make-model")
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--cut", type=float, default=20.0, help="seconds without the cable")
    arguments.add_argument("--learner-spread", action="store_true", help="a rank of the learner on each node")
    arguments.add_argument("--keep", action="store_true", help="keep the folder of the run and of all logs")
    chosen = arguments.parse_args()
    if os.geteuid() != 0:
        sys.exit("two_nodes: needs root, to make network namespaces (ip netns)")
    folder = Path(tempfile.mkdtemp(prefix="sg-two-nodes-"))
    try:
        models = chosen.models
        if models is None:
            models = folder / "models"
            subprocess.run([sys.executable, "-m", "stream_grpo.cli", "make-model", str(models)], check=True, cwd=ROOT)
        found = check(models.resolve(), folder, chosen.steps, chosen.cut, spreads=chosen.learner_spread)
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
