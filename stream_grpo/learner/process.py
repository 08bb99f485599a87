"""The learner's loop: lease a batch, train on it, publish, keep a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np

from curator.wire import WireError
from stream_grpo.config import Config
from stream_grpo.config_stream import Stream
from stream_grpo.errors import StallError
from stream_grpo.failpoints import failpoint
from stream_grpo.learner.batching import Sampled, TrainBatch, make_train_batch, with_shuffled_rewards
from stream_grpo.learner.branches import Branches
from stream_grpo.learner.checkpoint import newest_complete, oldest_kept, prune, verify, write_checkpoint
from stream_grpo.learner.control import Controller
from stream_grpo.learner.figures import CameIn, came_in, figures_of_batch, figures_of_groups, shares_between
from stream_grpo.learner.guard import Guard
from stream_grpo.learner.layout import Layout
from stream_grpo.learner.universal import ENGINE, fitting
from stream_grpo.metrics import MetricsLog
from stream_grpo.transport.channels import LearnerChannel, Lease
from stream_grpo.types import Forks, PolicyVersion, Rollout, RolloutGroup, policy_age, spent_tokens
from stream_grpo.weights.manifest import Probe
from stream_grpo.weights.nccl_sender import NcclPublisher
from stream_grpo.weights.probe import gap
from stream_grpo.weights.publisher import Publisher

if TYPE_CHECKING:  # the loop itself needs no DeepSpeed
    from stream_grpo.learner.engine import LearnerEngine
    from stream_grpo.learner.grammar import Grammar
    from stream_grpo.learner.lead import LeadEngine, LeadStep
    from stream_grpo.learner.train_step import TrainStep


class LearnerProcess:
    """Owns the engine and the version count. Knows nothing of Ray."""

    def __init__(
        self,
        config: Config,
        engine: LearnerEngine | LeadEngine,
        step: TrainStep | LeadStep,
        channel: LearnerChannel,
        publisher: Publisher | NcclPublisher,
        metrics: MetricsLog,
        clock: Callable[[], float] = time.time,
        grammar: Grammar | None = None,
    ) -> None:
        self._config, self._engine, self._step, self._channel = config, engine, step, channel
        self._publisher, self._metrics, self._clock = publisher, metrics, clock
        self._grammar = grammar
        self._checkpoints = config.run_dir / "checkpoints"
        self._branches = Branches.load(config.run_dir / "branches.json")
        self._guard, self._control = Guard(), Controller(config.control, config.stream)
        self._probe_sequences = _first_probe(config, engine.vocab_size)
        self._probed: Probe | None = None
        self._version = self._published = PolicyVersion(0, 0)
        self._newest_checkpoint: PolicyVersion | None = None
        self._ledger: Mapping[str, Any] = {}
        self._age_max = self._age_sum = self._num_trained = 0
        self._busy_s = self._waited_s = self._last_step_at = 0.0
        self._waits_for: list[str] = []
        # In all: waiting for batches, publishing, making checkpoints. Since when it waits, where it does.
        self._all_waited_s = self._publish_s = self._checkpoint_s = 0.0
        self._waits_since: float | None = None
        self._told = (0.0, 0.0)
        self._came_in: CameIn | None = None

    def run(self, stop: Event) -> None:
        """Train until the last step or until told to stop; either way a checkpoint is left."""
        self._restore()
        self._channel.start(self._version, self._branches.forks)
        self._publish()
        if self._config.run.max_generated_tokens is not None:
            self._ledger = self._channel.ledger()
        self._train_until_done(stop)
        self._checkpoint()
        self._engine.export(self._config.run_dir / "model")

    def _train_until_done(self, stop: Event) -> None:
        while not self._is_done:
            lease = self._wait_for_batch(stop)
            if lease is None:
                return
            self._train(lease)
            interval = self._control.publish_interval
            if self._version.step // interval > self._published.step // interval:
                self._publish()
            is_due = self._version.step % self._config.learner.checkpoint_interval == 0
            if is_due or self._ledger.get("checkpoint_wanted"):
                self._checkpoint()

    @property
    def _is_done(self) -> bool:
        run = self._config.run
        if self._version.step >= run.num_steps or run.max_generated_tokens is None:
            return self._version.step >= run.num_steps
        return spent_tokens(self._ledger["tokens"]) >= run.max_generated_tokens

    def _restore(self) -> None:
        """Continue from the newest complete checkpoint, on a new branch; from the start where there is none."""
        path, warnings = newest_complete(self._checkpoints)
        for warning in warnings:
            self._metrics.write("warning", {"message": warning})
        fork = PolicyVersion(0, 0)
        if path is not None:
            fork = verify(path).version
            learner = self._config.learner
            state = self._engine.load(fitting(path, Layout(learner.num_ranks, learner.zero_stage)))
            self._step.restore(state)
            self._control.restore(state.get("control", {}))
            self._step.rate_scale = self._control.settings.learning_rate_scale
        # A learner that has published before may have been ahead of its checkpoint: those versions stay taken.
        self._version = self._branches.open(fork)

    def _wait_for_batch(self, stop: Event) -> Lease | None:
        begun = self._waits_since = self._clock()
        while not stop.is_set():
            try:
                lease = self._channel.lease(
                    self._version,
                    self._config.stream.groups_per_step,
                    target_policy_age=self._control.settings.target_policy_age if self._control.is_enabled else None,
                )
                waited_s = self._clock() - begun
                if waited_s > self._config.stream.stall_timeout_s and not lease.groups:
                    raise StallError(f"no batch for step {self._version.step + 1} in {waited_s:.0f} s: {lease.cause}")
                if not lease.groups:
                    self._waits_for = [f"the batch of step {self._version.step + 1} ({waited_s:.0f} s): {lease.cause}"]
            except (StallError, WireError):
                # All that was trained is known to the buffer: here, and only here, a checkpoint agrees with it.
                self._checkpoint()
                raise
            if lease.groups:
                self._waited_s, self._waits_for = waited_s, []
                self._all_waited_s, self._waits_since = self._all_waited_s + waited_s, None
                return lease
            if lease.checkpoint_wanted:
                self._checkpoint()
        return None

    def _train(self, lease: Lease) -> None:
        begun = self._clock()
        batch = self._batch(lease.groups)
        self._guard.check_logprobs(batch)
        values = self._step.run(batch, watch=self._guard.check_ratios)
        step_s = self._clock() - begun
        self._busy_s += step_s
        tokens = {group.group_id: tokens_by_fate(group, self._is_trained) for group in lease.groups}
        self._version = PolicyVersion(self._version.branch, self._version.step + 1)
        self._last_step_at = self._clock()
        failpoint("learner.stepped")
        self._ledger = self._channel.trained(self._version, [group.group_id for group in lease.groups], tokens)
        self._age_max = max(self._age_max, *lease.ages)
        self._age_sum += sum(lease.ages)
        self._num_trained += len(lease.ages)
        self._probe_sequences = _probe_from(lease.groups, self._config.weights.num_probe_sequences)
        self._metrics.write("step", self._step_record(lease, batch, values, step_s))
        if (alarm := self._guard.alarm) is not None:
            self._metrics.write("warning", {"message": alarm})
        self._steer(values)

    def _steer(self, values: Mapping[str, Any]) -> None:
        """Where the closed loop is on: change what the step asks to be changed, and say why."""
        if (change := self._control.step(values)) is not None:
            self._step.rate_scale = self._control.settings.learning_rate_scale
            version = {"step": self._version.step, "branch": self._version.branch}
            self._metrics.write("control", version | asdict(change))

    def _batch(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        if self._grammar is not None:
            self._grammar.check(groups)
        if self._config.algo.shuffle_rewards:
            groups = [with_shuffled_rewards(group, self._config.run.seed) for group in groups]
        groups = self._step.rewarded(
            groups,
            vocab_size=self._engine.vocab_size,
            microbatch_tokens=self._config.learner.microbatch_tokens,
        )
        return make_train_batch(
            groups,
            self._step.advantages,
            vocab_size=self._engine.vocab_size,
            microbatch_tokens=self._config.learner.microbatch_tokens,
            num_minibatches=self._config.learner.num_minibatches,
            num_ranks=self._config.learner.num_ranks,
            sampled_by=self._sampled_by,
            is_trained=self._is_trained,
            attention_cost=self._engine.attention_cost,
            share_prompts=self._config.learner.share_prompts,
            packing=self._config.learner.packing,
        )

    def _sampled_by(self, version: PolicyVersion) -> Sampled:
        """What is known of the weights that sampled a token, at the start of the step."""
        return Sampled(policy_age(version, self._version, self._branches.forks), self._guard.differs(version))

    def _is_trained(self, rollout: Rollout) -> bool:
        return enters_loss(rollout, self._config.stream, self._version, self._branches.forks)

    def _step_record(
        self, lease: Lease, batch: TrainBatch, values: Mapping[str, float], step_s: float
    ) -> dict[str, Any]:
        rollouts = [rollout for group in lease.groups for rollout in group.rollouts]
        rewards = [r.reward.reward for r in rollouts if r.reward.reward is not None]
        return {
            "step": self._version.step,
            "branch": self._version.branch,
            "reward_mean": float(np.mean(rewards)) if rewards else None,
            "response_tokens_mean": float(np.mean([r.num_sampled_tokens for r in rollouts])),
            "age_max": max(lease.ages),
            "age_mean": float(np.mean(lease.ages)),
            **_staleness(lease),
            "num_groups": len(lease.groups),
            "num_baseline_only": batch.num_baseline_only,
            "step_s": step_s,
            "waited_s": self._waited_s,
            "learner_busy_s": self._busy_s,
            **self._seconds_between(),
            **figures_of_groups(lease.groups),
            **figures_of_batch(batch),
            **(self._guard.gaps._asdict() if self._guard.gaps else {}),
            "came_in": self._came_in_since(),
            **values,
            **(asdict(self._control.settings) if self._control.is_enabled else {}),
            "groups": self._ledger["groups"],
            "tokens": self._ledger["tokens"],
            "reused": self._ledger["reused"],
        }

    def _seconds_between(self) -> dict[str, float]:
        """What publishes and checkpoints took since the step before."""
        before, self._told = self._told, (self._publish_s, self._checkpoint_s)
        return {"publish_s": self._publish_s - before[0], "checkpoint_s": self._checkpoint_s - before[1]}

    def _came_in_since(self) -> dict[str, float | int | None]:
        """The groups that came in since the step before, by their rewards; nothing in the first step of a start."""
        before, self._came_in = self._came_in, came_in(self._ledger["groups"], self._ledger.get("ends", {}))
        return {} if before is None else shares_between(before, self._came_in)

    def _publish(self) -> None:
        """Hand the weights to the samplers, with a probe that proves them."""
        begun = self._clock()
        probe = self._probe(self._probe_sequences)
        movement = None
        if (earlier := self._probed) is not None:
            movement = gap(self._engine.probe_logprobs(earlier.sequences), earlier.logprobs).mean
        self._busy_s += self._clock() - begun
        manifest = self._publisher.publish(
            self._version,
            self._branches.forks,
            self._engine.named_weights(),
            probe,
            specs=self._engine.weight_specs(),
            adapter=self._engine.adapter,
        )
        self._guard.published(self._version, manifest.weights_sha256, movement)
        self._probed, self._published = probe, self._version
        self._publish_s += self._clock() - begun
        self._control.published()

    def _probe(self, sequences: Sequence[Sequence[int]]) -> Probe:
        logprobs = self._engine.probe_logprobs(sequences)
        fingerprints = self._engine.fingerprints(sequences)
        return Probe(tuple(map(tuple, sequences)), tuple(map(tuple, logprobs)), fingerprints)

    def _checkpoint(self) -> None:
        if self._version == self._newest_checkpoint:
            return
        begun = self._clock()
        state = self._step.state()
        if self._control.is_enabled:
            state["control"] = self._control.state()
        write_checkpoint(self._checkpoints, self._version, lambda path: self._engine.save(path / ENGINE, state))
        self._newest_checkpoint = self._version
        prune(self._checkpoints, self._config.learner.keep_checkpoints)
        oldest = oldest_kept(self._checkpoints)
        assert oldest is not None
        self._channel.checkpointed(oldest)
        self._checkpoint_s += self._clock() - begun

    def status(self) -> dict[str, Any]:
        """What the launcher shows and sums up; safe from another thread."""
        return {
            "version": list(self._version),
            "busy_s": self._busy_s,
            "last_step_at": self._last_step_at,
            "age_max": self._age_max,
            "age_mean": self._age_sum / self._num_trained if self._num_trained else 0.0,
            "num_trained": self._num_trained,
            "ledger": dict(self._ledger),
            "waits_for": self._waits_for,
            "waited_s": self._all_waited_s + (self._clock() - since if (since := self._waits_since) else 0.0),
            "publish_s": self._publish_s,
            "checkpoint_s": self._checkpoint_s,
        }


def enters_loss(rollout: Rollout, stream: Stream, start: PolicyVersion, forks: Forks) -> bool:
    """Whether a rollout of a leased group does: with `baseline_only`, if no token is too old at the step's `start`."""
    if stream.too_old != "baseline_only":
        return True
    ages = (policy_age(version, start, forks) for version in rollout.versions())
    return max(ages, default=0) <= stream.max_policy_age


