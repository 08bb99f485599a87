"""Held-out scores of weights that lie in files: one engine, which loads one after the other."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stream_grpo.config import Config

_ENGINE: list[Any] = []
"""What a process of `start` has."""


def start(environment: Mapping[str, str], config: Config, num_problems: int) -> None:
    """Make the engine of this process, and choose the problems: of the headline's domains, by the seed of the run."""
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


def pass_at_1(config: Config, files: Sequence[Path], num_samples: int) -> list[float]:
    """Of each file, mean over problems; the same seeds for all of them. Raises EvaluationError, WeightsError."""
    from safetensors.torch import load_file

    from stream_grpo.evaluation import EvaluationRun, evaluate
    from stream_grpo.sampler.generation import generate
    from stream_grpo.types import PolicyVersion
    from stream_grpo.weights.subscriber import check_tensors

    engine, prompts, scoring, problems = _ENGINE[0]
    scores = []
    for number, file in enumerate(files):
        tensors = load_file(file)
        check_tensors(tensors, engine.expected_tensors(), str(file))
        engine.apply_weights(tensors, PolicyVersion(0, number), recompute_kv=False)
        run = EvaluationRun(
            problems,
            prompts.token_ids,
            prompts.decode,
            scoring,
            num_samples=num_samples,
            seed=config.run.seed,
            max_new_tokens=config.sampler.max_new_tokens,
            version=PolicyVersion(0, number),
        )
        found = evaluate(run, lambda requests: generate(engine, requests))
        scores.append(sum(score.num_passed / score.num_scored for score in found) / len(found))
    return scores
