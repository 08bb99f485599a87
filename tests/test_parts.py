"""How parts are built from a run's folder."""

import json
from pathlib import Path

from curator.schema import Problem, batch_to_bytes, problems_to_batch
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.metrics import MetricsLog
from stream_grpo.parts_common import INTERVAL_HELDOUT_FILE
from stream_grpo.parts_sampler import expected_verifiers, heldout_evaluation
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.types import PolicyVersion
from tests.fakes import FakeEngine
from tests.sampler.loop import FakePrompts


def configuration(root: Path, num_problems: int, **evaluation: int) -> Config:
    """Of a run with two samplers and its folder, in which problems for evaluations were chosen."""
    sections = {"run": {"root": str(root), "name": "r"}, "sampler": {"num_samplers": 2}, "evaluation": evaluation}
    config = parse({"model": {"path": "m"}, **sections}, source="test")
    problems = [Problem(problem_id=f"p{i}", prompt="6*7=", answer="42", verifier="exact") for i in range(num_problems)]
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / INTERVAL_HELDOUT_FILE).write_bytes(batch_to_bytes(problems_to_batch(problems)))
    return config


def num_requests(config: Config, sampler_id: str, step: int) -> int:
    """Requests of the evaluation that weights of this step begin in this sampler."""
    engine = FakeEngine()
    heldout = heldout_evaluation(config, sampler_id, engine, None, FakePrompts(), Scoring(config.rewards))
    heldout.applied(PolicyVersion(0, step), {})
    return engine.num_unfinished


def test_the_first_sampler_alone_evaluates(tmp_path: Path) -> None:
    config = configuration(tmp_path, 5, interval=10, interval_problems=3, interval_samples=2)
    assert num_requests(config, "sampler-0", 9) == 0
    assert num_requests(config, "sampler-0", 10) == 3 * 2
    assert num_requests(config, "sampler-1", 10) == 0


def test_a_sampler_expects_the_verifiers_of_the_pool_and_the_first_those_of_its_evaluations(tmp_path: Path) -> None:
    config = configuration(tmp_path, 5, interval=10)
    identity = {"identities": [{"identity": {"verifiers": {"math": "1"}}}]}
    (config.run_dir / "manifest.json").write_text(json.dumps(identity))
    assert expected_verifiers(config, "sampler-0") == {"math", "exact"}
    assert expected_verifiers(config, "sampler-1") == {"math"}


def test_nothing_is_evaluated_without_an_interval_or_problems(tmp_path: Path) -> None:
    assert num_requests(configuration(tmp_path, 5, interval=0), "sampler-0", 50) == 0
    assert num_requests(configuration(tmp_path, 0, interval=10), "sampler-0", 50) == 0


def test_a_sampler_that_begins_anew_knows_what_was_evaluated(tmp_path: Path) -> None:
    config = configuration(tmp_path, 1, interval=10, interval_samples=1)
    MetricsLog(config.run_dir, "sampler-0").write("evaluation", {"version": [0, 10]})
    assert num_requests(config, "sampler-0", 19) == 0
    assert num_requests(config, "sampler-0", 20) == 1
