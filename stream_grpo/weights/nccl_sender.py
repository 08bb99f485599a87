"""The learner's side of weights over NCCL: it keeps the tensors of a version in memory, and sends them to who asks.

    hold      version                        -> held
    receive   tensors, num_workers, anew     -> join    the group to join, and whether it is another than the last

Manifest, probe and version are files as ever; in place of the tensors lies their hash. A sampler has a group of its own
with the learner, as vLLM's weight transfer makes it: one that comes, dies or hangs concerns nobody else. A version that
a sampler holds stays in memory until it holds another, or has become too old. Not yet run on a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from curator.wire import Request, Server
from stream_grpo.errors import WeightsError
from stream_grpo.files import replace_with
from stream_grpo.types import Forks, PolicyVersion
from stream_grpo.weights.manifest import HASH, Adapter, Manifest, Probe, TensorSpec
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import check_tensors
from stream_grpo.weights.tensors_file import spec_of

ADDRESS_FILE = "sender"
"""In the folder of published weights: where samplers ask."""
WIRE = {"packed": True, "packed_buffer_size_bytes": 256 << 20, "packed_num_buffers": 2}
"""What both sides have to agree on; tensors go in buffers of so many bytes."""
KEPT = 4
"""A version that a sampler holds stays in memory while it is one of so many: who has left would hold its for ever."""
_RECEIVE_S = 0.1
_log = logging.getLogger(__name__)


class Endpoint(Protocol):
    """The learner's end of one group; vLLM's `NCCLTrainerWeightTransferEngine`."""

    def send_weights(self) -> None:
        """Broadcast all tensors of its source; returns when they have gone out."""


class ParamMeta(NamedTuple):
    """As vLLM's: what comes next on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """Tensors on the CPU as vLLM's `WeightSource`: in the order of their names, moved to the GPU one at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.tensors: Mapping[str, torch.Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        """What iteration gives, without a copy."""
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in sorted(self.tensors.items())]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sorted(self.tensors.items()):
            yield name, tensor.to(self._device)


class NcclPublisher:
    """A `Publisher` whose tensors are no files."""

    def __init__(self, publisher: Publisher, sender: NcclSender) -> None:
        self._publisher, self._sender = publisher, sender

    def publish(
        self,
        version: PolicyVersion,
        forks: Forks,
        named_tensors: Mapping[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]],
        probe: Probe,
        *,
        specs: Mapping[str, TensorSpec] | None = None,
        adapter: Adapter | None = None,
    ) -> Manifest:
        """As the publisher's; all tensors stay in memory, since samplers are sent them.

        The hash in the manifest tells versions apart; the probe alone proves what arrives.
        """
        if adapter is not None:
            raise WeightsError(f"weights {version}: an adapter does not go over NCCL")
        tensors = dict(named_tensors)
        check_tensors(tensors, _specs_of(tensors), source=f"weights {version}")
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
        hashed = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        # Before a sampler sees the version, and not long before: until then the one before is asked for.
        self._sender.offer(version, tensors)
        return self._publisher.publish(version, forks, {HASH: hashed}, probe)


def _specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


@dataclass(slots=True)
class _Line:
    """What the sender has with one sampler."""

    version: PolicyVersion
    held: Mapping[str, torch.Tensor]
    """The tensors of that version; empty once they are let go."""
    source: Source
    group: dict[str, Any] | None = None
    """What the sampler's workers join by; None before the first group."""
    endpoint: Endpoint | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)


