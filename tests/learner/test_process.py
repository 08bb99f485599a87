"""The learner's loop with a fake engine and a fake buffer: the order of what it does, restores, and its deadlines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from curator.wire import Client, RemoteError, Server
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.errors import GrammarError, StallError
from stream_grpo.learner.batching import Scored
from stream_grpo.learner.process import LearnerProcess
from stream_grpo.metrics import MetricsLog, MetricsReader
from stream_grpo.transport.channels import LearnerChannel
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import PolicyVersion, RolloutGroup
from stream_grpo.weights.manifest import TensorSpec
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber
from tests.fakes import make_group

CAUSE = "waits for group g7 of sampler-0"
STALENESS = [[0, 0, 0], [1, 0, 1]]
LEDGER: dict[str, Any] = {"groups": {}, "tokens": {}, "reused": {}, "closes": True}


class FakeEngine:
    """One weight that counts train steps."""

    vocab_size = 100
    attention_cost = None
    adapter = None

    def __init__(self) -> None:
        self.weight = 0.0

    def probe_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(ids) - 1) for ids in sequences]

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[()]:
        return ()

    def weight_specs(self) -> dict[str, TensorSpec]:
        return {"w": TensorSpec((1,), "float32")}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.tensor([self.weight])

    def save(self, directory: Path, state: Any) -> None:
        directory.mkdir(parents=True)
        (directory / "weight.json").write_text(json.dumps(self.weight))

    def load(self, directory: Path) -> Any:
        self.weight = json.loads((directory / "weight.json").read_text())
        return {}

    def export(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "weight.json").write_text(json.dumps(self.weight))


class FakeStep:
    """Moves the one weight of its engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def rewarded(self, groups: Any, **_: Any) -> Any:
        return groups

    def advantages(self, rewards_B: Any, valid_B: Any, group_B: Any, *_: Any) -> Scored:
        return Scored(np.where(valid_B, rewards_B - np.nanmean(rewards_B), 0.0), valid_B)

    def run(self, batch: Any, watch: Any) -> dict[str, float]:
        self._engine.weight += 1
        return {"loss": -1.0}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        assert state == {}


class FakeBuffer:
    """Leases the same two groups for every step, and writes down what it is told."""

    def __init__(self, empty_leases: int = 0) -> None:
        self.server = Server()
        self.heard: list[tuple[str, Any]] = []
        self._empty_leases = empty_leases

    def answer(self, request: Any) -> None:
        kind, fields = request.message.kind, request.message.fields
        self.heard.append((kind, fields.get("version")))
        if kind == "lease" and self._empty_leases > 0:
            self._empty_leases -= 1
            self.server.reply(request, "batch", {"ages": [], "staleness": [], "cause": CAUSE})
        elif kind == "lease":
            groups = [encode_group(make_group(name)) for name in ("g0", "g1")]
            self.server.reply(request, "batch", {"ages": [0, 2], "staleness": STALENESS, "cause": ""}, groups)
        else:
            self.server.reply(request, "counted", LEDGER)


@contextmanager
def serving(buffer: FakeBuffer) -> Iterator[LearnerChannel]:
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            if (request := buffer.server.receive(0.02)) is not None:
                buffer.answer(request)

    thread = threading.Thread(target=loop)
    thread.start()
    client = Client(buffer.server.address, name="learner", peer="buffer")
    try:
        yield LearnerChannel(client)
    finally:
        client.close()
        stop.set()
        thread.join()
        buffer.server.close()


