"""New weights for a running engine: applied, then proved, and never used unproved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stream_grpo.config import Config
from stream_grpo.errors import WeightsError
from stream_grpo.sampler.generation import Engine
from stream_grpo.types import GenerationRequest, PolicyVersion
from stream_grpo.weights import probe
from stream_grpo.weights.probe import ProbeGap, Tolerance
from stream_grpo.weights.subscriber import Published


class Updater:
    """Applies weights to one engine and keeps the account of it: version, gap, seconds."""

    def __init__(self, config: Config, engine: Engine, timer: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._timer = engine, timer
        self._dtype = config.model.dtype
        self._configured = Tolerance(config.weights.probe_mean_tolerance, config.weights.probe_max_tolerance)
        # vLLM scores a prompt only where it could sample one more token.
        self._max_probe_tokens = config.model.max_length_tokens - 1
        self._recompute_kv = config.sampler.kv_after_update == "recompute"
        self._start_gap: ProbeGap | None = None
        self.version: PolicyVersion | None = None
        """Of the weights that are proved and in use."""
        self.gap: ProbeGap | None = None
        """Of all proofs that passed."""
        self.num_updates = 0
        self.num_failed_proofs = 0
        self.apply_s = 0.0
        """In all, loading alone."""
        self.prove_s = 0.0
        """In all, the probe's engine steps, in which running sequences go on."""

    def update(self, published: Published, in_flight: Sequence[GenerationRequest]) -> None:
        """Apply and prove; afterwards `version` is the published one.

        Sequences in flight sample a few tokens while the probe runs. Where the proof fails these are of unproved
        weights: all sequences are aborted, the weights are loaded a second time into the idle engine, and after a
        proof that passes the sequences start over. Raises ProbeError or WeightsError where the second try fails too;
        then nothing is in flight any more.
        """
        try:
            found = self._apply_and_prove(published)
        except WeightsError:
            self.num_failed_proofs += 1
            self._engine.abort([request.request_id for request in in_flight])
            self._engine.clear_kv()
            found = self._apply_and_prove(published)
            for request in in_flight:
                self._engine.add(request)
        self._start_gap = self._start_gap or found
        self.gap = found if self.gap is None else probe.merged(self.gap, found)
        self.version = published.manifest.version
        self.num_updates += 1

    def _apply_and_prove(self, published: Published) -> ProbeGap:
        version, limit = published.manifest.version, self._max_probe_tokens
        sequences = [ids[:limit] for ids in published.manifest.probe.sequences]
        learners = [logprobs[: limit - 1] for logprobs in published.manifest.probe.logprobs]
        self.apply_s += self._engine.apply_weights(published.tensors, version, recompute_kv=self._recompute_kv)
        started = self._timer()
        found = probe.gap(self._engine.prompt_logprobs(sequences), learners)
        self.prove_s += self._timer() - started
        probe.check(found, probe.tolerance(self._dtype, self._configured, self._start_gap), version)
        return found
