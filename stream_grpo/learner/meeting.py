"""Where the ranks of a learner find each other: a file on one machine, or a port of rank 0 that several nodes reach."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist


class Stores(NamedTuple):
    """What all ranks write to and read from."""

    meeting: Any
    """For torch alone, which makes its connections by it."""
    notes: Any
    """Who has left, and why."""


def stores(rendezvous: Path | str, rank: int, num_ranks: int, timeout_s: float) -> Stores:
    """Of a file that no other world uses, or of `HOST:PORT`, which is rank 0's: it listens there, and nowhere else.

    A store of files needs no process that would have to be alive for it; that of a port is gone with rank 0. Also sets
    by which network gloo and NCCL of this process speak: loopback, or the one of this node's address towards HOST. With
    a file an interface that the environment names already stays, as after `let_nccl_out`. Raises torch's DistError
    where nobody listens within `timeout_s`.
    """
    if isinstance(rendezvous, Path):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        rendezvous.parent.mkdir(parents=True, exist_ok=True)
        return Stores(_files(str(rendezvous), num_ranks), _files(f"{rendezvous}.notes", num_ranks))
    host, _, port = rendezvous.rpartition(":")
    interface = interface_of(host if rank == 0 else _own_address(host))
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    listening = None
    if rank == 0:
        # Torch itself would listen on all addresses.
        listening = socket.create_server((host, int(port))).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        num_ranks,
        rank == 0,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    return Stores(*(dist.PrefixStore(name, store) for name in Stores._fields))  # type: ignore[attr-defined]


def let_nccl_out(towards: str) -> None:
    """Have NCCL of this process speak by the interface of this node's address on the way to an IP, its own or another.

    Whoever makes an NCCL group puts the address at which it listens into the id of the group, and the others connect
    to that: the one of loopback leads a process on another node to itself, where nobody listens. NCCL reads this once,
    with its first group. An interface that the environment names already stays. Raises ValueError where no interface
    has the address.
    """
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = interface_of(_own_address(towards))


def interface_of(address: str) -> str:
    """The network interface of this machine with an IP. Raises ValueError where none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return str(name)
    raise ValueError(f"{address}: no network interface of this machine has this address")


def _own_address(host: str) -> str:
    """This machine's address on the way to a host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _files(path: str, num_ranks: int) -> Any:
    return dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]
