"""Two nodes on one machine: network namespaces that a bridge joins, each with a /tmp/ray of its own. Needs root."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
BRIDGE, NET = "sg-bridge", "10.77.0"


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
