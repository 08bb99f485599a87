"""The generator and the scorer that `curator score` finds in this package."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from curator.errors import CuratorError
from curator.schema import Problem
from curator.scorers import Asked, Sample, SampleRequest
from stream_grpo.config import Config
from stream_grpo.pool_scoring import EngineGenerator, config_of, make_generator, make_scorer
from tests.fakes import FakeEngine

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


class FakePrompts:
    """A token a character."""

    fingerprint = "f0"

    def token_ids(self, problem: Problem) -> tuple[int, ...]:
        return tuple(map(ord, str(problem.prompt)))

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def problem(answer: str = "2", verifier: str = "exact") -> Problem:
    return Problem(problem_id="a", prompt="1+1=", answer=answer, verifier=verifier)


def sample(text: str, *, is_cut: bool = False, failure: str | None = None) -> Sample:
    request = SampleRequest(problem(), 0, seed=1)
    return Sample(request=request, text=text, num_tokens=2, is_cut=is_cut, failure=failure)


def test_the_entry_points_of_the_project_lead_to_functions_that_take_what_was_asked() -> None:
    groups = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    assert {group: list(entries) for group, entries in groups.items()} == {
        "curator.generators": ["stream-grpo"],
        "curator.scorers": ["stream-grpo"],
    }
    for entries in groups.values():
        module, _, name = entries["stream-grpo"].partition(":")
        assert callable(getattr(import_module(module), name))


def test_every_request_has_one_sample_and_its_own_seed(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": tmp_path}, "sampler": {"max_new_tokens": 3}})
    generator = EngineGenerator(config, FakeEngine(num_slots=2), FakePrompts())  # type: ignore[arg-type]
    requests = [SampleRequest(problem(), number, seed=number) for number in range(5)]
    found = list(generator.generate(requests))
    assert sorted(sample.request.number for sample in found) == [0, 1, 2, 3, 4]
    # The engine of the test ends after max_new_tokens tokens with the id 7.
    assert {(sample.text, sample.num_tokens, sample.failure) for sample in found} == {("7 7 7", 3, None)}
    assert generator.identity["max_new_tokens"] == 3


def test_answers_pass_fail_or_are_unscored() -> None:
    scorer = make_scorer(Asked(model="m", verifiers=frozenset({"exact"})))
    for text, options in (("#### 2", {}), ("#### 3", {}), ("", {"failure": "the engine ended it as error"})):
        scorer.submit(sample(text, **options))  # type: ignore[arg-type]
        (score,) = scorer.poll(1.0)
        expected = {"#### 2": (True, 1.0, ""), "#### 3": (False, 0.0, ""), "": (None, None, options.get("failure"))}
        assert (score.passed, score.reward, score.why) == expected[text]
    scorer.close()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(model="m", verifiers=frozenset({"exakt"})), "no verifier is called 'exakt'"),
        (Asked(model="m", overrides=("sampler.max_new_token=3",)), "did you mean sampler.max_new_tokens"),
        (Asked(model="m", settings=Path("nowhere.toml")), "nowhere.toml: cannot be read"),
    ],
)
def test_settings_that_are_wrong_are_an_error_of_the_curator(asked: Asked, message: str) -> None:
    with pytest.raises(CuratorError, match=message):
        make_scorer(asked)


def test_a_folder_without_a_model_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(CuratorError, match=r"no config\.json"):
        make_generator(Asked(model=str(tmp_path)))


def test_the_model_is_a_folder_whatever_its_name() -> None:
    assert config_of(Asked(model="1")).model.path == Path("1")
    assert config_of(Asked(model='a"b\\c')).model.path == Path('a"b\\c')
