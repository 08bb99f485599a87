"""Which node of Ray each part of a run goes to, by `placement` and by what the cluster has."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from stream_grpo import placement
from stream_grpo.config import Config
from stream_grpo.errors import ConfigError

GROUP_TIMEOUT_S = 60.0
"""What Ray gets to reserve what a role needs."""
SERVERS = ("buffer", "curator", "weights")
"""Kinds of parts that others connect to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where the launcher runs."""

    node_id: str
    """Ray's name of the node."""
    pid: int


def node_id() -> str:
    """Ray's name of the node that this process runs on."""
    name: str = ray.get_runtime_context().get_node_id()
    return name


class Nodes:
    """Which node of Ray each part goes to. Asks Ray when it is first needed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: dict[str, PlacementGroup] = {}

    @cached_property
    def home(self) -> Home:
        """The launcher's own node and process."""
        return Home(node_id=node_id(), pid=os.getpid())

    @cached_property
    def _addresses(self) -> dict[str, str]:
        """Ray's name of every node that lives, by its IP."""
        return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}

    @cached_property
    def _home_address(self) -> str:
        return next(address for address, name in self._addresses.items() if name == self.home.node_id)

    def is_home(self, address: str) -> bool:
        """Whether a node is that of the launcher, by its IP."""
        return address == self._home_address

    def free_address(self) -> str:
        """HOST:PORT on the launcher's node, of a port that nobody listens on now."""
        with socket.create_server((self._home_address, 0)) as server:
            return f"{self._home_address}:{server.getsockname()[1]}"

    def bind(self) -> str:
        """Where a server listens: on the address that the cluster knows its node by, and on no other."""
        return f"tcp://{self._config.cluster.server_node or self._home_address}:*"

    def bind_at_home(self) -> str:
        """The same of what always is on the launcher's node."""
        return f"tcp://{self._home_address}:*"

    def strategy(self, name: str, kind: str, *, by_order: bool) -> Any:
        """How Ray is to place a part. Raises ConfigError where the cluster has no such node, or no room."""
        place = None if by_order else placement.place_of(self._config, name)
        if place is not None:
            return PlacementGroupSchedulingStrategy(
                placement_group=self._group(place.role), placement_group_bundle_index=place.bundle
            )
        if by_order and self._config.cluster.address:
            return "SPREAD"
        # All that needs the run's folder at hand; on one machine everything, which speaks over loopback.
        return NodeAffinitySchedulingStrategy(self._server_node(kind), soft=False)

    def _server_node(self, kind: str) -> str:
        address = self._config.cluster.server_node
        if address is None or kind not in SERVERS:
            return self.home.node_id
        if address not in self._addresses:
            raise ConfigError(
                f"cluster.server_node = {address!r}: no such node; there are {', '.join(self._addresses)}"
            )
        return self._addresses[address]

    def _group(self, role: str) -> PlacementGroup:
        if role not in self._groups:
            wanted = placement.groups(self._config, self._home_address)[role]
            group = placement_group([dict(bundle) for bundle in wanted.bundles], strategy=wanted.strategy)
            if not group.wait(GROUP_TIMEOUT_S):
                free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
                bundles = ", ".join(map(str, wanted.bundles))
                raise ConfigError(
                    f"the cluster has no room for the {role}: {bundles} ({wanted.strategy}); free: {free}"
                )
            self._groups[role] = group
        return self._groups[role]
