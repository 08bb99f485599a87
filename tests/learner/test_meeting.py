"""By which network the ranks of a learner, and the samplers that get weights over NCCL, find each other."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stream_grpo import parts_common
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.learner import meeting
from stream_grpo.learner.meeting import let_nccl_out, stores

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with loopback, a network of the site and the cluster's, by which it sees 10.0.0.1; nothing is chosen."""
    found = {"lo": "127.0.0.1", "eth0": "192.0.2.7", "ib0": "10.0.0.2"}
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {name: [SimpleNamespace(address=ip)] for name, ip in found.items()}
    )
    ways = {"10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.2", "127.0.0.1": "127.0.0.1", "198.51.100.1": "203.0.113.1"}
    monkeypatch.setattr(meeting, "_own_address", ways.__getitem__)
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the code under test writes is taken back
        monkeypatch.delenv(name)


def configuration(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "sampler": {"engine": "async", "num_gpus": 1},
        "learner": {"num_gpus": 1, "num_ranks": 2},
        "weights": {"transfer": "nccl"},
        **sections,
    }
    return parse(tree, "test")


CLUSTER = {"address": "10.0.0.2:6379"}


def test_ranks_of_one_machine_keep_to_loopback(tmp_path: Path) -> None:
    stores(tmp_path / "ranks" / "meeting", 0, 2, 1.0)
    assert [os.environ[name] for name in NAMES] == ["lo", "lo"]


def test_local_ranks_send_weights_by_the_network_of_the_cluster_and_nothing_else_by_it(tmp_path: Path) -> None:
    # The id of an NCCL group holds the address that its first rank listens at: of loopback, a sampler on another node
    # would connect to itself.
    parts_common.let_weights_out(configuration(cluster=CLUSTER), "tcp://10.0.0.2:*")
    stores(tmp_path / "ranks" / "meeting", 0, 2, 1.0)
    assert [os.environ[name] for name in NAMES] == ["lo", "ib0"]


def test_a_sampler_listens_on_the_network_that_the_buffer_is_in() -> None:
    parts_common.let_weights_out(configuration(cluster=CLUSTER), "tcp://10.0.0.1:41233")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("sections", "towards"),
    [({}, "tcp://127.0.0.1:*"), ({"cluster": CLUSTER, "weights": {}}, "tcp://10.0.0.2:*")],
    ids=["one machine", "files"],
)
def test_nccl_is_left_alone_where_no_weights_go_over_it_between_nodes(sections: dict[str, Any], towards: str) -> None:
    parts_common.let_weights_out(configuration(**sections), towards)
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_an_interface_that_the_node_names_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    let_nccl_out("10.0.0.2")
    stores(tmp_path / "ranks" / "meeting", 0, 2, 1.0)
    assert [os.environ[name] for name in NAMES] == ["lo", "eth0"]


def test_an_address_that_no_interface_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"203\.0\.113\.1: no network interface of this machine"):
        let_nccl_out("198.51.100.1")
