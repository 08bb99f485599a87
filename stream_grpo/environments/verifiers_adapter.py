"""Environments of the `verifiers` package as they are, by the methods that they have; the package is never imported.

    setup_state(state) -> state          once, before the first action
    env_response(messages, state)        messages, or messages and state
    is_completed(messages, state)        asked after every action
    rubric.score_rollout(...)            a reward with metrics, returned or written into the state

Each is called with those of its parameters that are known here, by their names, and may be async: what its signature
is in one version of the package or another makes no difference. An environment needs `env_response` and
`is_completed`; one without, which is a single turn, ends with the first action.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stream_grpo.environments.protocol import End, Factory, Start, Step
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.messages import ProblemRow

PASS_SCORE = 0.5
"""A reward from here on is a success; a row may say otherwise in its column `pass_score`."""


def load_adapter(environment_id: str, options: Mapping[str, Any]) -> Factory:
    """What makes the environment of a problem out of `load_environment(environment_id, **options)`, called once.

    Raises ConfigError where package or environment are not there.
    """
    try:
        package = importlib.import_module("verifiers")
        environment = package.load_environment(environment_id, **options)
    except ImportError as error:
        raise ConfigError(f"environment 'verifiers:{environment_id}': {error}") from error
    return lambda problem: VerifiersEnvironment(environment, problem)


class VerifiersEnvironment:
    """One rollout of such an environment; the environment itself serves many."""

    def __init__(self, environment: Any, problem: ProblemRow) -> None:
        """`problem`: its prompt, its answer, and of its columns `info` and `task`."""
        self._environment, self._problem = environment, problem
        self._state: dict[str, Any] = {}

    async def reset(self, seed: int, snapshot: bytes | None) -> Start:
        """The state as the package begins it; its start is that of the row, which is the snapshot."""
        row, prompt = self._problem, self._problem.prompt
        chat = (
            [dict(message) for message in prompt]
            if isinstance(prompt, Sequence) and not isinstance(prompt, str)
            else []
        )
        self._state = {
            "prompt": chat or [{"role": "user", "content": str(prompt or "")}],
            "completion": [],
            "answer": row.answer,
            "task": row.extra.get("task", "default"),
            "info": dict(row.extra.get("info") or {}),
            "example_id": row.extra.get("example_id", 0),
            "responses": [],
            "trajectory": [],
            "turn": 0,
            "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
            "seed": seed,
        }
        start = {name: self._state[name] for name in ("prompt", "answer", "task", "info")}
        if (setup := getattr(self._environment, "setup_state", None)) is not None:
            self._state = await _called(setup, state=self._state) or self._state
        return Start(snapshot=json.dumps(start, sort_keys=True, default=repr).encode())

    async def step(self, action: str) -> Step:
        """The messages with which the environment answers, or the end with the reward of its rubric."""
        state = self._state
        message = {"role": "assistant", "content": action}
        state["completion"].append(message)
        state["responses"].append(message)
        state["trajectory"].append({"prompt": self._messages()[:-1], "completion": [message]})
        state["turn"] += 1
        if await self._is_completed():
            return await self._judged()
        found = await _called(self._environment.env_response, messages=self._messages(), state=state)
        if isinstance(found, tuple):
            found, self._state = found
        messages = [found] if isinstance(found, Mapping) else found
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
        self._state["completion"] += said
        if await self._is_completed():
            return await self._judged()
        return Step(observation="\n".join(_text(m) for m in said), tool="env_response")

    def _messages(self) -> list[dict[str, Any]]:
        return [*self._state["prompt"], *self._state["completion"]]

    async def _is_completed(self) -> bool:
        ask = getattr(self._environment, "is_completed", None)
        if ask is None or not hasattr(self._environment, "env_response"):
            return True
        return bool(await _called(ask, messages=self._messages(), state=self._state))

    async def _judged(self) -> Step:
        state = self._state
        found = await _called(
            self._environment.rubric.score_rollout,
            **{name: state[name] for name in ("prompt", "completion", "answer", "task", "info")},
            state=state,
        )
        reward, metrics = (_get(source, "reward") for source in (found, state)), _get(found, "metrics")
        score = next((value for value in reward if value is not None), None)
        if score is None:
            raise TypeError(f"the rubric gave no reward: {found!r}")
        pass_score = float(self._problem.extra.get("pass_score", PASS_SCORE))
        return Step(
            end=End.SUCCESS if score >= pass_score else End.POLICY_FAILURE,
            score=float(score),
            milestones={str(k): float(v) for k, v in dict(metrics or _get(state, "metrics") or {}).items()},
            evidence=f"rubric {float(score):g}, success from {pass_score:g}",
        )


async def _called(function: Any, **known: Any) -> Any:
    """What the function gives for those of the known arguments that it takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    value = function(**{name: value for name, value in known.items() if takes_all or name in parameters})
    return await value if inspect.isawaitable(value) else value


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, default=repr)
