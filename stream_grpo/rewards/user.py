"""The user's own reward functions, taken as TRL and verl call them: `python:module.function`.

    TRL     f(completions=[...], prompts=[...], <column>=[...], ...)  -> [score]        (GRPOTrainer, reward_funcs)
    verl    f(data_source=, solution_str=, ground_truth=, extra_info=) -> score or {"score": ...}    (compute_score)

Which of the two it is, the names of its parameters tell. Either may be async. A function in TRL's shape is given one
completion at a time. `None` and NaN are unknown; an exception, a wrong number of scores and anything that is no number
are raised, which makes an error of the environment and never a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stream_grpo.errors import ConfigError
from stream_grpo.rewards.result import MAX_EVIDENCE_CHARACTERS, VerifiableProblem, Verifier
from stream_grpo.types import Decision, RewardResult

PREFIX = "python:"
"""Of the name of a verifier that is the user's own."""

PASS_SCORE = 0.5
"""A score from here on is a pass; a row may say otherwise in its column `pass_score`. The reward is the score."""

GOLD_NAMES = ("answer", "ground_truth", "solution", "gold", "target", "label", "reference")
"""A parameter with one of these names that no column has is given the gold."""

_VERL = frozenset({"solution_str", "ground_truth"})
_TRL = "completions"


def load_user_verifier(name: str) -> Verifier:
    """The verifier `python:module.function`; its version is a hash of the module's source.

    Raises ConfigError where the module or the function is not there, or where it has neither shape.
    """
    function, version = _find(name)
    parameters = inspect.signature(function).parameters
    if _TRL in parameters:
        call = _call_trl
    elif parameters.keys() >= _VERL:
        call = _call_verl
    else:
        raise ConfigError(
            f"{name}({', '.join(parameters)}) has neither shape of a reward function: a parameter 'completions' (TRL), "
            f"or 'solution_str' and 'ground_truth' (verl)"
        )

    def check(response_text: str, problem: VerifiableProblem, is_cut: bool) -> RewardResult:
        score, components, notes = call(function, response_text, problem)
        return _result(name, version, score, components, notes, problem)

    return Verifier(name, version, check)


def source_version(name: str, paths: Sequence[str] = ()) -> str:
    """The version of `python:module.function` without importing the module: a hash of its source.

    `paths`: where it is looked for after everything else. Raises ConfigError where the module is not there.
    """
    module_name, _ = _parts(name)
    where = list(sys.path)
    sys.path.extend(paths)
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        spec = None
    finally:
        sys.path[:] = where
    if spec is None or spec.origin is None:
        raise ConfigError(f"verifier {name!r}: there is no module {module_name!r} on the path or in the working folder")
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]


def _parts(name: str) -> tuple[str, str]:
    module_name, _, attribute = name.removeprefix(PREFIX).rpartition(".")
    if not module_name:
        raise ConfigError(f"verifier {name!r}: a user's verifier is written {PREFIX}module.function")
    return module_name, attribute


def _find(name: str) -> tuple[Callable[..., Any], str]:
    module_name, attribute = _parts(name)
    version = source_version(name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"verifier {name!r}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"verifier {name!r}: module {module_name!r} has no function {attribute!r}")
    return function, version


def _call_trl(
    function: Callable[..., Any], response_text: str, problem: VerifiableProblem
) -> tuple[Any, dict[str, float], str]:
    prompt = getattr(problem, "prompt", None)
    is_chat = not isinstance(prompt, str) and prompt is not None
    completion: Any = [{"role": "assistant", "content": response_text}] if is_chat else response_text
    known = {**problem.extra, "answer": problem.answer, "prompts": prompt, "completions": completion}
    scores = _finished(function(**{key: [value] for key, value in _wanted(function, known, problem.answer).items()}))
    if isinstance(scores, str) or (not isinstance(scores, Sequence) and not hasattr(scores, "tolist")):
        raise TypeError(f"returned {type(scores).__name__} where a list with one score was due")
    if len(scores) != 1:
        raise ValueError(f"returned {len(scores)} scores for 1 completion")
    return scores[0], {}, ""


def _call_verl(
    function: Callable[..., Any], response_text: str, problem: VerifiableProblem
) -> tuple[Any, dict[str, float], str]:
    info = problem.extra.get("extra_info")
    known = {
        "data_source": problem.extra.get("data_source") or getattr(problem, "source", ""),
        "solution_str": response_text,
        "ground_truth": problem.answer,
        "extra_info": dict(info) if isinstance(info, Mapping) else dict(problem.extra),
    }
    value = _finished(function(**_wanted(function, known, problem.answer)))
    if not isinstance(value, Mapping):
        return value, {}, ""
    if "score" not in value:
        raise ValueError(f"returned a dict without 'score': it has {', '.join(map(str, value)) or 'nothing'}")
    rest = {str(key): item for key, item in value.items() if key != "score"}
    components = {key: float(item) for key, item in rest.items() if _is_number(item)}
    return value["score"], components, "".join(f", {key} {rest[key]!r}" for key in rest if key not in components)


def _wanted(function: Callable[..., Any], known: Mapping[str, Any], gold: str) -> dict[str, Any]:
    """What of `known` the function takes: all where it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    golds = {name: gold for name in GOLD_NAMES if name in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {**golds, **known}
    return {name: value for name, value in {**golds, **known}.items() if name in parameters}


def _finished(value: Any) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "__float__")


def _result(
    name: str,
    version: str,
    score: Any,
    components: Mapping[str, float],
    notes: str,
    problem: VerifiableProblem,
) -> RewardResult:
    if score is not None and not _is_number(score):
        raise TypeError(f"the score is {score!r}, which is no number")
    reward = None if score is None else float(score)
    if reward is None or not math.isfinite(reward):
        decision, reward, evidence = Decision.UNKNOWN, None, f"the function returned {score}"
    else:
        pass_score = float(problem.extra.get("pass_score", PASS_SCORE))
        decision = Decision.PASS if reward >= pass_score else Decision.FAIL
        evidence = f"score {reward:g}, pass from {pass_score:g}"
    return RewardResult(
        decision=decision,
        reward=reward,
        verifier=name,
        verifier_version=version,
        components={key: value for key, value in components.items() if math.isfinite(value)},
        evidence=(evidence + notes)[:MAX_EVIDENCE_CHARACTERS],
    )
