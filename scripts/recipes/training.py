"""One training with an imposed age: the engines, curator and rewards of a run, in one process and in step.

At learner step n the sampler applies version max(0, n - lag) and samples the whole batch with it: every trained token
is min(n, lag) steps old.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curator.curation import Curation
from curator.pool import Pool
from recipes.plan import Cell, Delay, check_age
from recipes.source import NoSignal, Source
from stream_grpo.config import Config
from stream_grpo.evaluation import EvaluationRun, ProblemScore, evaluate, paired_rise
from stream_grpo.learner.batching import Sampled, make_train_batch
from stream_grpo.learner.engine import LearnerEngine
from stream_grpo.learner.guard import Guard
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.parts import learner_engine
from stream_grpo.rewards.score import Scorer
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.rewards.verifiers import VERIFIERS
from stream_grpo.rundir import read_problems
from stream_grpo.sampler.engines import make_engine
from stream_grpo.sampler.generation import generate
from stream_grpo.sampler.prompts import Prompts
from stream_grpo.sampler.update import Updater
from stream_grpo.types import PolicyVersion, RolloutGroup, policy_age
from stream_grpo.weights.manifest import Manifest, Probe
from stream_grpo.weights.subscriber import Published

MEANS = ("ess", "mask_share", "clip_share_low", "clip_share_high", "abs_log_ratio", "grad_norm", "entropy")
"""Metrics of a learner step that a result holds the mean of."""


class Bench:
    """The sampler's engine with all that is the same in every cell: it is made once and kept warm."""

    def __init__(self, config: Config) -> None:
        self._engine, self._prompts, self._scorer = make_engine(config), Prompts(config), Scorer(VERIFIERS)
        self._scoring = Scoring(config.rewards)
        self._problems, heldout = read_problems(config, self._prompts, say=lambda text: None)
        self._heldout = heldout.during
        self._before: dict[int, list[ProblemScore]] = {}

    def run(self, cell: Cell, config: Config) -> dict[str, Any]:
        """Train and measure; `config` has the preset and the seed of the cell.

        A training that cannot go on is measured where it came to. Raises BenchError where the age is not the imposed
        one.
        """
        begun = time.perf_counter()
        learner = learner_engine(config)
        with tempfile.TemporaryDirectory() as directory:
            pool = Pool.create(Path(directory) / "pool", self._problems)
            curation = Curation(
                pool, group_size=config.sampler.group_size, seed=config.run.seed, **config.curator.model_dump()
            )
            source = Source(config, self._engine, self._prompts, self._scorer, curation)
            training = _Training(config, cell, learner, Updater(config, self._engine), source)
            before = self._scores_before(config, training)
            train_begun, ended_early = time.perf_counter(), None
            try:
                while training.step < cell.lag + cell.num_steps:
                    training.advance()
            except (FloatingPointError, NoSignal) as error:
                ended_early = str(error)
            train_s = time.perf_counter() - train_begun
            after = self._evaluate(config, training.apply_newest())
            curation.close()
        learner.close()
        return {
            **training.result(),
            "passed_before": [score.num_passed for score in before],
            "passed_after": [score.num_passed for score in after],
            "num_samples": config.evaluation.interval_samples,
            "before": _pass_at_1(before),
            "after": _pass_at_1(after),
            "rise": paired_rise(before, after, config.run.seed).as_dict(),
            "ended_early": ended_early,
            "train_s": train_s,
            "seconds": time.perf_counter() - begun,
        }

    def _scores_before(self, config: Config, training: _Training) -> list[ProblemScore]:
        """Of the start weights, once per seed."""
        if config.run.seed not in self._before:
            self._before[config.run.seed] = self._evaluate(config, training.apply_newest())
        return self._before[config.run.seed]

    def _evaluate(self, config: Config, version: PolicyVersion) -> list[ProblemScore]:
        run = EvaluationRun(
            self._heldout,
            self._prompts.token_ids,
            self._prompts.decode,
            self._scoring,
            num_samples=config.evaluation.interval_samples,
            seed=config.run.seed,
            max_new_tokens=config.sampler.max_new_tokens,
            version=version,
        )
        return evaluate(run, lambda requests: generate(self._engine, requests))


