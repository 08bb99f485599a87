"""Held-out scores of weights that lie in files: one engine, which loads one after the other."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from stream_grpo.config import Config
from stream_grpo.parts import RESOURCES

_ENGINE: list[Any] = []
"""What a process of `start` has."""

Counts = dict[str, list[int]]
"""Of each problem, by its id: samples that passed, and samples that passed or failed."""


class Scorer:
    """Asks a process that has the engine; it begins with the first question."""

    def __init__(self, executor: ProcessPoolExecutor, config: Config, num_samples: int) -> None:
        self._executor, self._config, self._num_samples = executor, config, num_samples

    def counts(self, files: Sequence[Path]) -> list[Counts]:
        """Of each file. Raises EvaluationError, WeightsError."""
        return self._executor.submit(counts, self._config, files, self._num_samples).result()

    def answers(self, file: Path) -> list[dict[str, str]]:
        """One sample of each problem: `id`, `domain`, `asked`, `gold`, `said`."""
        return self._executor.submit(answers, self._config, file).result()


@contextmanager
def scorer(config: Config, num_problems: int, num_samples: int) -> Iterator[Scorer]:
    """Of so many held-out problems of the headline's domains, chosen by the seed of the configuration."""
    environment = RESOURCES["evaluation"](config).environment
    with ProcessPoolExecutor(1, get_context("spawn"), start, (environment, config, num_problems)) as executor:
        yield Scorer(executor, config, num_samples)


def pass_at_1(found: Counts) -> float:
    """Mean over the problems of which a sample was scored."""
    rates = [passed / scored for passed, scored in found.values() if scored]
    return sum(rates) / len(rates)


def start(environment: Mapping[str, str], config: Config, num_problems: int) -> None:
    """Make the engine of this process, and choose the problems."""
    os.environ.update(environment)
    from stream_grpo.rewards.composed import ComposedScoring
    from stream_grpo.rundir import read_problems
    from stream_grpo.sampler.engine import InProcessEngine
    from stream_grpo.sampler.prompts import Prompts

    prompts = Prompts(config)
    _, heldout = read_problems(config, prompts, say=lambda text: None)
    domains = set(config.evaluation.domains)
    problems = [problem for problem in heldout.around if not domains or problem.domain in domains]
    chosen = random.Random(config.run.seed).sample(problems, min(num_problems, len(problems)))
    scoring = ComposedScoring(config.rewards, {problem.verifier for problem in chosen})
    scoring.__enter__()
    _ENGINE.append((InProcessEngine(config), prompts, scoring, chosen))


def counts(config: Config, files: Sequence[Path], num_samples: int) -> list[Counts]:
    """In the process of the engine: the same seeds for all files."""
    from stream_grpo.evaluation import EvaluationRun, evaluate
    from stream_grpo.sampler.generation import generate

    engine, prompts, scoring, problems = _ENGINE[0]
    found = []
    for number, file in enumerate(files):
        run = EvaluationRun(
            problems,
            prompts.token_ids,
            prompts.decode,
            scoring,
            num_samples=num_samples,
            seed=config.run.seed,
            max_new_tokens=config.sampler.max_new_tokens,
            version=_load(file, number),
        )
        scores = evaluate(run, lambda requests: generate(engine, requests))
        found.append({score.problem_id: [score.num_passed, score.num_scored] for score in scores})
    return found


def answers(config: Config, file: Path) -> list[dict[str, str]]:
    """In the process of the engine: one sample of every problem, each with a seed of its own."""
    from stream_grpo.sampler.generation import generate
    from stream_grpo.types import GenerationRequest

    engine, prompts, _, problems = _ENGINE[0]
    _load(file, 0)
    requests = [
        GenerationRequest(
            request_id=f"answer/{number}",
            prompt_ids=prompts.token_ids(problem),
            seed=config.run.seed + number,
            max_new_tokens=config.sampler.max_new_tokens,
        )
        for number, problem in enumerate(problems)
    ]
    said = {
        generation.request_id: prompts.decode(generation.token_ids.tolist())
        for generation in generate(engine, requests)
    }
    return [
        {
            "id": problem.problem_id,
            "domain": problem.domain,
            "asked": problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"],
            "gold": problem.answer,
            "said": said[f"answer/{number}"],
        }
        for number, problem in enumerate(problems)
    ]


def _load(file: Path, number: int) -> Any:
    from safetensors.torch import load_file

    from stream_grpo.types import PolicyVersion
    from stream_grpo.weights.subscriber import check_tensors

    engine = _ENGINE[0][0]
    tensors = load_file(file)
    check_tensors(tensors, engine.expected_tensors(), str(file))
    engine.apply_weights(tensors, PolicyVersion(0, number), recompute_kv=False)
    return PolicyVersion(0, number)
