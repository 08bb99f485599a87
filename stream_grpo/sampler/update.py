"""New weights for a running engine: applied, then proved, and never used unproved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stream_grpo.config import Config
from stream_grpo.errors import ProbeError, WeightsError
from stream_grpo.sampler.generation import Engine
from stream_grpo.types import GenerationRequest, PolicyVersion
from stream_grpo.weights import fingerprint, probe
from stream_grpo.weights.probe import ProbeGap, Tolerance
from stream_grpo.weights.subscriber import Published


class Updater:
    """Applies weights to one engine and keeps the account of it: version, gap, seconds."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        timer: Callable[[], float] = time.perf_counter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`timer`: seconds for durations; `clock`: unix seconds."""
        self._engine, self._timer, self._clock = engine, timer, clock
        self._dtype = config.model.dtype
        self._configured = Tolerance(config.weights.probe_mean_tolerance, config.weights.probe_max_tolerance)
        # vLLM scores a prompt only where it could sample one more token.
        self._max_probe_tokens = config.model.max_length_tokens - 1
        self._recompute_kv = config.sampler.kv_after_update == "recompute"
        self._start_gap: ProbeGap | None = None
        self.version: PolicyVersion | None = None
        """Of the weights that are proved and in use."""
        self.sha256: str | None = None
        """Of these weights, see `Manifest.weights_sha256`: checked where they are files, as published over NCCL."""
        self.gap: ProbeGap | None = None
        """Of all proofs that passed."""
        self.num_updates = 0
        self.num_failed_proofs = 0
        self.apply_s = 0.0
        """In all, loading alone."""
        self.prove_s = 0.0
        """In all, the probe's engine steps, in which running sequences go on."""
        self.lag_s = 0.0
        """In all, from the publish of a version until it is proved and in use."""

    def update(self, published: Published, in_flight: Sequence[GenerationRequest]) -> None:
        """Apply and prove; afterwards `version` is the published one.

        Sequences in flight sample a few tokens while the probe runs. Where the proof fails these are of unproved
        weights: all sequences are aborted, the weights are loaded a second time into the idle engine, and after a
        proof that passes the sequences start over. Where the second try fails too nothing is in flight any more, and
        it raises WeightsError for weights that cannot be loaded, or ProbeError, which names the first module whose
        output departs from the learner's.
        """
        try:
            found = self._apply_and_prove(published)
        except WeightsError:
            self.num_failed_proofs += 1
            self._engine.abort([request.request_id for request in in_flight])
            self._engine.clear_kv()
            found = self._apply_and_prove_or_explain(published)
            for request in in_flight:
                self._engine.add(request)
        self._start_gap = self._start_gap or found
        self.gap = found if self.gap is None else probe.merged(self.gap, found)
        self.version, self.sha256 = published.manifest.version, published.manifest.weights_sha256
        self.num_updates += 1
        self.lag_s += max(0.0, self._clock() - published.manifest.created_at_s)

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

    def _apply_and_prove_or_explain(self, published: Published) -> ProbeGap:
        try:
            return self._apply_and_prove(published)
        except ProbeError as error:
            learners = published.manifest.probe
            sequences = [ids[: self._max_probe_tokens] for ids in fingerprint.starts(learners.sequences)]
            mine = self._engine.fingerprints(sequences)
            cause = fingerprint.explain(mine, learners.fingerprints, self._dtype)
            raise ProbeError(f"{error}; {cause}") from error
