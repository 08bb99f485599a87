"""vLLM in processes of its own, for engines with several workers: AsyncLLM and its weight transfer interface.

The engine core samples all the time, also while nobody calls; here its finished outputs are fetched. The event loop is
private and runs only inside a call, in the caller's thread: there is no second thread that could see half a state.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import tempfile
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

# Threads are about in every process that samples, and a fork copies their locks as they are.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
# On CPU, vLLM would bind each worker to a memory node of its own, and refuse to start where there are fewer.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from stream_grpo.config import Config
from stream_grpo.errors import WeightsError
from stream_grpo.sampler.engine import (
    OF_THE_MODEL_FOLDER,
    PRIORITY,
    PROBE_PRIORITY,
    after_the_first,
    engine_args,
    generation_of,
    generation_so_far,
    output_so_far,
    params_of,
    probe_params,
    sampling_params,
)
from stream_grpo.sampler.prompts import end_token_ids, load_tokenizer
from stream_grpo.sampler.weight_receiver import BACKEND, NCCL_BACKEND, WorkerExtension, layout, map_memory, views
from stream_grpo.types import Generation, GenerationRequest, PolicyVersion
from stream_grpo.weights.manifest import Fingerprint, TensorSpec, model_tensors
from stream_grpo.weights.nccl_subscriber import RemoteWeights
from stream_grpo.weights.tensors_file import spec_of

_STEP_S = 0.02
"""The longest that `step` waits for a sequence to finish."""
_END_S = 2.0
"""What the processes get to end by themselves after vLLM's own shutdown."""
_BATCHED_TOKENS = 8192
_SHARED_MEMORY = Path("/dev/shm")
_TRANSFER_S = 600.0
"""What weights over NCCL may take; a learner that is gone meanwhile never answers."""
_T = TypeVar("_T")


@dataclass(slots=True)
class _Running:
    internal_id: str
    """vLLM's own id of the request."""
    output: asyncio.Task[Any]


