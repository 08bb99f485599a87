"""What a run did, by hand, and how far predictions are off."""

import json
from pathlib import Path

import pytest

from stream_grpo.config_file import parse, to_toml
from stream_grpo.errors import ConfigError
from stream_grpo.planner.measured import Compared, compare, measure
from tests.planner.worlds import constant_world


def make_run(path: Path, num_steps: int, *, weights: str = "keep") -> Path:
    """A step every 10 s that trains 40 tokens, as old as it is even or odd: 0 or 1."""
    path.mkdir(parents=True)
    tree = {
        "model": {"path": "m"},
        "sampler": {"group_size": 2, "max_num_seqs": 4, "max_new_tokens": 64},
        "stream": {"groups_per_step": 2, "max_policy_age": 1},
        "weights": {"on_update": weights},
    }
    (path / "config.toml").write_text(to_toml(parse(tree, "test")))
    lines = [
        {
            "event": "step",
            "step": n,
            "branch": 0,
            "time_s": 10.0 * n,
            "tokens": {"trained": 40 * n},
            "age_mean": float(n % 2),
        }
        for n in range(1, num_steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rates_and_ages_are_those_after_the_first_third(tmp_path: Path) -> None:
    found = measure(make_run(tmp_path / "r", 9))
    # From step 3 on: six steps of 40 tokens in 60 s; of steps 4 to 9 three are odd.
    assert (found.throughput, found.age, found.num_steps) == (4.0, 0.5, 9)
    with pytest.raises(ConfigError, match="5 learner steps; to measure a rate, 6 are needed"):
        measure(make_run(tmp_path / "short", 5))


def test_a_restart_and_what_it_makes_again_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", 9)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    again = [json.loads(line) | {"branch": 1} for line in lines[6:]]
    for number, line in enumerate(again):  # an hour later steps 7 to 9 are made again
        line["time_s"] = 3700.0 + 10 * number
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in (*lines, *map(json.dumps, again))))
    # Of 3 to 6 and of 7 to 9: five differences of 40 tokens in 10 s.
    assert measure(run) == measure(make_run(tmp_path / "other", 9))


def test_a_prediction_is_over_the_same_steps_of_the_same_settings(tmp_path: Path) -> None:
    found = compare(constant_world(), make_run(tmp_path / "r", 9), cores=0)
    # Four slots, a token of each a second: 4 tokens a second, as were measured.
    assert found.throughput == 4.0
    assert found.predicted_throughput == pytest.approx(4.0, rel=0.1)
    assert "sampling" in found.bottleneck
    with pytest.raises(ConfigError, match="the model leaves this out"):
        compare(constant_world(), make_run(tmp_path / "other", 9, weights="finish"), cores=0)


def test_errors_are_relative_and_ages_below_a_step_are_held_against_one() -> None:
    found = Compared(throughput=10.0, predicted_throughput=12.0, age=0.5, predicted_age=0.6, bottleneck="")
    assert found.throughput_error == pytest.approx(0.2)
    assert found.age_error == pytest.approx(0.1)
    assert found.as_fields()["age_error"] == found.age_error