def configuration(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    run = {"root": str(tmp_path), "name": "r", "num_steps": 5, **sections.pop("run", {})}
    stream = {"groups_per_step": 2, "publish_interval": 2, **sections.pop("stream", {})}
    (tmp_path / "r").mkdir(exist_ok=True)
    tree = {"model": {"path": "m"}, "run": run, "stream": stream, "learner": {"checkpoint_interval": 3}, **sections}
    return parse(tree, "test")


def learner(
    config: Config, channel: LearnerChannel, engine: FakeEngine, clock: Any = None, grammar: Any = None
) -> LearnerProcess:
    publisher = Publisher(config.run_dir / "weights", config.weights.keep_versions)
    metrics = MetricsLog(config.run_dir, "learner")
    arguments = {"grammar": grammar} if clock is None else {"grammar": grammar, "clock": clock}
    return LearnerProcess(config, engine, FakeStep(engine), channel, publisher, metrics, **arguments)  # type: ignore[arg-type]


def test_it_announces_publishes_and_then_steps_leases_and_checkpoints_in_order(tmp_path: Path) -> None:
    config, buffer = configuration(tmp_path), FakeBuffer()
    with serving(buffer) as channel:
        learner(config, channel, FakeEngine()).run(threading.Event())
    expected: list[tuple[str, Any]] = [("start", [0, 0])]
    for step in range(5):
        # A step is leased against the version it starts from and reported with the version it makes.
        expected += [("lease", [0, step]), ("trained", [0, step + 1])]
        # checkpoint_interval 3, and one at the end; two are kept, and the oldest of them makes its groups final
        expected += [("checkpointed", [0, 3])] if step + 1 in (3, 5) else []
    assert buffer.heard == expected
    # publish_interval 2: versions 0, 2 and 4; the last step is exported, not published
    assert Subscriber(config.run_dir / "weights").newest() == PolicyVersion(0, 4)
    assert json.loads((config.run_dir / "model" / "weight.json").read_text()) == 5.0
    steps = [line for line in MetricsReader(config.run_dir).new_lines() if line["event"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert (steps[0]["age_max"], steps[0]["age_mean"]) == (2, 1.0)
    # The parts 0 + 0 + 0 and 1 + 0 + 1: means 1/2, 0, 1/2, which add up to the mean age.
    parts = {name: steps[0][f"age_{name}"] for name in ("publish_lag_mean", "in_flight_mean", "in_queue_mean")}
    assert parts == {"publish_lag_mean": 0.5, "in_flight_mean": 0.0, "in_queue_mean": 0.5}
    assert (steps[0]["age_publish_lag_max"], steps[0]["age_in_flight_max"], steps[0]["age_in_queue_max"]) == (1, 0, 1)


def test_a_step_says_what_publishes_and_checkpoints_took_before_it(tmp_path: Path) -> None:
    config, now = configuration(tmp_path), iter(range(10**6))
    with serving(FakeBuffer()) as channel:
        process = learner(config, channel, FakeEngine(), clock=lambda: float(next(now)))
        process.run(threading.Event())
    steps = [line for line in MetricsReader(config.run_dir).new_lines() if line["event"] == "step"]
    # Versions 0, 2 and 4 are published, before steps 1, 3 and 5; the checkpoint of step 3 is made before step 4. The
    # clock goes on by 1 s at every look, and a publish takes two looks after its first.
    assert [line["publish_s"] for line in steps] == [2.0, 0.0, 2.0, 0.0, 2.0]
    assert [line["checkpoint_s"] for line in steps] == [0.0, 0.0, 0.0, 1.0, 0.0]
    status = process.status()
    assert (status["publish_s"], status["checkpoint_s"]) == (6.0, 2.0)  # with the checkpoint at the end
    assert status["waited_s"] == sum(line["waited_s"] for line in steps)


def test_a_restore_opens_a_new_branch_at_the_checkpoint_and_publishes_at_once(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    with serving(FakeBuffer()) as channel:
        learner(config, channel, FakeEngine()).run(threading.Event())
    longer = configuration(tmp_path, run={"num_steps": 7})
    engine, buffer = FakeEngine(), FakeBuffer()
    with serving(buffer) as channel:
        learner(longer, channel, engine).run(threading.Event())
    # The checkpoint of step 5 held weight 5; two more steps make 7 and never a step twice.
    assert engine.weight == 7.0
    assert buffer.heard[:2] == [("start", [1, 5]), ("lease", [1, 5])]
    assert [version for kind, version in buffer.heard if kind == "trained"] == [[1, 6], [1, 7]]
    assert Subscriber(longer.run_dir / "weights").newest() == PolicyVersion(1, 6)


def test_a_batch_that_never_comes_ends_with_its_cause_and_a_checkpoint(tmp_path: Path) -> None:
    config, seconds = configuration(tmp_path), iter(range(0, 10**6, 100))
    with (
        serving(FakeBuffer(empty_leases=1000)) as channel,
        pytest.raises(StallError, match=r"no batch for step 1 .*: waits for group g7 of sampler-0"),
    ):
        learner(config, channel, FakeEngine(), clock=lambda: float(next(seconds))).run(threading.Event())
    assert [path.name for path in (config.run_dir / "checkpoints").glob("check*")] == ["checkpoint-0.0"]


def test_a_stop_ends_the_wait_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    config, stop = configuration(tmp_path), threading.Event()
    buffer = FakeBuffer(empty_leases=10**6)
    with serving(buffer) as channel:
        thread = threading.Thread(target=learner(config, channel, FakeEngine()).run, args=(stop,))
        thread.start()
        while ("lease", [0, 0]) not in buffer.heard:
            pass
        stop.set()
        thread.join(5)
        assert not thread.is_alive()
    assert (config.run_dir / "checkpoints" / "checkpoint-0.0").exists()


def test_a_step_that_the_buffer_never_heard_of_is_in_no_checkpoint(tmp_path: Path) -> None:
    config = configuration(tmp_path)

    class Deaf(FakeBuffer):
        def answer(self, request: Any) -> None:
            if request.message.kind == "trained":
                self.server.refuse(request, "the journal is gone")
            else:
                super().answer(request)

    with serving(Deaf()) as channel, pytest.raises(RemoteError, match="the journal is gone"):
        learner(config, channel, FakeEngine()).run(threading.Event())
    # A restore that contained the step would have its groups trained a second time.
    assert not list((config.run_dir / "checkpoints").glob("check*"))


def test_rollouts_with_a_token_that_is_too_old_are_reported_as_baseline_only(tmp_path: Path) -> None:
    config = configuration(tmp_path, stream={"too_old": "baseline_only", "max_policy_age": 2}, run={"num_steps": 4})
    heard: list[Any] = []

    class Listening(FakeBuffer):
        def answer(self, request: Any) -> None:
            if request.message.kind == "trained":
                heard.append(request.message.fields["tokens"]["g0"])
            super().answer(request)

    with serving(Listening()) as channel:
        learner(config, channel, FakeEngine()).run(threading.Event())
    # Two rollouts of 4 tokens of weights 0: trained by the steps from 0, 1 and 2, too old for the one from 3.
    young, old = {"trained": 8, "baseline_only": 0, "masked": 0}, {"trained": 0, "baseline_only": 8, "masked": 0}
    assert heard == [young, young, young, old]
    steps = [line for line in MetricsReader(config.run_dir).new_lines() if line["event"] == "step"]
    assert [line["num_baseline_only"] for line in steps] == [0, 0, 0, 4]


def test_groups_that_the_grammar_forbids_end_the_run_before_a_step_is_made_of_them(tmp_path: Path) -> None:
    class Strict:
        """As `Grammar`."""

        def check(self, groups: Sequence[RolloutGroup]) -> None:
            raise GrammarError(f"group {groups[0].group_id}")

    engine, buffer = FakeEngine(), FakeBuffer()
    with serving(buffer) as channel, pytest.raises(GrammarError, match="group"):
        learner(configuration(tmp_path), channel, engine, grammar=Strict()).run(threading.Event())
    assert engine.weight == 0.0
    assert [kind for kind, _ in buffer.heard] == ["start", "lease"]
