"""The worker's side of `async_engine`: takes weights from shared memory through vLLM's weight transfer interface.

vLLM imports this module in every worker, as the home of `worker_extension_cls`, before it builds the model: importing
it registers the transfer. The front end imports it for the layout of the shared memory alone.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from stream_grpo.sampler.engine import modules_of, reload_model, zero_kv
from stream_grpo.weights.fingerprint import Recorder
from stream_grpo.weights.manifest import Fingerprint, TensorSpec

BACKEND, NCCL_BACKEND = "shared_memory", "nccl_in_one_call"
"""Names of transfers in vLLM's `WeightTransferConfig`: the one here, and that of `nccl_receiver`."""
# A view of another dtype must start at a multiple of its item size; a cache line fits them all.
_ALIGN_BYTES = 64


class Slot(NamedTuple):
    """Where one tensor lies in the shared memory. Crosses processes as a plain list."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the tensor, padding left out."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def layout(specs: Mapping[str, TensorSpec]) -> tuple[list[Slot], int]:
    """Slots for all tensors, one behind the other, and the bytes that they take together."""
    slots: list[Slot] = []
    size = 0
    for name, spec in specs.items():
        slot = Slot(name, spec.shape, spec.dtype, size)
        slots.append(slot)
        size += -(-slot.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return slots, size


def map_memory(path: str, size_bytes: int) -> torch.Tensor:
    """[size_bytes] uint8 on a file that several processes map."""
    return torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)


def views(memory: torch.Tensor, slots: Sequence[Slot]) -> dict[str, torch.Tensor]:
    """The tensors in the shared memory, by name; no copies."""
    return {
        slot.name: memory[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
        .view(getattr(torch, slot.dtype))
        .view(slot.shape)
        for slot in slots
    }


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The shared memory; the file may be removed once all workers have it."""

    path: str
    size_bytes: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What lies in the shared memory now: `Slot`s as lists."""

    slots: list[list[Any]]


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One update is one call: the model is whole before and after `receive_weights`, whatever happens in it.

    vLLM's own transfers take a model apart in `start_weight_update` and close it in `finish_weight_update`; a step in
    between, or a failure, kills the engine. Here these two have nothing to do.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Map the shared memory."""
        self._memory = map_memory(init_info.path, init_info.size_bytes)
        self.error: str | None = None

    def start_weight_update(self) -> None:
        """Nothing: see the class."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors into this worker's model, of which it takes its share.

        A failure is kept in `error` and not raised: with several workers vLLM leaves the answers of the others unread
        where one raises, and takes them for those of the next call.
        """
        self.error = None
        try:
            slots = [Slot(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in update_info.slots]
            reload_model(self.model, self.model_config, views(self._memory, slots))
        except Exception as error:
            self.error = repr(error)

    def finish_weight_update(self) -> None:
        """Nothing: see the class."""

    def shutdown(self) -> None:
        """Let the shared memory go."""
        self._memory = torch.empty(0, dtype=torch.uint8)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
    WeightTransferEngineFactory.register_engine(NCCL_BACKEND, "stream_grpo.sampler.nccl_receiver", "NcclReceiver")


class WorkerExtension:
    """Calls that vLLM's workers get besides their own (`collective_rpc` by name)."""

    def weight_update_error(self) -> str | None:
        """What went wrong in this worker's newest update."""
        worker: Any = self
        error: str | None = worker.weight_transfer_engine.error
        return error

    def record_fingerprints(self) -> None:
        """From now on keep the fingerprint of what each module of this worker's model gives out."""
        worker: Any = self
        worker.fingerprint_recorder = Recorder(modules_of(worker)).__enter__()

    def take_fingerprint(self, num_tokens: int) -> Fingerprint:
        """Of the newest forward pass, which was of one sequence; empty where the modules are not known."""
        worker: Any = self
        (fingerprint,) = worker.fingerprint_recorder.take([num_tokens])
        return dict(fingerprint)

    def stop_recording(self) -> None:
        """Take the hooks off the model."""
        worker: Any = self
        worker.fingerprint_recorder.__exit__(None, None, None)

    def zero_kv_caches(self) -> None:
        """Forget all values in the KV cache."""
        zero_kv(self)

    def live_no_longer_than(self, front_end_pid: int) -> list[int]:
        """End this process, and the engine core above it, as soon as the front end is gone: vLLM leaves both behind.

        Returns the process ids of the two, which are one with a single worker.

        A signal on the parent's death would be bound to the thread that started the process, and would reach the
        children of the engine core alone; a process's own descriptor is bound to neither.
        """
        front_end = os.pidfd_open(front_end_pid)
        # With one worker this process is the engine core, and its parent the front end.
        pids_above = [] if os.getppid() == front_end_pid else [os.getppid()]
        above = [os.pidfd_open(pid) for pid in pids_above]
        threading.Thread(target=_end_with, args=(front_end, above), name="live-no-longer", daemon=True).start()
        return [os.getpid(), *pids_above]


def _end_with(front_end: int, above: Sequence[int]) -> None:
    poll = select.poll()
    for descriptor in (front_end, *above):
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    for descriptor in above:
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)
