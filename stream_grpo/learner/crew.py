"""The ranks of the learner as one torch.distributed world, and how rank 0 tells the others what to do.

Commands and shares go as bytes over a gloo group of their own: JSON and safetensors, never a pickle. Each rank notes in
a store when it leaves; whoever loses a peer reads there who is missing. On GPUs DeepSpeed's own calls go over NCCL.

N values of a rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stream_grpo.errors import RankError
from stream_grpo.learner.meeting import stores

ROLL_CALL_S = 5.0
"""How long a rank that lost another waits for the others to say that they have lost one too."""
DISMISS = "dismiss"
"""The command that is the last."""
_WAIT = "wait for rank 0"


class Command(NamedTuple):
    """What rank 0 wants of the others."""

    name: str
    fields: dict[str, Any]


class Crew:
    """This process's place among the ranks. `Ranks` of a learner step."""

    def __init__(
        self, rank: int, num_ranks: int, rendezvous: Path | str, *, timeout_s: float, idle_timeout_s: float
    ) -> None:
        """Join: returns once all ranks are there. `rendezvous` is a file of this crew alone, or HOST:PORT of rank 0.

        `timeout_s` bounds every call that all ranks make together, `idle_timeout_s` the wait for a command. Raises
        RankError naming who is missing.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self.doing = "join"
        """What this rank is at; empty while it waits for a command."""
        self._orders: dist.ProcessGroup | None = None
        self._has_left = False
        has_gpu = torch.cuda.is_available()
        os.environ["LOCAL_RANK"] = "0" if has_gpu else str(rank)  # a rank sees its own GPU alone
        self._timeout_s, self._idle_timeout_s = timeout_s, idle_timeout_s
        self._notes: Any = None
        with self.call("join"):
            meeting, self._notes = stores(rendezvous, rank, num_ranks, timeout_s)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
                store=meeting,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout_s),
            )
            self._orders = dist.new_group(backend="gloo", timeout=timedelta(seconds=idle_timeout_s))

    # What rank 0 says and the others hear.

    def order(self, name: str, **fields: Any) -> None:
        """Have the other ranks make the same call. `fields` are what JSON holds."""
        self._tell(json.dumps([name, fields]).encode())

    def hand_out(self, shares: Sequence[bytes]) -> None:
        """Give every other rank its bytes, those of rank 1 first."""
        for rank, share in enumerate(shares, start=1):
            dist.send(torch.tensor([len(share)]), rank, group=self._orders)
            dist.send(_tensor(share), rank, group=self._orders)

    def hear(self) -> Command:
        """Wait for what rank 0 wants. Raises RankError where it is gone, or has wanted nothing for too long."""
        with self.call(_WAIT):
            self.doing = ""
            name, fields = json.loads(self._told())
        return Command(name, fields)

    def take(self) -> bytes:
        """This rank's bytes of `hand_out`."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, 0, group=self._orders)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, 0, group=self._orders)
        return data.numpy().tobytes()

    def dismiss(self) -> None:
        """Let the others go, where this rank has not left them."""
        if not self._has_left:
            with self.call(DISMISS):
                self.order(DISMISS)
                self.meet()

    def _tell(self, message: bytes) -> None:
        dist.broadcast(torch.tensor([len(message)]), 0, group=self._orders)
        dist.broadcast(_tensor(message), 0, group=self._orders)

    def _told(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._orders)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._orders)
        return data.numpy().tobytes()

    # What all ranks do together.

    def summed(self, values: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape and dtype."""
        result = values.clone()
        dist.all_reduce(result, dist.ReduceOp.SUM)
        return result

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over ranks of tensors of one shape and dtype."""
        result = values.clone()
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return result

    def joined(self, values_N: Tensor) -> Tensor:
        """The values of all ranks, rank by rank; each may have another number of them."""
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(counts, torch.tensor([len(values_N)]))
        longest = int(max(counts))
        padded = torch.zeros(longest, dtype=values_N.dtype)
        padded[: len(values_N)] = values_N
        rows = [torch.zeros_like(padded) for _ in counts]
        dist.all_gather(rows, padded)
        joined = torch.cat([row[: int(count)] for row, count in zip(rows, counts, strict=True)])
        return joined.to(values_N.device)

    def meet(self) -> None:
        """Return once every rank has called it."""
        self.summed(torch.zeros(1))

    # Who is missing.

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """While all ranks make one call. An error in it takes this rank out of the crew, and the others notice at once.

        Raises RankError, naming who is missing, in place of the error that a lost peer is.
        """
        self.doing = name
        try:
            yield
        except Exception as error:
            if not _is_lost_peer(error):
                self.leave(f"{type(error).__name__}: {error}")
                raise
            self.leave("")
            raise RankError(self._missing(name)) from error
        finally:
            self.doing = ""

    def leave(self, reason: str) -> None:
        """Note that this rank goes, and why, and close its connections."""
        self._has_left = True
        with suppress(dist.DistError):  # the store of a port is gone with rank 0
            if self._notes is not None:
                self._notes.set(f"left/{self.rank}", reason)
        self._orders = None  # a group that is held on to keeps its connections
        if dist.is_initialized():
            dist.destroy_process_group()

    def _missing(self, name: str) -> str:
        """Who is to blame, in a sentence: ranks that failed, or else those that say nothing."""
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        deadline = time.monotonic() + ROLL_CALL_S
        while True:
            left = self._who_left(others)
            failed = [f"rank {rank} failed with {reason}" for rank, reason in left.items() if reason]
            silent = [rank for rank in others if rank not in left]
            if failed or not silent or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if failed:
            cause = "; ".join(failed)
        elif silent:
            patience_s = self._idle_timeout_s if name == _WAIT else self._timeout_s
            cause = f"{_ranks(silent)} died, or did not answer within {patience_s:g} s"
        else:
            cause = "the connections between them were lost"
        return f"rank {self.rank} of {self.num_ranks} in {name!r}: {cause}"

    def _who_left(self, others: Sequence[int]) -> dict[int, str]:
        """Of the others those that noted that they left, and why; where rank 0's store is gone, all but it have."""
        try:
            assert self._notes is not None
            return {r: self._notes.get(f"left/{r}").decode() for r in others if self._notes.check([f"left/{r}"])}
        except (AssertionError, dist.DistError):
            return {rank: "" for rank in others if rank != 0}


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed, and not what was computed: gloo says so in the text of a plain RuntimeError."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()
