"""The settings of where processes run: on this machine, or on the nodes of a Ray cluster. Loads no torch.

Part of the tree of `config`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from stream_grpo.config_section import Section


class Cluster(Section):
    """Where the processes run. How many there are, and the cores and GPUs of each, stands in their own sections."""

    address: str | None = None
    """Of a Ray cluster, as `10.0.0.1:6379`; None starts a local Ray that ends with the run."""
    samplers: Literal["spread", "pack"] = "spread"
    """Whether samplers are placed on as many nodes as there are, or on as few."""
    learner: Literal["here", "pack", "spread"] = "here"
    """Where learner.num_ranks are: on the node of the command, or over nodes that share run.root, as few or many."""
    server_node: str | None = None
    """IP of the node of buffer and curator, which must see the run's folder. None: the node of the command."""
    node_root: Path | None = None
    """None: all nodes share run.root. Else the folder in which a sampler on another node keeps what it is sent."""
    colocate: bool = False
    """Whether the first sampler and the learner share a GPU: num_gpus of each is then its share."""
    gpu_memory_bytes: int | None = Field(None, ge=1 << 30)
    """Of one GPU, as the planner cannot look: what does not fit is refused before anything starts. None: unknown."""


def cluster_complaints(
    cluster: Cluster, *, sampler_gpus: float, learner_gpus: float, num_ranks: int, evaluates_around: bool
) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    for name in ("server_node", "node_root"):
        if getattr(cluster, name) is not None and cluster.address is None:
            yield (
                f"cluster.{name} = {str(getattr(cluster, name))!r} without cluster.address: a local Ray has one node; "
                f"name the cluster's address, or leave {name} out"
            )
    yield from _learner_complaints(cluster, num_ranks)
    if cluster.address is not None and "://" in cluster.address:
        yield (
            f"cluster.address = {cluster.address!r}: the command itself must run on a node of the cluster, whose Ray "
            f"places and watches the processes; start it there, with host:port of the head node, or 'auto'"
        )
    if cluster.server_node is not None and cluster.node_root is not None:
        yield (
            f"cluster.server_node = {cluster.server_node!r} with cluster.node_root: buffer and curator need the run's "
            f"folder, which other nodes do not see; leave server_node out"
        )
    if cluster.node_root is not None and not cluster.node_root.is_absolute():
        yield (
            f"cluster.node_root = {str(cluster.node_root)!r}: another node has no working directory of this command; "
            f"use an absolute path"
        )
    if cluster.colocate and not (sampler_gpus > 0 and learner_gpus > 0 and sampler_gpus + learner_gpus <= 1):
        yield (
            f"cluster.colocate = true with sampler.num_gpus = {sampler_gpus:g} and learner.num_gpus = "
            f"{learner_gpus:g}: the two are shares of one GPU; use for example 0.5 and 0.5, and a "
            f"sampler.gpu_memory_utilization that leaves the learner its memory"
        )
    if cluster.colocate and evaluates_around:
        yield (
            "cluster.colocate = true with an evaluation before and after training: its engine would need the GPU that "
            "sampler and learner hold from the first process to the last; use evaluation.num_problems = 0 and no "
            "evaluation.guards, and score models by command, or colocate = false"
        )


def _learner_complaints(cluster: Cluster, num_ranks: int) -> Iterable[str]:
    if cluster.learner == "here":
        return
    if cluster.address is None:
        yield (
            f"cluster.learner = {cluster.learner!r} without cluster.address: a local Ray has one node; name the "
            f"cluster's address, or leave learner out"
        )
    if num_ranks == 1:
        yield (
            f"cluster.learner = {cluster.learner!r} with learner.num_ranks = 1: the first rank stays on the node of "
            f"the command, and there is no other to place; use learner = 'here', or more ranks"
        )
    if cluster.node_root is not None:
        yield (
            f"cluster.learner = {cluster.learner!r} with cluster.node_root: every rank writes its part of a checkpoint "
            f"into the run's folder, which other nodes do not see; share run.root, or use learner = 'here'"
        )