def tokens_by_fate(group: RolloutGroup, is_trained: Callable[[Rollout], bool]) -> dict[str, int]:
    """Sampled tokens of the rollouts that entered the loss, of those in the baseline alone, and of those in neither.

    The trunk of a branching group is of neither, whatever became of its rollout.
    """
    valid = [rollout for rollout in group.rollouts if rollout.valid]
    num_valid = sum(r.num_target_tokens for r in valid)
    num_trained = sum(r.num_target_tokens for r in valid if is_trained(r))
    masked = group.num_sampled_tokens - num_valid
    return {"trained": num_trained, "baseline_only": num_valid - num_trained, "masked": masked}


def _staleness(lease: Lease) -> dict[str, float]:
    """Mean and maximum over the groups of each part of their age."""
    values: dict[str, float] = {}
    for name, parts in zip(("publish_lag", "in_flight", "in_queue"), zip(*lease.staleness, strict=True), strict=True):
        values |= {f"age_{name}_mean": float(np.mean(parts)), f"age_{name}_max": max(parts)}
    return values


def _first_probe(config: Config, vocab_size: int) -> list[list[int]]:
    """Before anything is sampled: token ids drawn from the run's seed."""
    rng = np.random.default_rng(config.run.seed)
    length = min(32, config.model.max_length_tokens - 1)
    shape = (config.weights.num_probe_sequences, length)
    ids: list[list[int]] = rng.integers(0, vocab_size, shape).tolist()
    return ids


def _probe_from(groups: Sequence[RolloutGroup], num_sequences: int) -> list[list[int]]:
    """The first rollout of the first groups of a batch: what the policy really writes."""
    return [group.rollouts[0].token_ids.tolist() for group in groups[:num_sequences]]