class AsyncEngine:
    """The engine of `generation.Engine` on AsyncLLM.

    Two runs with the same requests batch them differently, as the core starts with the first that reaches it: tokens
    are equal up to the rounding of logprobs. All workers are on this machine; weights reach them through its memory.
    """

    def __init__(self, config: Config, version: PolicyVersion = OF_THE_MODEL_FOLDER) -> None:
        """Start the processes and load the model folder, whose weights are `version`.

        Raises OSError where the shared memory has no room for the weights.
        """
        self._config = config
        self._eos_token_ids = end_token_ids(config.model.path, load_tokenizer(config.model.path))
        self._expected = model_tensors(config.model.path, config.model.dtype)
        self._slots, self._size_bytes = layout(self._expected)
        self._params = sampling_params(config, self._eos_token_ids)
        self._running: dict[str, _Running] = {}
        # Finished, and not given back yet.
        self._held: dict[str, Generation] = {}
        # Labels of weights that came while the KV cache was kept.
        self._kept_kv: set[str] = set()
        self._num_added = 0
        self._llm: Any = None
        # Descriptors of vLLM's processes.
        self._processes: list[int] = []
        self._loop = asyncio.new_event_loop()
        # Set while an output waits to be read.
        self._has_finished = asyncio.Event()
        self._run(self._start(version))

    @property
    def num_slots(self) -> int:
        """Sequences that run at once; a probe has slots of its own."""
        return self._config.sampler.max_num_seqs

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and neither given back by `step` nor aborted."""
        return len(self._running) + len(self._held)

    def expected_tensors(self) -> Mapping[str, TensorSpec]:
        """What `apply_weights` takes: the tensors of the model folder, in the run's dtype."""
        return self._expected

    def add(self, request: GenerationRequest) -> None:
        """Take a request; it runs at once. Raises ValueError for an id in use, and what vLLM raises for a prompt."""
        name = request.request_id
        if name in self._running or name in self._held:
            raise ValueError(f"request {name} is still unfinished")
        params = params_of(request, self._params)
        self._running[name] = self._run(self._submit(name, request.prompt_ids, params, PRIORITY))

    def step(self) -> list[Generation]:
        """The generations that have finished; waits for one, but not longer than 20 ms.

        A step is no step of the model, which goes on by itself: who counts the time of steps as busy counts waiting
        for running sequences, and not what runs while the caller is elsewhere.
        Raises vLLM's EngineDeadError where a process of the engine is gone.
        """
        if self._running and not self._held:
            self._run(self._wait())
        self._read_finished()
        finished = list(self._held.values())
        self._held.clear()
        if not self._running:
            self._kept_kv.clear()
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Generation]:
        """End requests now; what they have so far comes back, as `abort` unless it had finished."""
        names = list(request_ids)
        self._run(self._end([self._running[name] for name in names if name in self._running]))
        self._read_finished()
        return [self._held.pop(name) for name in names if name in self._held]

    def progress(self, request_ids: Iterable[str]) -> list[Generation]:
        """What requests have so far, as `partial` unless they had finished; they go on."""
        names = list(request_ids)
        # One whose output is on its way to be read has no state any more.
        self._run(self._read_ending(names))
        found = {name: self._held[name] for name in names if name in self._held}
        for name in [name for name in names if name in self._running]:
            state = self._llm.output_processor.request_states[self._running[name].internal_id]
            found[name] = generation_so_far(state, self._eos_token_ids, self._mixed_context_from(output_so_far(state)))
        return [found[name] for name in names if name in found]

    def num_sampled(self, request_ids: Iterable[str]) -> int:
        """Tokens of these requests so far, in all, as of the last call that reached the engine."""
        num_tokens = 0
        for name in request_ids:
            if name in self._held:
                num_tokens += len(self._held[name].token_ids)
            elif name in self._running:
                state = self._llm.output_processor.request_states.get(self._running[name].internal_id)
                num_tokens += state.detokenizer.num_output_tokens() if state else 0
        return num_tokens

    def apply_weights(
        self, named_tensors: Mapping[str, Any] | RemoteWeights, version: PolicyVersion, *, recompute_kv: bool
    ) -> float:
        """Replace the weights between two steps of the model; values are checked before (`weights.subscriber`).

        Raises WeightsError: before the model has changed where names, shapes or dtypes are not those expected.
        Where a worker fails later, its model is whole, but some of its layers may have the new weights.
        """
        started = time.perf_counter()
        if isinstance(named_tensors, RemoteWeights):
            self._run(self._replace(version, recompute_kv, named_tensors))
        else:
            self._share(named_tensors, version)
            self._run(self._replace(version, recompute_kv))
        if not recompute_kv:
            self._kept_kv.add(str(version))
        return time.perf_counter() - started

    def _share(self, named_tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Copy the tensors to where the workers read them."""
        wrong = named_tensors.keys() ^ self._expected.keys()
        for name, view in views(self._memory, self._slots).items() if not wrong else ():
            tensor = named_tensors[name]  # once: it may be computed only now
            if spec_of(tensor) == self._expected[name]:
                view.copy_(tensor)
            else:
                wrong.add(name)
        if wrong:
            raise WeightsError(f"weights {version}: not the tensors of the model: {sorted(wrong)}")

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """At temperature 1 (vLLM leaves temperature out of prompt logprobs), of every token after the first."""
        outputs = self._run(self._score(sequences))
        return [after_the_first(output.prompt_logprobs, ids) for output, ids in zip(outputs, sequences, strict=True)]

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[Fingerprint, ...]:
        """What the model's modules give out on each sequence, one at a time; only between requests.

        After the layers' own exchange every worker has the whole of it, and the first has the whole logits.
        """
        found: list[Fingerprint] = []
        self._run(self._llm.collective_rpc("record_fingerprints"))
        try:
            for ids in sequences:
                self.prompt_logprobs([ids])
                found.append(self._run(self._llm.collective_rpc("take_fingerprint", args=(len(ids),)))[0])
        finally:
            self._run(self._llm.collective_rpc("stop_recording"))
        return tuple(found)

    def clear_kv(self) -> None:
        """Zero the KV cache; only between requests."""
        self._run(self._llm.collective_rpc("zero_kv_caches"))
        self._run(self._llm.reset_prefix_cache())

    def close(self) -> None:
        """End vLLM's processes; the engine is of no use afterwards."""
        if self._loop.is_closed():
            return
        self._llm.shutdown()
        _end_processes(self._processes)
        self._run(_cancel_others())
        self._loop.close()
        # Its destructor fails where it runs only as the interpreter ends.
        self._llm = None

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    async def _start(self, version: PolicyVersion) -> None:
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**_async_engine_args(self._config)))
        try:
            pids = await self._llm.collective_rpc("live_no_longer_than", args=(os.getpid(),))
            self._processes = [os.pidfd_open(pid) for pid in sorted({pid for several in pids for pid in several})]
            if self._config.weights.transfer == "files":
                await self._share_memory()
            await self._llm.update_weight_version(str(version))
        except BaseException:
            self._llm.shutdown()
            raise

    async def _share_memory(self) -> None:
        """Map memory here and in all workers. Its file is gone afterwards, so that no death can leave it behind."""
        descriptor, path = tempfile.mkstemp(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
        try:
            # Room that is only promised would end in a bus error at the first write.
            os.posix_fallocate(descriptor, 0, self._size_bytes)
            self._memory = map_memory(path, self._size_bytes)
            info = {"path": path, "size_bytes": self._size_bytes}
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        finally:
            os.close(descriptor)
            os.unlink(path)

    async def _submit(self, name: str, prompt_ids: Sequence[int], params: Any, priority: int) -> _Running:
        # The order of arrival is counted, so that it is the same whatever the clock says.
        self._num_added += 1
        outputs = await self._llm.add_request(
            name, tokens_input(list(prompt_ids)), params, arrival_time=float(self._num_added), priority=priority
        )
        task = asyncio.ensure_future(outputs.get())
        task.add_done_callback(lambda _: self._has_finished.set())
        return _Running(outputs.request_id, task)

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STEP_S):
                await self._has_finished.wait()

    async def _read_ending(self, names: Sequence[str]) -> None:
        states = self._llm.output_processor.request_states
        running = [self._running[name] for name in names if name in self._running]
        if ending := [request.output for request in running if request.internal_id not in states]:
            await asyncio.wait(ending)
        self._read_finished()

    async def _end(self, requests: Sequence[_Running]) -> None:
        if requests:
            # Those that have finished meanwhile are unknown to vLLM; their output waits.
            await self._llm.abort([request.internal_id for request in requests], internal=True)
            await asyncio.wait([request.output for request in requests])

    async def _replace(self, version: PolicyVersion, recompute_kv: bool, remote: RemoteWeights | None = None) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=recompute_kv)
        try:
            await self._transfer(version, remote)
            # Nothing is sampled in between, so that the label is exact.
            await self._llm.update_weight_version(str(version))
        finally:
            await self._llm.resume_generation()

    async def _transfer(self, version: PolicyVersion, remote: RemoteWeights | None) -> None:
        info: dict[str, Any] = {"slots": [list(slot) for slot in self._slots]}
        try:
            async with asyncio.timeout(None if remote is None else _TRANSFER_S):
                if remote is not None:
                    info = await self._join(remote)
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
                await self._llm.finish_weight_update()
                errors = await self._llm.collective_rpc("weight_update_error")
        except Exception as error:
            raise WeightsError(f"weights {version}: the engine did not take them: {error!r}") from error
        for rank, cause in enumerate(errors):
            if cause is not None:
                raise WeightsError(f"weights {version}: worker {rank} could not load them: {cause}")
        if remote is not None:
            remote.received()

    async def _join(self, remote: RemoteWeights) -> dict[str, Any]:
        """Have the learner send; returns what the workers are told to receive."""
        join = remote.receive(self._config.sampler.tensor_parallel_size)
        if join.init_info is not None:
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=join.init_info))
        return join.update_info

    async def _score(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        names = [f"probe-{self._num_added}-{i}" for i in range(len(sequences))]
        running = [
            await self._submit(name, ids, probe_params(), PROBE_PRIORITY)
            for name, ids in zip(names, sequences, strict=True)
        ]
        return [await request.output for request in running]

    def _read_finished(self) -> None:
        self._has_finished.clear()
        for name in [name for name, request in self._running.items() if request.output.done()]:
            output = self._running.pop(name).output.result()
            self._held[name] = generation_of(output, self._eos_token_ids, self._mixed_context_from(output))

    def _mixed_context_from(self, output: Any) -> int | None:
        """Where the first weights begin that came to a running sequence with its KV cache kept.

        A sequence that vLLM had preempted just then has lost its KV cache, and is called mixed nevertheless.
        """
        spans = output.outputs[0].weight_versions or ()
        return next((span.start for span in spans if span.start > 0 and span.version in self._kept_kv), None)


def _async_engine_args(config: Config) -> dict[str, Any]:
    num_workers = config.sampler.tensor_parallel_size
    arguments = engine_args(config) | {
        "tensor_parallel_size": num_workers,
        # Left to vLLM, workers inside a Ray actor would be placed by Ray.
        "distributed_executor_backend": "mp" if num_workers > 1 else "uni",
        "weight_transfer_config": WeightTransferConfig(
            backend=NCCL_BACKEND if config.weights.transfer == "nccl" else BACKEND
        ),
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        # A sequence has a KV cache from its first token on, never before: a prompt is computed in one step.
        "enable_chunked_prefill": False,
    }
    one_prompt = max(_BATCHED_TOKENS, config.model.max_length_tokens, arguments["max_num_seqs"])
    return {"max_num_batched_tokens": one_prompt} | arguments


def _end_processes(descriptors: Sequence[int]) -> None:
    """Wait for processes that were told to end; vLLM itself does not wait for all of its workers."""
    deadline = time.monotonic() + _END_S
    for descriptor in descriptors:
        is_over, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not is_over:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], _END_S)
        os.close(descriptor)
    # Asking for children takes leave of those that have ended.
    multiprocessing.active_children()


async def _cancel_others() -> None:
    """vLLM's own tasks, which would be left on the loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