class _Training:
    """The learner's side of a cell, and the account of it."""

    def __init__(self, config: Config, cell: Cell, engine: LearnerEngine, updater: Updater, source: Source) -> None:
        self._config, self._cell, self._engine, self._updater, self._source = config, cell, engine, updater, source
        sampler = config.sampler
        self._train_step = TrainStep(engine, config.algo, config.learner, max_new_tokens=sampler.max_new_tokens)
        self._guard = Guard()
        self._delay: Delay[Published] = Delay(cell.lag)
        self._newest = self._publish(_first_probe(engine.vocab_size, config))
        self._ages: list[float] = []
        self._rewards: list[float] = []
        self._metrics: list[dict[str, Any]] = []

    @property
    def step(self) -> int:
        """Learner steps made."""
        return self._train_step.step

    @property
    def version(self) -> PolicyVersion:
        """Of the learner."""
        return PolicyVersion(0, self.step)

    def apply_newest(self) -> PolicyVersion:
        """Give the sampler the newest finite weights, and say which these are."""
        self._updater.update(self._newest, [])
        return self._newest.manifest.version

    def advance(self) -> None:
        """One learner step on a batch that the weights of `lag` steps before have sampled.

        Raises FloatingPointError for a loss or weights that are not finite, NoSignal where groups with signal are not
        found.
        """
        lagged = self._delay.value
        if self._updater.version != lagged.manifest.version:
            self._updater.update(lagged, [])
        sample = self._source.sample(self.version, max_policy_age=self._cell.lag)
        batch = make_train_batch(
            sample.groups,
            self._train_step.advantages,
            vocab_size=self._engine.vocab_size,
            microbatch_tokens=self._config.learner.microbatch_tokens,
            num_minibatches=self._config.learner.num_minibatches,
            sampled_by=lambda version: Sampled(policy_age(version, self.version, {}), self._guard.differs(version)),
        )
        self._ages.append(mean_age(sample.groups, self.version))
        self._rewards.append(sample.mean_reward)
        self._metrics.append(self._train_step.run(batch, watch=self._guard.check_ratios))
        num_probes = self._config.weights.num_probe_sequences
        self._newest = self._publish([group.rollouts[0].token_ids.tolist() for group in sample.groups[:num_probes]])

    def _publish(self, sequences: Sequence[Sequence[int]]) -> Published:
        """The learner's weights with the proof that a sampler must give, kept in memory."""
        tensors = dict(self._engine.named_weights())
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise FloatingPointError(f"the weights after learner step {self.step} are not finite")
        digest = hashlib.sha256()
        for tensor in tensors.values():
            digest.update(tensor.numpy().tobytes())
        probe = Probe(tuple(map(tuple, sequences)), tuple(map(tuple, self._engine.probe_logprobs(sequences))))
        manifest = Manifest(
            version=self.version, forks={}, tensors={}, sha256=digest.hexdigest(), probe=probe, created_at_s=0.0
        )
        self._guard.published(self.version, manifest.sha256, None)
        published = Published(manifest, tensors)
        self._delay.put(published)
        return published

    def result(self) -> dict[str, Any]:
        """What the steps came to; means are over those after the first `lag`, where the age is whole."""
        settled = self._metrics[self._cell.lag :]
        age = None
        if ages := self._ages[self._cell.lag :]:
            check_age(self._cell, age := float(np.mean(ages)))
        means = {
            name: float(np.mean([metrics[name] for metrics in settled]))
            for name in MEANS
            if settled and all(name in metrics for metrics in settled)
        }
        return {
            "steps": self.step,
            "age": age,
            "ages": self._ages,
            "rewards": [round(reward, 4) for reward in self._rewards],
            **means,
            **self._source.totals(),
            "learn_s": sum(metrics["seconds"] for metrics in self._metrics),
        }


def mean_age(groups: Sequence[RolloutGroup], learner: PolicyVersion) -> float:
    """Over the trained tokens, by the versions written on them."""
    ages: list[int] = []
    for rollout in (rollout for group in groups for rollout in group.rollouts if rollout.valid):
        branches, steps = rollout.version_branch[rollout.loss_mask], rollout.version_step[rollout.loss_mask]
        ages += [
            policy_age(PolicyVersion(*v), learner, {}) for v in zip(branches.tolist(), steps.tolist(), strict=True)
        ]
    return float(np.mean(ages))


def _first_probe(vocab_size: int, config: Config) -> list[list[int]]:
    """Before anything is sampled: token ids drawn from the seed."""
    shape = (config.weights.num_probe_sequences, 32)
    ids: list[list[int]] = np.random.default_rng(config.run.seed).integers(0, vocab_size, shape).tolist()
    return ids


def _pass_at_1(scores: Sequence[ProblemScore]) -> float:
    return float(np.mean([score.pass_rate for score in scores]))