class NcclSender:
    """Answers samplers in one thread, and sends in one for each that receives: NCCL waits for its peers."""

    def __init__(
        self,
        server: Server,
        directory: Path,
        open_endpoint: Callable[[dict[str, Any], Source], Endpoint],
        device: str = "cuda",
    ) -> None:
        """`open_endpoint` joins a group as its rank 0, and returns once the sampler's workers are there too."""
        self._server, self._open, self._device = server, open_endpoint, device
        self._host = server.address.removeprefix("tcp://").rpartition(":")[0]
        # Replaced as one: the two are read in another thread.
        self._newest: tuple[PolicyVersion | None, Mapping[str, torch.Tensor]] = (None, {})
        self._recent: deque[PolicyVersion] = deque(maxlen=KEPT)
        """The tensors of the newest alone are kept for whoever comes."""
        self._lines: dict[bytes, _Line] = {}
        """By the connection of the sampler: one that is started again has another."""
        directory.mkdir(parents=True, exist_ok=True)
        replace_with(directory / ADDRESS_FILE, server.address.encode())

    def offer(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """From now on these are the newest; called from the learner's thread. What is held for too long is let go."""
        self._newest = (version, tensors)
        self._recent.append(version)
        for line in list(self._lines.values()):
            if line.version not in self._recent:
                line.held = {}

    def run(self, stop: threading.Event) -> None:
        """Answer until `stop` is set."""
        while not stop.is_set():
            self.turn(_RECEIVE_S)
        self._server.close()

    def turn(self, timeout_s: float) -> None:
        """Answer one request, where one comes in time."""
        if (request := self._server.receive(timeout_s)) is None:
            return
        handler = {"hold": self._hold, "receive": self._receive}.get(request.message.kind)
        try:
            if handler is None:
                raise ValueError("known: hold, receive")
            handler(request)
        except (KeyError, TypeError, ValueError) as error:
            self._server.refuse(request, f"{request.message.kind}: {error}")

    def _hold(self, request: Request) -> None:
        branch, step = request.message.fields["version"]
        version = PolicyVersion(branch, step)
        tensors = self._kept(version)
        if request.sender not in self._lines:
            self._lines[request.sender] = _Line(version, tensors, Source(self._device))
        line = self._lines[request.sender]
        line.version, line.held = version, tensors
        self._server.reply(request, "held")

    def _kept(self, version: PolicyVersion) -> Mapping[str, torch.Tensor]:
        """Of the newest version, or of one that a sampler holds. Raises ValueError where they are gone or to come."""
        newest, tensors = self._newest
        if version == newest:
            return tensors
        for line in self._lines.values():
            if line.version == version and (held := line.held):
                return held
        raise ValueError("nothing is offered yet" if newest is None else f"the newest version is {newest}")

    def _receive(self, request: Request) -> None:
        fields, line = request.message.fields, self._lines.get(request.sender)
        if line is None or not line.held:
            raise ValueError(f"nothing is held, or for more than {KEPT} versions; ask for `hold` first")
        asked = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in fields["tensors"]}
        if wrong := sorted(name for name, _ in asked.items() ^ _specs_of(line.held).items()):
            raise ValueError(f"not the tensors of the learner: {sorted(set(wrong))}")
        is_new = line.group is None or bool(fields["anew"])
        if is_new:
            with socket.create_server((self._host, 0)) as free:
                port = free.getsockname()[1]
            world = {"master_address": self._host, "master_port": port, "world_size": 1 + int(fields["num_workers"])}
            # Another line, so that a thread that hangs in the old group sends nothing into the new one.
            line = _Line(line.version, line.held, Source(self._device), world | WIRE)
            self._lines[request.sender] = line
        self._server.reply(request, "join", {"group": line.group, "is_new": is_new})
        threading.Thread(target=self._send, args=(line, line.held), name="nccl-send", daemon=True).start()

    def _send(self, line: _Line, tensors: Mapping[str, torch.Tensor]) -> None:
        with line.turn:
            try:
                line.source.tensors = tensors
                if line.endpoint is None:
                    assert line.group is not None
                    line.endpoint = self._open(line.group, line.source)
                line.endpoint.send_weights()
            except Exception:
                # The sampler waits in vain, gives up, and asks for another group.
                _log.exception("weights could not be sent over NCCL")
            finally:
                line.source.tensors = {}


def vllm_endpoint(group: dict[str, Any], source: Source) -> Endpoint:
    """The learner's end as vLLM makes it. The sampler runs its own half, so that the client has nothing to do."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    info = NCCLTrainerInitInfo(rank=0, **group)
    endpoint: Endpoint = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_NoClient(), source=source)
    return endpoint


class _NoClient:
    """vLLM's `VLLMWeightSyncClient` where the other side was told before."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
