"""vLLM in this process, owned by the caller's thread: weights change between two steps.

Below the class stands what the other form (`async_engine`) asks of vLLM in the same words: settings, the reading of
what is finished, and the reload of weights in a worker.
"""
# ruff: noqa: E402  (vLLM reads its environment at import, so that some lines must come before)

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from stream_grpo.sampler.environment import ALWAYS

# Without these the engine cannot work as described; who starts the process sets the rest (`environment`).
for _name, _value in ALWAYS.items():
    os.environ.setdefault(_name, _value)

import torch
from vllm.config import StructuredOutputsConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from stream_grpo.config import Config
from stream_grpo.errors import WeightsError
from stream_grpo.sampler.generation import end_reason, logprobs_of_sampled, versions_of_spans
from stream_grpo.sampler.prompts import end_token_ids, load_tokenizer
from stream_grpo.types import EndReason, Generation, GenerationRequest, PolicyVersion
from stream_grpo.weights.fingerprint import Recorder, decoder_modules
from stream_grpo.weights.manifest import Fingerprint, TensorSpec, model_tensors

# A probe goes before everything that waits; all others run in the order in which they were added.
PROBE_PRIORITY, PRIORITY = 0, 1
_BATCHED_TOKENS_ON_CPU = 4096
# Only whole blocks are shared, and vLLM's own on CPU, of 128 tokens, are longer than many prompts. Kernels want 32s.
_SHARED_BLOCK_TOKENS_ON_CPU = 32
OF_THE_MODEL_FOLDER = PolicyVersion(0, 0)
"""What the weights of the model folder are called."""


@dataclass(slots=True)
class _Unfinished:
    internal_id: str
    """vLLM's own id of the request."""
    mixed_context_from: int | None = None


