"""The learner's loop under the closed loop, and where a number of sampled tokens ends it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config_file import parse
from stream_grpo.errors import ConfigError
from stream_grpo.learner.process import LearnerProcess
from stream_grpo.metrics import MetricsLog, MetricsReader
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber
from tests.learner.test_process import LEDGER, FakeBuffer, FakeEngine, FakeStep, configuration, serving


class Listening(FakeBuffer):
    """A buffer that writes down the target of every lease, and counts 100 sampled tokens a step, 10 of evaluations."""

    def __init__(self, num_trained: int = 0) -> None:
        super().__init__()
        self.targets: list[Any] = []
        self.num_trained = num_trained

    def answer(self, request: Any) -> None:
        kind = request.message.kind
        if kind == "lease":
            self.targets.append(request.message.fields["target_policy_age"])
        if kind not in ("trained", "ledger"):
            super().answer(request)
            return
        self.num_trained += kind == "trained"
        tokens = {"generated": 110 * self.num_trained, "evaluation": 10 * self.num_trained}
        self.heard.append((kind, request.message.fields.get("version")))
        self.server.reply(request, kind, {**LEDGER, "tokens": tokens})


class KeepingEngine(FakeEngine):
    """An engine whose checkpoint holds the state it is given."""

    def save(self, directory: Path, state: Any) -> None:
        super().save(directory, state)
        (directory / "state.json").write_text(json.dumps(state))

    def load(self, directory: Path) -> Any:
        super().load(directory)
        return json.loads((directory / "state.json").read_text())


class StaleStep(FakeStep):
    """Steps of which half of the tokens are effective; notes the scale of the learning rate at each."""

    rate_scale = 1.0

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.scales: list[float] = []

    def run(self, batch: Any, watch: Any) -> dict[str, float]:
        self.scales.append(self.rate_scale)
        return {**super().run(batch, watch), "ess": 0.5, "k3": 0.0}

    def restore(self, state: Any) -> None:
        assert state.keys() <= {"control"}


def steered(config: Any, channel: Any, engine: FakeEngine, step: FakeStep) -> LearnerProcess:
    publisher = Publisher(config.run_dir / "weights", config.weights.keep_versions)
    metrics = MetricsLog(config.run_dir, "learner")
    return LearnerProcess(config, engine, step, channel, publisher, metrics)  # type: ignore[arg-type]


CONTROL = {"enabled": True, "interval": 1, "min_learning_rate_scale": 0.5}


def test_changes_reach_the_buffer_the_publishes_and_the_learning_rate_and_are_told_with_their_reason(
    tmp_path: Path,
) -> None:
    stream = {"max_policy_age": 1, "publish_interval": 2}
    config = configuration(tmp_path, run={"num_steps": 12}, stream=stream, control=CONTROL)
    engine, buffer = KeepingEngine(), Listening()
    step = StaleStep(engine)
    with serving(buffer) as channel:
        steered(config, channel, engine, step).run(threading.Event())
    lines = list(MetricsReader(config.run_dir).new_lines())
    changes = [(line["step"], line["setting"], line["after"]) for line in lines if line["event"] == "control"]
    # Left out after a change: target + interval, 1 + 2 and 1 + 1 and 0 + 1 steps, and one is averaged.
    assert changes == [
        (1, "publish_interval", 1),
        (5, "target_policy_age", 0),
        (8, "learning_rate_scale", 0.7),
        (10, "learning_rate_scale", 0.5),
    ]
    assert next(line for line in lines if line["event"] == "control")["reason"].startswith("effective share of")
    assert buffer.targets == [1] * 5 + [0] * 7
    assert step.scales == [1.0] * 8 + [0.7] * 2 + [0.5] * 2
    # The interval of 2 holds until its publish at step 2, and from then on every step publishes.
    assert Subscriber(config.run_dir / "weights").newest() == PolicyVersion(0, 12)
    steps = [line for line in lines if line["event"] == "step"]
    assert (steps[-1]["target_policy_age"], steps[-1]["learning_rate_scale"]) == (0, 0.5)


def test_a_resumed_learner_goes_on_with_what_it_had_steered_to(tmp_path: Path) -> None:
    stream = {"max_policy_age": 1, "publish_interval": 2}
    config = configuration(tmp_path, run={"num_steps": 9}, stream=stream, control=CONTROL)
    engine = KeepingEngine()
    with serving(Listening()) as channel:
        steered(config, channel, engine, StaleStep(engine)).run(threading.Event())
    longer = configuration(tmp_path, run={"num_steps": 10}, stream=stream, control=CONTROL)
    engine, buffer = KeepingEngine(), Listening()
    step = StaleStep(engine)
    with serving(buffer) as channel:
        steered(longer, channel, engine, step).run(threading.Event())
    # The target and the scale of step 9 are told and taken again with the first message of the new start.
    assert (buffer.targets, step.scales) == ([0], [0.7])


def test_without_the_closed_loop_no_target_is_told(tmp_path: Path) -> None:
    config, engine, buffer = configuration(tmp_path), KeepingEngine(), Listening()
    with serving(buffer) as channel:
        steered(config, channel, engine, StaleStep(engine)).run(threading.Event())
    assert buffer.targets == [None] * 5
    assert not [line for line in MetricsReader(config.run_dir).new_lines() if line["event"] == "control"]


@pytest.mark.parametrize(("budget", "steps"), [(250, 3), (300, 3), (301, 4), (10**6, 5)])
def test_the_step_that_reaches_the_budget_is_the_last(tmp_path: Path, budget: int, steps: int) -> None:
    # 100 tokens a step besides those of evaluations; num_steps is 5.
    config = configuration(tmp_path, run={"max_generated_tokens": budget})
    engine, buffer = KeepingEngine(), Listening()
    with serving(buffer) as channel:
        steered(config, channel, engine, StaleStep(engine)).run(threading.Event())
    assert engine.weight == steps
    assert (tmp_path / "r" / "checkpoints" / f"checkpoint-0.{steps}").exists()


def test_a_resumed_learner_whose_budget_is_spent_makes_no_further_step(tmp_path: Path) -> None:
    config = configuration(tmp_path, run={"max_generated_tokens": 300})
    engine, buffer = KeepingEngine(), Listening(num_trained=3)
    with serving(buffer) as channel:
        steered(config, channel, engine, StaleStep(engine)).run(threading.Event())
    assert engine.weight == 0
    assert "trained" not in [kind for kind, _ in buffer.heard]


def test_the_synchronous_loop_has_nothing_to_steer() -> None:
    tree = {"model": {"path": "m"}, "stream": {"max_policy_age": 0}, "control": {"enabled": True}}
    with pytest.raises(ConfigError, match="synchronous loop has no staleness to steer; use a larger max_policy_age"):
        parse(tree, "test")
