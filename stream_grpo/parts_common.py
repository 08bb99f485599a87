"""What the builders of a run's parts share: names, keys and files of the run. Knows no Ray."""

from __future__ import annotations

from threading import Event
from typing import Any, Protocol

from curator.schema import PROBLEM_SCHEMA, Problem, batch_from_bytes, problem_from_row
from curator.wire import Client, Keys
from stream_grpo import keys
from stream_grpo.config import Config
from stream_grpo.identity import MANIFEST_FILE

LOOPBACK = "tcp://127.0.0.1:*"
HELDOUT_FILE = "heldout.arrow"
INTERVAL_HELDOUT_FILE = "heldout-interval.arrow"
GUARDS_FILE = "guards.arrow"


class Part(Protocol):
    """What the launcher needs of a process's class."""

    def run(self, stop: Event) -> Any:
        """The loop, until it is done or `stop` is set."""

    def status(self) -> dict[str, Any]:
        """An account of itself; safe from another thread."""


def server_keys(config: Config) -> Keys | None:
    """Of the sockets that this run binds; none on loopback."""
    return keys.server_keys(config.run_dir / keys.FOLDER) if config.cluster.address else None


def client_keys(config: Config) -> Keys | None:
    """Of the sockets that connect to them."""
    return keys.client_keys(config.run_dir / keys.FOLDER) if config.cluster.address else None


def connect(config: Config, address: str, *, name: str, peer: str) -> Client:
    """A client of one of the run's servers."""
    return Client(address, name=name, peer=peer, keys=client_keys(config))


def sampler_names(config: Config) -> list[str]:
    """The samplers of a run; the first of them evaluates during training."""
    return [f"sampler-{i}" for i in range(config.sampler.num_samplers)]


def away(config: Config, name: str) -> Config:
    """The configuration of a part on a node that does not see the run's folder: it has a folder of its own there."""
    assert config.cluster.node_root is not None
    run = config.run.model_copy(update={"root": config.cluster.node_root / config.run.name, "name": name})
    return config.model_copy(update={"run": run})


def files_to_send(config: Config) -> dict[str, bytes]:
    """What a sampler needs of the run's folder, by path in it: small files, and the keys to connect with."""
    names = (MANIFEST_FILE, INTERVAL_HELDOUT_FILE, f"{keys.FOLDER}/{keys.CLIENT_FILE}")
    return {name: (config.run_dir / name).read_bytes() for name in names if (config.run_dir / name).exists()}


def heldout_problems(config: Config, file_name: str = HELDOUT_FILE) -> list[Problem]:
    """The held-out problems that `rundir.prepare` chose for this run, by default those before and after training."""
    batch = batch_from_bytes((config.run_dir / file_name).read_bytes(), PROBLEM_SCHEMA)
    return [problem_from_row(row) for row in batch.to_pylist()]


def let_weights_out(config: Config, towards: str) -> None:
    """Before the first group of NCCL: where weights go over it between nodes, have it use the network to an address."""
    if config.weights.transfer == "nccl" and config.cluster.address is not None:
        from stream_grpo.learner.meeting import let_nccl_out

        let_nccl_out(towards.removeprefix("tcp://").rpartition(":")[0])