class InProcessEngine:
    """The engine of `generation.Engine` on vLLM."""

    def __init__(self, config: Config, version: PolicyVersion = OF_THE_MODEL_FOLDER) -> None:
        """Load the model folder, whose weights are `version`. Every request brings its own seed."""
        self._sampler = config.sampler
        self._eos_token_ids = end_token_ids(config.model.path, load_tokenizer(config.model.path))
        self._expected = model_tensors(config.model.path, config.model.dtype)
        if current_platform.is_cpu():
            torch.set_num_threads(config.sampler.num_threads)
        self._llm: Any = LLMEngine.from_engine_args(EngineArgs(**engine_args(config)))
        self._llm.set_weight_version(str(version))
        self._unfinished: dict[str, _Unfinished] = {}
        # Finished while a probe ran; not given back yet.
        self._held: dict[str, Generation] = {}
        self._num_added, self._num_weights = 0, 0
        self._params = sampling_params(config, self._eos_token_ids)

    @property
    def num_slots(self) -> int:
        """Sequences that run at once; a probe has slots of its own."""
        return self._sampler.max_num_seqs

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and neither given back by `step` nor aborted."""
        return len(self._unfinished) + len(self._held)

    def expected_tensors(self) -> Mapping[str, TensorSpec]:
        """What `apply_weights` takes: the tensors of the model folder, in the run's dtype."""
        return self._expected

    def add(self, request: GenerationRequest) -> None:
        """Take a request. Raises ValueError for an id in use or a prompt that vLLM refuses."""
        if request.request_id in self._unfinished or request.request_id in self._held:
            raise ValueError(f"request {request.request_id} is still unfinished")
        params = params_of(request, self._params)
        internal_id = self._submit(request.request_id, request.prompt_ids, params, PRIORITY)
        self._unfinished[request.request_id] = _Unfinished(internal_id)

    def step(self) -> list[Generation]:
        """Sample one token of every running sequence; the generations that have finished."""
        self._step_and_hold()
        finished = list(self._held.values())
        self._held.clear()
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Generation]:
        """End requests now; what they have so far comes back, as `abort` unless it had finished."""
        ended: list[Generation] = []
        internal_ids: list[str] = []
        for request_id in list(request_ids):
            if request_id in self._held:
                ended.append(self._held.pop(request_id))
            elif request_id in self._unfinished:
                internal_id = self._unfinished[request_id].internal_id
                # vLLM drops the output of an aborted request in this mode, so that it is asked for before.
                state = self._llm.output_processor.request_states[internal_id]
                ended.append(self._generation(output_so_far(state)))
                internal_ids.append(internal_id)
        self._llm.abort_request(internal_ids, internal=True)
        return ended

    def progress(self, request_ids: Iterable[str]) -> list[Generation]:
        """What requests have so far, as `partial` unless they had finished; they go on."""
        found = []
        for request_id in request_ids:
            if request_id in self._held:
                found.append(self._held[request_id])
            elif (request := self._unfinished.get(request_id)) is not None:
                state = self._llm.output_processor.request_states[request.internal_id]
                found.append(generation_so_far(state, self._eos_token_ids, request.mixed_context_from))
        return found

    def num_sampled(self, request_ids: Iterable[str]) -> int:
        """Tokens of these requests so far, in all."""
        states = self._llm.output_processor.request_states
        names = list(request_ids)
        running = [states[self._unfinished[n].internal_id] for n in names if n in self._unfinished]
        num_held = sum(len(self._held[name].token_ids) for name in names if name in self._held)
        return num_held + sum(int(state.detokenizer.num_output_tokens()) for state in running)

    def apply_weights(self, named_tensors: Mapping[str, Any], version: PolicyVersion, *, recompute_kv: bool) -> float:
        """Replace the weights; names, shapes and values are checked before (`weights.subscriber`)."""
        started = time.perf_counter()
        if recompute_kv:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self._leave_prefixes()
        try:
            self._llm.collective_rpc(_reload, args=(named_tensors, self._llm.vllm_config))
        except Exception as error:
            raise WeightsError(f"weights {version}: the engine could not load them: {error!r}") from error
        self._llm.set_weight_version(str(version))
        if not recompute_kv:
            self._mark_mixed_contexts()
        return time.perf_counter() - started

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """At temperature 1 (vLLM leaves temperature out of prompt logprobs), of every token after the first."""
        params = probe_params()
        names = [f"probe-{self._num_added}-{i}" for i in range(len(sequences))]
        for name, ids in zip(names, sequences, strict=True):
            self._submit(name, ids, params, PROBE_PRIORITY)
        outputs: dict[str, Any] = {}
        while len(outputs) < len(names):
            outputs |= self._step_and_hold()
        return [after_the_first(outputs[name].prompt_logprobs, ids) for name, ids in zip(names, sequences, strict=True)]

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[Fingerprint, ...]:
        """What the model's modules give out on each sequence, one at a time; only between requests."""
        (modules,) = self._llm.collective_rpc(modules_of)
        found: list[Fingerprint] = []
        with Recorder(modules) as recorder:
            for ids in sequences:
                self.prompt_logprobs([ids])
                found += recorder.take([len(ids)])
        return tuple(found) if modules else ()

    def clear_kv(self) -> None:
        """Zero the KV cache; only between requests."""
        self._llm.collective_rpc(zero_kv)
        self._leave_prefixes()

    def close(self) -> None:
        """Shut vLLM down; the engine is of no use afterwards."""
        self._llm.engine_core.shutdown()

    def _submit(self, request_id: str, prompt_ids: Sequence[int], params: Any, priority: int) -> str:
        # The order of arrival is counted, so that it is the same whatever the clock says.
        self._num_added += 1
        # What vLLM's renderer makes of token ids; it would take as long for it as for all the rest of a request.
        prompt = tokens_input(list(prompt_ids), cache_salt=self._salt)
        internal_id: str = self._llm.add_request(
            request_id, prompt, params, arrival_time=float(self._num_added), priority=priority
        )
        return internal_id

    def _step_and_hold(self) -> dict[str, Any]:
        """One engine step. Generations that finish are held; the outputs of probes come back by id."""
        probes: dict[str, Any] = {}
        if not self._llm.has_unfinished_requests():
            return probes
        for output in self._llm.step():
            if output.request_id in self._unfinished:
                self._held[output.request_id] = self._generation(output)
            else:
                probes[output.request_id] = output
        return probes

    def _generation(self, output: Any) -> Generation:
        request = self._unfinished.pop(output.request_id)
        return generation_of(output, self._eos_token_ids, request.mixed_context_from)

    @property
    def _salt(self) -> str | None:
        """By which the prefix cache tells apart equal tokens of different weights."""
        return str(self._num_weights) if self._sampler.prefix_cache else None

    def _leave_prefixes(self) -> None:
        """No request reads from now on what the prefix cache holds now.

        What it holds is found by tokens and salt. A request with nothing computed yet takes the new salt. One that runs
        on keeps its salt, under which it stores keys of mixed weights: such requests alone have it, and are barred from
        reading, as they would where they are preempted and begin again.
        """
        if not self._sampler.prefix_cache:
            return
        self._num_weights += 1
        for request in self._llm.engine_core.engine_core.scheduler.requests.values():
            if request.num_computed_tokens > 0:
                request.skip_reading_prefix_cache = True
            else:
                request.cache_salt = self._salt
                request.block_hashes.clear()
                request.update_block_hashes()

    def _mark_mixed_contexts(self) -> None:
        """Note the next token of every request that has something in the KV cache of the weights before."""
        states = self._llm.output_processor.request_states
        requests = self._llm.engine_core.engine_core.scheduler.requests
        for unfinished in self._unfinished.values():
            if unfinished.mixed_context_from is None and requests[unfinished.internal_id].num_computed_tokens > 0:
                state = states[unfinished.internal_id]
                unfinished.mixed_context_from = state.detokenizer.num_output_tokens()


