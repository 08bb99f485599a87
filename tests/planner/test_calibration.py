"""What is read of a run: hand-made lines with known seconds, and a journal as the buffer writes it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.errors import ConfigError
from stream_grpo.planner.calibration import BASE_SHARE, fit_line, learner_times, measured_rollouts, sampler_times
from stream_grpo.types import PolicyVersion
from tests.rollouts.test_rollouts import LATER, Run


def config(**sections: Any) -> Config:
    return parse({"model": {"path": "m"}, "sampler": {"max_num_seqs": 100, "group_size": 4}, **sections}, "test")


def status(second: int, *, part: str = "sampler-0", running: int = 100, **counts: float) -> dict[str, Any]:
    return {"event": "status", "part": part, "time_s": float(second), "num_running": running, **counts}


def steady(num_lines: int = 20, running: int = 100) -> list[dict[str, Any]]:
    """Every 10 s: 8 engine steps of 1 s with 100 running, 800 tokens. One of them proves weights, 0.5 s longer.

    Loading takes 0.25 s; 10 - 8.5 - 0.25 = 1.25 s are between engine steps.
    """
    each = {"busy_s": 8.5, "num_tokens": 800, "apply_s": 0.25, "prove_s": 1.5, "num_updates": 1}
    return [
        status(10 * i, running=running, **{name: i * value for name, value in each.items()}) for i in range(num_lines)
    ]


def test_seconds_of_an_engine_step_are_those_that_the_lines_were_made_of() -> None:
    defaults: list[str] = []
    times = sampler_times(steady(), config(), defaults)
    assert times.step_s(100) == pytest.approx(1.0)
    assert times.base_s == pytest.approx(BASE_SHARE)
    assert times.update_s == pytest.approx(0.25 + 0.5)
    # Of 800 tokens in 10 s.
    assert times.between_per_sequence_s == pytest.approx(1.25 / 800)
    assert "hardly vary" in defaults[0]


def test_engine_steps_are_taken_as_counted_where_they_are() -> None:
    # As above, but with sequences that wait inside the engine for their scores: half of the tokens come in.
    counted = [line | {"num_tokens": i * 400, "num_engine_steps": i * 7} for i, line in enumerate(steady())]
    times = sampler_times(counted, config(), [])
    assert times.step_s(100) == pytest.approx(1.0)
    assert times.between_per_sequence_s == pytest.approx(1.25 / 400)
    # The async engine's loop counts its looks.
    looks = [line | {"num_engine_steps": i * 500} for i, line in enumerate(steady())]
    assert sampler_times(looks, config(sampler={"engine": "async"}), []).step_s(100) == pytest.approx(1.0)


def test_what_a_group_waits_for_its_scores_is_measured_or_named() -> None:
    pool = {"rewards": {"pool": {"num_open": 1}}}
    scored = [line | pool | {"score_wait_s": i * 6.0, "num_groups_scored": i * 4} for i, line in enumerate(steady())]
    defaults: list[str] = []
    assert sampler_times(scored, config(), defaults).score_s == pytest.approx(1.5)
    assert [name for name in defaults if "last reward" in name] == []
    assert sampler_times([line | pool for line in steady()], config(), defaults).score_s == 0.0
    assert [name for name in defaults if "last reward" in name] != []


def test_a_sampler_that_was_started_again_counts_from_0_and_spoils_nothing() -> None:
    again = [{**line, "time_s": line["time_s"] + 500} for line in steady()]
    times = sampler_times([*steady(), *again], config(), [])
    assert times.step_s(100) == pytest.approx(1.0)


def test_how_an_engine_step_depends_on_what_runs_is_fitted_where_that_varies() -> None:
    # 10 s each, of engine steps of 0.1 + 0.01 k seconds with k running: 10 / (0.1 + 0.01 k) steps, k tokens each.
    lines, tokens = [status(0, running=20, busy_s=0, num_tokens=0, apply_s=0, prove_s=0, num_updates=0)], 0.0
    for i, running in enumerate([20, 40, 60, 80, 100] * 4, 1):
        tokens += 10 / (0.1 + 0.01 * running) * running
        lines.append(
            status(10 * i, running=running, busy_s=10 * i, num_tokens=tokens, apply_s=0, prove_s=0, num_updates=0)
        )
    defaults: list[str] = []
    times = sampler_times(lines, config(), defaults)
    assert times.base_s == pytest.approx(0.1, rel=1e-6)
    assert times.per_sequence_s == pytest.approx(0.01, rel=1e-6)
    assert [name for name in defaults if "hardly vary" in name] == []


def test_seconds_of_the_learner_are_those_that_the_lines_were_made_of() -> None:
    # Steps of 1 s + 0.001 s a token; 0.5 s between two where weights are published, 0.2 s else, 3 s more at 10 and 20.
    lines, now = [], 0.0
    for step in range(1, 31):
        tokens = 1000 + 100 * (step % 7)
        lines.append(
            {"event": "step", "step": step, "response_tokens_mean": tokens / 8, "num_groups": 2, "waited_s": 0.3}
            | {"step_s": 1 + 0.001 * tokens, "time_s": now + 0.3 + 1 + 0.001 * tokens}
        )
        now = lines[-1]["time_s"] + (0.5 if step % 2 == 0 else 0.2) + (3.0 if step % 10 == 0 else 0.0)
    times = learner_times(lines, config(stream={"publish_interval": 2}, learner={"checkpoint_interval": 10}), [])
    assert times.base_s == pytest.approx(1.0 + 0.2)
    assert times.per_token_s == pytest.approx(0.001)
    assert times.publish_s == pytest.approx(0.3)
    assert times.checkpoint_s == pytest.approx(3.0)
    assert times.spread == pytest.approx(np.ones(30))
    # The same with what the learner measured itself: a line has what came before its step.
    measured = [
        line | {"publish_s": 0.3 * (line["step"] % 2), "checkpoint_s": 3.0 * (line["step"] % 10 == 1)} for line in lines
    ]
    again = learner_times(measured, config(stream={"publish_interval": 2}, learner={"checkpoint_interval": 10}), [])
    assert (again.base_s, again.publish_s, again.checkpoint_s) == tuple(map(pytest.approx, (1.2, 0.3, 3.0)))


def test_too_little_of_a_run_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 learner steps; to calibrate, 8 are needed"):
        learner_times([], config(), [])
    with pytest.raises(ConfigError, match="no status lines"):
        sampler_times([], config(), [])
    run = Run(tmp_path / "run")
    run.leases.start(PolicyVersion(0, 0), {}, LATER)
    with pytest.raises(ConfigError, match="0 groups with a reward for every rollout are on disk; to calibrate, 32"):
        measured_rollouts(run.path)


def test_lengths_and_rewards_of_a_group_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_grpo.planner.calibration.MIN_GROUPS", 3)
    run = Run(tmp_path / "run")
    run.leases.start(PolicyVersion(0, 0), {}, LATER)
    for rewards in ((1.0, 0.0), (1.0, 1.0), (1.0, None), (0.0, 1.0)):
        run.insert(PolicyVersion(0, 0), rewards=rewards)
    found = measured_rollouts(run.path)
    # The newest first; the group with a rollout without reward is left out.
    assert found.reward_RG is not None
    assert found.reward_RG.tolist() == [[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    assert found.length_RG.shape == (3, 2)


def test_a_slope_that_is_not_known_well_gives_a_line_through_0() -> None:
    x = np.array([9.0, 10.0, 11.0] * 4)
    noise = np.array([3.0, -3.0, 3.0, -3.0] * 3)
    assert fit_line(x, 10 + noise).is_proportional
    line = fit_line(x, 2 + 3 * x)
    assert (line.base, line.slope, line.is_proportional) == (pytest.approx(2.0), pytest.approx(3.0), False)
