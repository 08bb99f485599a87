"""The sampler's engine and the rewards, as `curator score` finds them: by the entry points of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from curator.errors import CuratorError
from curator.schema import Problem
from curator.scorers import Asked, Sample, SampleRequest, Score
from stream_grpo.config import Config
from stream_grpo.config_file import load, parse, with_overrides
from stream_grpo.errors import ConfigError, StreamGrpoError
from stream_grpo.files import sha256
from stream_grpo.model_folder import unusable
from stream_grpo.rewards.composed import ComposedScoring
from stream_grpo.rewards.scoring import check_scores_alone, check_verifiers, scoring_version
from stream_grpo.sampler.environment import environment
from stream_grpo.sampler.generation import Engine
from stream_grpo.sampler.prompts import PromptRefused, Prompts
from stream_grpo.types import Decision, EndReason, GenerationRequest

SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
"""Settings of the sampler that decide what comes out."""
P = ParamSpec("P")
R = TypeVar("R")


def told(function: Callable[P, R]) -> Callable[P, R]:
    """What this package raises for its callers, as an error of the curator."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except StreamGrpoError as error:
            raise CuratorError(str(error)) from error

    return call


@told
def make_generator(asked: Asked) -> EngineGenerator:
    """vLLM on a model folder. Settings are those of a run, `model` and `sampler`; a file of a run will do.

    Raises CuratorError for settings or a folder that cannot be used.
    """
    config = config_of(asked)
    if complaints := unusable(config):
        raise ConfigError("\n".join(complaints))
    # vLLM and torch read these when they are imported.
    for name, value in environment(config).items():
        os.environ.setdefault(name, value)
    from stream_grpo.sampler.engines import make_engine

    return EngineGenerator(config, make_engine(config), Prompts(config))


@told
def make_scorer(asked: Asked) -> RewardScorer:
    """The rewards of a run. Raises CuratorError for a verifier that cannot run, or that compares answers."""
    config = config_of(asked)
    check_verifiers(asked.verifiers, config.rewards, config.stream.sample_deadline_s)
    check_scores_alone(asked.verifiers, config.rewards)
    return RewardScorer(config, asked.verifiers)


def config_of(asked: Asked) -> Config:
    """The configuration that the settings make, with the model folder. Raises ConfigError."""
    overrides = (*asked.overrides, f"model.path={_toml_text(asked.model)}")
    if asked.settings is not None:
        return load(asked.settings, overrides)
    return parse(with_overrides({}, overrides), source="--set")


class EngineGenerator:
    """A `curator.scorers.Generator` on an engine of the sampler."""

    def __init__(self, config: Config, engine: Engine, prompts: Prompts) -> None:
        """`engine`: used by nobody else."""
        self._config, self._engine, self._prompts = config, engine, prompts
        self._prompt_ids: dict[str, tuple[int, ...]] = {}

    @property
    def identity(self) -> Mapping[str, Any]:
        """Weights, tokenizer, prompt format and sampling settings."""
        model, sampler = self._config.model, self._config.sampler
        return {
            "weights": {path.name: sha256(path) for path in sorted(Path(model.path).glob("*.safetensors"))},
            "tokenizer": self._prompts.fingerprint,
            "dtype": model.dtype,
            "prompt_format": model.prompt_format,
            "max_length_tokens": model.max_length_tokens,
            **{name: getattr(sampler, name) for name in SAMPLING},
        }

    def refusal(self, problem: Problem) -> str | None:
        """Why a prompt cannot be sampled."""
        try:
            self._prompts.token_ids(problem)
        except PromptRefused as refusal:
            return str(refusal)
        return None

    def generate(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """As many at once as the engine runs."""
        waiting, running = iter(requests), dict[str, SampleRequest]()
        try:
            while True:
                for request in islice(waiting, max(0, self._engine.num_slots - len(running))):
                    name = f"score/{request.number}/{request.problem.problem_id}"
                    self._engine.add(self._asked_of_engine(name, request))
                    running[name] = request
                if not running:
                    return
                for generation in self._engine.step():
                    request = running.pop(generation.request_id)
                    ids = generation.token_ids.tolist()
                    is_whole = generation.end_reason not in (EndReason.ABORT, EndReason.ERROR)
                    yield Sample(
                        request=request,
                        text=self._prompts.decode(ids),
                        num_tokens=len(ids),
                        is_cut=generation.end_reason is EndReason.LENGTH,
                        failure=None if is_whole else f"the engine ended it as {generation.end_reason}",
                    )
        finally:
            self._engine.abort(running)

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.close()

    def _asked_of_engine(self, name: str, request: SampleRequest) -> GenerationRequest:
        problem = request.problem
        if problem.problem_id not in self._prompt_ids:
            # Samples of a problem come one after the other: one prompt is remembered, not a pool of them.
            self._prompt_ids = {problem.problem_id: self._prompts.token_ids(problem)}
        return GenerationRequest(
            request_id=name,
            prompt_ids=self._prompt_ids[problem.problem_id],
            seed=request.seed,
            max_new_tokens=self._config.sampler.max_new_tokens,
        )


class RewardScorer:
    """A `curator.scorers.Scorer` on the rewards of a run."""

    def __init__(self, config: Config, verifiers: Iterable[str]) -> None:
        """Workers start at once where a verifier needs them."""
        self._rewards = config.rewards
        self._scoring = ComposedScoring(config.rewards, set(verifiers))
        self._out: dict[str, Sample] = {}

    @property
    def identity(self) -> Mapping[str, Any]:
        """Verifiers with their versions and limits."""
        return {"rewards": scoring_version(self._rewards)}

    def submit(self, sample: Sample) -> None:
        """Give one to its problem's verifier."""
        task_id = f"{sample.request.number}/{sample.request.problem.problem_id}"
        self._out[task_id] = sample
        reason = EndReason.ERROR if sample.failure else EndReason.LENGTH if sample.is_cut else EndReason.EOS
        self._submit(task_id, sample, reason)

    @told
    def _submit(self, task_id: str, sample: Sample, reason: EndReason) -> None:
        self._scoring.submit(task_id, sample.request.problem, sample.text, reason, num_tokens=sample.num_tokens)

    def poll(self, timeout_s: float) -> Sequence[Score]:
        """Raises CuratorError where too many in a row cannot be scored."""
        return self._poll(timeout_s)

    @told
    def _poll(self, timeout_s: float) -> list[Score]:
        return [
            Score(
                sample=(sample := self._out.pop(task_id)),
                passed=None if result.reward is None else result.decision is Decision.PASS,
                reward=result.reward,
                why=sample.failure or (result.evidence if result.reward is None else ""),
            )
            for task_id, result in self._scoring.poll(timeout_s)
        ]

    def close(self) -> None:
        """End the workers."""
        self._scoring.close()


def _toml_text(text: str) -> str:
    """A text as TOML writes it, so that a folder called `1` is no number."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
