"""Which node each process goes to, as Ray placement groups: one for each role that has several. Pure.

Buffer, curator and what gives out weights stand on the node of the command, or on `cluster.server_node`. The ranks of
the learner keep together on the node of the command, where their files are, or go over nodes that share these; the
first is at home either way. Samplers are spread, or packed. The first, where it evaluates during training and other
nodes do not see the run's folder, is on the node of the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stream_grpo import parts
from stream_grpo.config import Config
from stream_grpo.parts_common import sampler_names

LEARNER, SAMPLERS = "learner", "samplers"
_STRATEGIES: Mapping[str, Literal["PACK", "SPREAD"]] = {"pack": "PACK", "spread": "SPREAD"}
_PINNED = 0.001
"""Of the resource `node:IP` that Ray gives each node 1 of: asks for the node and takes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A placement group: what each of its bundles needs, all of which are reserved at once."""

    role: str
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD"]
    bundles: tuple[Mapping[str, float], ...]


class Place(NamedTuple):
    """The group of a part, and the bundle in it."""

    role: str
    bundle: int


def uses_groups(config: Config) -> bool:
    """A local Ray has one node, on which everything is placed one by one, unless two share a GPU."""
    return config.cluster.address is not None or config.cluster.colocate


def groups(config: Config, home: str) -> dict[str, Group]:
    """The placement groups by role; `home` is the IP of the command's node. Empty where there are none."""
    if not uses_groups(config):
        return {}
    sampler, learner = _needs(config, "sampler"), _needs(config, "learner")
    at_home = learner | {f"node:{home}": _PINNED}
    ranks = [at_home, *[learner if spans_nodes(config) else at_home] * (config.learner.num_ranks - 1)]
    num_samplers = config.sampler.num_samplers
    if config.cluster.colocate:
        ranks[0] = {name: ranks[0].get(name, 0) + sampler.get(name, 0) for name in ranks[0].keys() | sampler.keys()}
        num_samplers -= 1
    over = _STRATEGIES[config.cluster.learner] if spans_nodes(config) else "STRICT_PACK"
    found = {LEARNER: Group(role=LEARNER, strategy=over, bundles=tuple(ranks))}
    if num_samplers:
        strategy = _STRATEGIES[config.cluster.samplers]
        samplers = [sampler] * num_samplers
        if evaluates_at_home(config) and not config.cluster.colocate:
            samplers[0] = sampler | {f"node:{home}": _PINNED}
        found[SAMPLERS] = Group(role=SAMPLERS, strategy=strategy, bundles=tuple(samplers))
    return found


def spans_nodes(config: Config) -> bool:
    """Whether the ranks of the learner may be on several nodes."""
    return config.learner.num_ranks > 1 and config.cluster.learner != "here"


def evaluates_at_home(config: Config) -> bool:
    """Whether the first sampler has to be where the run's folder is, as its evaluations are written there."""
    return config.cluster.node_root is not None and config.evaluation.interval > 0


def place_of(config: Config, name: str) -> Place | None:
    """Where a part of the configuration is placed by a group; None for what no group holds."""
    if not uses_groups(config):
        return None
    learners, samplers = parts.learner_names(config), sampler_names(config)
    if name in learners:
        return Place(LEARNER, learners.index(name))
    if name not in samplers:
        return None
    index = samplers.index(name) - config.cluster.colocate
    return Place(SAMPLERS, index) if index >= 0 else Place(LEARNER, 0)


def _needs(config: Config, kind: str) -> dict[str, float]:
    resources = parts.RESOURCES[kind](config)
    needs = {"CPU": float(resources.num_cpus), "GPU": float(resources.num_gpus)}
    return {name: amount for name, amount in needs.items() if amount}


def sentences(config: Config) -> Iterator[str]:
    """Where everything goes, a line a role."""
    cluster, learner, sampler = config.cluster, config.learner, config.sampler
    here = "this machine" if cluster.address is None else "the node of the command"
    yield f"Ray: {'a local one' if cluster.address is None else f'the cluster at {cluster.address}'}"
    servers = here if cluster.server_node is None else f"node {cluster.server_node}"
    sockets = "loopback" if cluster.address is None else "its address in the cluster, with CURVE keys"
    yield f"buffer, curator: {servers}; sockets on {sockets}"
    at = f"over the cluster, {cluster.learner}, the first on {here}" if spans_nodes(config) else f"on {here}"
    yield f"learner: {learner.num_ranks} x ({_each(config, 'learner')}) {at}, ZeRO {learner.zero_stage}"
    where = here if cluster.address is None else f"over the cluster, {cluster.samplers}"
    workers = f", {sampler.tensor_parallel_size} workers each" if sampler.tensor_parallel_size > 1 else ""
    yield f"samplers: {sampler.num_samplers} x ({_each(config, 'sampler')}) {where}{workers}"
    if cluster.colocate:
        yield "the first sampler shares a GPU with the learner"
    if evaluates_at_home(config) and not cluster.colocate:
        yield "the first sampler, which evaluates during training, is on the node of the command"
    if cluster.node_root is not None:
        yield f"a sampler on another node keeps what it is sent in {cluster.node_root}"


def _each(config: Config, kind: str) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in _needs(config, kind).items())
