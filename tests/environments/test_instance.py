"""Calls of environments without processes: begun, played again, cut, refused."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stream_grpo.environments.instance import Call, Instances, Reply
from stream_grpo.environments.loading import load, version_of
from stream_grpo.environments.protocol import End, Step, cut, digest, sound_step
from stream_grpo.environments.verifiers_adapter import VerifiersEnvironment
from stream_grpo.environments.worker import answer_line
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.messages import ProblemRow, encode

WORLDS = "python:tests.environments.worlds"
PROBLEM = ProblemRow(problem_id="p", answer="2", verifier="environment", prompt="count")


def instances(name: str = "Counter") -> Instances:
    return Instances(load(f"{WORLDS}.{name}", {}))


def call(*actions: str, seen: tuple[str, ...] = (), snapshot: bytes | None = None, limit: int = 1000) -> Call:
    return Call(
        trajectory="t",
        problem=PROBLEM,
        seed=3,
        actions=actions,
        seen=seen,
        snapshot=snapshot,
        max_observation_bytes=limit,
    )


def over_the_wire(found: Instances, asked: Call) -> Reply:
    plain = json.loads(json.dumps(asked.as_plain()))
    assert Call.from_plain(plain) == asked
    reply = found.answer(asked)
    assert Reply.from_plain(json.loads(json.dumps(reply.as_plain()))) == reply
    return reply


@pytest.mark.parametrize("name", ["Counter", "Asynchronous"])
def test_an_environment_begins_steps_and_ends(name: str) -> None:
    found = instances(name)
    start = over_the_wire(found, call()).start
    assert start is not None
    assert (start.snapshot, start.observation) == (b"p/3", "begin")
    first = over_the_wire(found, call("go")).step
    assert first == Step(observation="1 of seed 3", tool="go")
    last = over_the_wire(found, call("go", "end", seen=(digest(first),))).step
    assert last is not None
    assert (last.end, last.milestones) == (End.SUCCESS, {"counted": 2.0})


def test_numbers_of_any_kind_cross_the_wire() -> None:
    found = instances("Unplain")
    over_the_wire(found, call())
    step = over_the_wire(found, call("end")).step
    assert step == Step(end=End.SUCCESS, score=1.0, step_score=1.0, milestones={"all": 1.0}, failed=True)


def test_an_answer_that_json_cannot_hold_is_an_error_of_the_environment() -> None:
    answer = json.loads(answer_line(replace(call("go"), open_loop=True).as_plain(), instances("Unplain")))
    assert answer["trajectory"] == "t"
    assert answer["error"] == "TypeError: the tool is Unplain, not a text"


@pytest.mark.parametrize("wrong", [{"end": "won"}, {"tool": ["search"]}, {"evidence": 3}])
def test_a_step_whose_words_are_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"won|tool|evidence"):
        sound_step(Step(**{"observation": "x"} | wrong))


def test_a_column_of_arrays_is_handed_to_a_worker() -> None:
    asked = replace(call(), problem=replace(PROBLEM, extra={"grid": np.array([[1, 2]])}))
    assert json.loads(encode(asked.as_plain()))["problem"]["extra"] == {"grid": [[1, 2]]}


def test_another_worker_plays_the_actions_again() -> None:
    first = instances()
    first.answer(call())
    one = first.answer(call("go")).step
    assert one is not None
    seen = (digest(one),)
    reply = instances().answer(call("go", "go", seen=seen, snapshot=b"p/3"))
    assert reply.step == first.answer(call("go", "go", seen=seen)).step
    assert reply.num_replayed == 1


def test_a_worker_that_holds_the_environment_needs_the_newest_action_alone() -> None:
    found = instances()
    found.answer(call())
    one = found.answer(call("go")).step
    assert one is not None
    asked = call("go", "go", seen=(digest(one),)).newest_alone()
    assert (asked.actions, asked.seen) == (("go",), ())
    assert over_the_wire(found, asked).step == Step(observation="2 of seed 3", tool="go")
    with pytest.raises(ValueError, match="does not hold what 1 actions"):
        instances().answer(asked)


def test_an_environment_that_answers_otherwise_when_played_again_is_an_error() -> None:
    first = instances()
    first.answer(call())
    odd = first.answer(call("odd")).step
    assert odd is not None
    with pytest.raises(ValueError, match="not repeatable: action 1"):
        instances().answer(call("odd", "go", seen=(digest(odd),)))
    with pytest.raises(ValueError, match="not repeatable: reset"):
        Instances(load("records", {})).answer(
            Call(
                trajectory="t",
                problem=ProblemRow(problem_id="p", answer="", verifier="environment", extra={"setup": "", "goal": []}),
                seed=0,
                snapshot=b"create table t (a); drop table t; create table u (b)",
            )
        )


def test_a_long_observation_is_cut_in_its_middle() -> None:
    found = instances()
    found.answer(call(limit=100))
    step = found.answer(call("big", limit=100)).step
    assert step is not None
    assert step.observation == "x" * 50 + f"[{(1 << 20) - 100} bytes left out]" + "x" * 50
    assert cut("aé", 2) == "a[1 bytes left out]"  # half an é is none
    assert cut("short", 5) == "short"


def test_a_name_that_stands_for_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: calculator, records"):
        version_of("calculators")
    with pytest.raises(ConfigError, match="no module"):
        version_of("python:no_such_module.Thing")
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        load(f"{WORLDS}.nothing", {})
    with pytest.raises(ConfigError, match="'verifiers' is not installed"):
        version_of("verifiers:wordle")
    assert version_of("calculator") == "1"


class _Rubric:
    """Both forms of the package: named arguments, or one state that is written to."""

    async def score_rollout(self, completion: list[dict[str, str]], answer: str, **_: object) -> dict[str, object]:
        num_said = sum(message["role"] == "assistant" for message in completion)
        return {"reward": float(num_said == int(answer)), "metrics": {"said": float(num_said)}}


class _RubricOfState:
    async def score_rollout(self, state: dict[str, object]) -> None:
        state["reward"], state["metrics"] = 0.25, {"length": 3.0}


class _Package:
    """What `load_environment` of the package gives, as far as it is asked."""

    def __init__(self, rubric: object) -> None:
        self.rubric = rubric

    async def setup_state(self, state: dict[str, object]) -> dict[str, object]:
        return {**state, "hint": "again"}

    async def is_completed(self, messages: object, state: dict[str, int]) -> bool:
        return state["turn"] >= 2

    async def env_response(self, messages: list[object], state: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{state['hint']} after {len(messages)}"}]


@pytest.mark.parametrize(
    ("rubric", "end", "score", "metrics"),
    [
        (_Rubric(), End.SUCCESS, 1.0, {"said": 2.0}),
        (_RubricOfState(), End.POLICY_FAILURE, 0.25, {"length": 3.0}),
    ],
)
def test_an_environment_of_the_verifiers_package_is_taken_as_it_is(
    rubric: object, end: End, score: float, metrics: dict[str, float]
) -> None:
    found = Instances(lambda problem: VerifiersEnvironment(_Package(rubric), problem))
    found.answer(call())
    first = found.answer(call("one")).step
    assert first is not None
    assert first.observation == "again after 2"  # prompt and action
    last = found.answer(call("one", "two", seen=(digest(first),))).step
    assert last is not None
    assert (last.end, last.score, last.milestones) == (end, score, metrics)