def engine_args(config: Config) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` for this run."""
    sampler = config.sampler
    arguments: dict[str, Any] = {
        "model": str(config.model.path),
        "dtype": config.model.dtype,
        "seed": config.run.seed % (1 << 31),
        "max_model_len": config.model.max_length_tokens,
        "max_num_seqs": sampler.max_num_seqs + config.weights.num_probe_sequences,
        # The distribution that was really sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        # Text never passes here, and no setting comes from the model folder unseen.
        "skip_tokenizer_init": not config.environment.grammar,
        "generation_config": "vllm",
        "enable_prefix_caching": sampler.prefix_cache,
        # The one backend whose masks the learner makes too; vLLM sets them on logits before temperature and filters.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
        "scheduling_policy": "priority",
        # A step is finished before weights change, so that versions are exact.
        "async_scheduling": False,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = sampler.kv_cache_bytes
        # A prompt that is computed in parts rewinds its request's generator, which CPU generators cannot do.
        arguments["enable_chunked_prefill"] = False
        if sampler.prefix_cache:
            arguments["block_size"] = _SHARED_BLOCK_TOKENS_ON_CPU
        num_seqs = int(arguments["max_num_seqs"])
        arguments["max_num_batched_tokens"] = max(_BATCHED_TOKENS_ON_CPU, config.model.max_length_tokens, num_seqs)
    else:
        arguments["gpu_memory_utilization"] = sampler.gpu_memory_utilization
    return arguments


def sampling_params(config: Config, eos_token_ids: frozenset[int]) -> SamplingParams:
    """What all requests of a run have in common; `params_of` makes those of one."""
    return SamplingParams(
        temperature=config.sampler.temperature,
        top_p=config.sampler.top_p,
        top_k=config.sampler.top_k,
        min_p=config.sampler.min_p,
        logprobs=0,
        stop_token_ids=sorted(eos_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def params_of(request: GenerationRequest, common: SamplingParams) -> SamplingParams:
    """The parameters of one request."""
    # Shallow copies, here and in vLLM: deep ones of the same settings cost a twentieth of a sampler's time.
    params = copy.copy(common)
    params.max_tokens, params.seed = request.max_new_tokens, request.seed
    if request.grammar is not None:
        params.structured_outputs = _structured(request.grammar)
    if not request.reads_cache:
        params.skip_reading_prefix_cache = True
    return params


@lru_cache
def _structured(grammar: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=grammar)


def probe_params() -> SamplingParams:
    """Scores a prompt at temperature 1; vLLM scores one only where it samples a token too."""
    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        seed=0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def generation_of(output: Any, eos_token_ids: frozenset[int], mixed_context_from: int | None) -> Generation:
    """A finished vLLM output; one without complete logprobs or versions ends as `error`."""
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    reason = end_reason(completion.finish_reason, completion.stop_reason, eos_token_ids)
    logprobs = logprobs_of_sampled(token_ids, completion.logprobs)
    spans = [(span.version, span.start, span.end) for span in completion.weight_versions or ()]
    versions = versions_of_spans(spans, len(token_ids))
    if logprobs is None or versions is None:
        token_ids, logprobs, versions, reason = [], np.zeros(0, np.float32), (), EndReason.ERROR
    is_mixed = mixed_context_from is not None and mixed_context_from < len(token_ids)
    return Generation(
        request_id=output.request_id,
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=logprobs,
        versions=versions,
        end_reason=reason,
        mixed_context_from=mixed_context_from if is_mixed else None,
        num_prompt_tokens=len(output.prompt_token_ids or ()),
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def output_so_far(state: Any) -> Any:
    """The output of a running request as if it were aborted now; asking changes nothing."""
    return state.make_request_output([], None, FinishReason.ABORT, None)


def generation_so_far(state: Any, eos_token_ids: frozenset[int], mixed_context_from: int | None) -> Generation:
    """What a running request has."""
    generation = generation_of(output_so_far(state), eos_token_ids, mixed_context_from)
    return replace(generation, end_reason=EndReason.PARTIAL)


def after_the_first(tables: Sequence[Any], ids: Sequence[int]) -> list[float]:
    """Logprobs of a prompt's tokens, looked up by id; NaN where vLLM gives none. The first token has none."""
    entries = [table.get(token_id) for table, token_id in zip(tables[1:], ids[1:], strict=True)]
    return [float("nan") if entry is None else float(entry.logprob) for entry in entries]


def reload_model(model: torch.nn.Module, model_config: Any, named_tensors: Mapping[str, torch.Tensor]) -> None:
    """Load weights into a worker's model in place; works with the packed linear layers of the CPU backend.

    Belongs under `set_current_vllm_config`.
    """
    with torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            # vLLM's models have this method; torch's modules have not.
            model.load_weights(iter(named_tensors.items()))  # type: ignore[operator]
        finally:
            # Also after a failure: layers left without storage would kill the engine at its next step.
            finalize_layerwise_reload(model, model_config)
        _repack_tied_head(model)


def modules_of(worker: Any) -> dict[str, torch.nn.Module]:
    """The modules of a worker's model that have fingerprints."""
    return decoder_modules(worker.model_runner.model)


def zero_kv(worker: Any) -> None:
    """Zero the KV cache of a worker."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _reload(worker: Any, named_tensors: Mapping[str, torch.Tensor], vllm_config: Any) -> None:
    with set_current_vllm_config(vllm_config):
        reload_model(worker.model_runner.model, vllm_config.model_config, named_tensors)


def _repack_tied_head(model: torch.nn.Module) -> None:
    """On CPU a head tied to the embedding owns a packed copy, which no entry of a checkpoint replaces."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
