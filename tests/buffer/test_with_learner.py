"""Learner and buffer as they are, over a real wire, under each setting of staleness; engine and sampler are fakes."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.metrics import MetricsReader
from stream_grpo.transport.channels import SamplerChannel, read_ledger
from stream_grpo.types import PolicyVersion, Ticket
from stream_grpo.weights.subscriber import Subscriber
from tests.buffer.fakes import group_by_rollout
from tests.buffer.test_process import Running
from tests.learner.test_process import FakeEngine, configuration, learner


class Sampler:
    """Every third of its groups is late: it comes 3 steps after its ticket, or after `late_s` if these are not made."""

    def __init__(self, channel: SamplerChannel, weights: Subscriber, late_s: float) -> None:
        self._channel, self._weights, self._late_s = channel, weights, late_s
        self._rng = random.Random(0)
        self._running: list[tuple[Ticket, PolicyVersion, int, float]] = []

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            version = self._weights.newest()
            if version is None:
                continue
            if not self._channel.waits_for_tickets:
                self._channel.ask_tickets(version, 4, {})
            tickets, _ = self._channel.poll(0.005)
            late = [3 * (self._rng.random() < 1 / 3) for _ in tickets]
            until_s = time.monotonic() + self._late_s
            self._running += [(ticket, version, steps, until_s) for ticket, steps in zip(tickets, late, strict=True)]
            for entry in [entry for entry in self._running if self._is_due(entry, version)]:
                self._running.remove(entry)
                ticket, begun, *_ = entry
                # One rollout ended at once, one went on over the publishes, one began late.
                versions = [[begun] * 4, [begun, begun, version, version], [version] * 4]
                self._channel.insert(group_by_rollout(ticket, versions, [1.0, 0.0, 0.0]))

    def _is_due(self, entry: tuple[Ticket, PolicyVersion, int, float], version: PolicyVersion) -> bool:
        _, begun, num_late, until_s = entry
        return version.step >= begun.step + num_late or time.monotonic() > until_s


@pytest.mark.parametrize(
    "stream",
    [
        {},
        {"max_uses": 2},
        {"too_old": "drop"},
        {"too_old": "requeue", "selector": "freshest_first", "max_uses": 2},
        {"too_old": "baseline_only", "selector": "expected_signal", "max_uses": 3},
    ],
    ids=lambda stream: "-".join(map(str, stream.values())) or "default",
)
def test_learner_and_buffer_agree_on_every_token(tmp_path: Path, stream: dict[str, Any]) -> None:
    stream = {"groups_per_step": 4, "max_policy_age": 2, "publish_interval": 1, **stream}
    config = configuration(tmp_path, run={"num_steps": 12}, stream=stream)
    running = Running(tmp_path / "journal", **stream)
    stop = threading.Event()
    # With `wait` the steps do not go on without it.
    late_s = 2.0 if "too_old" in stream else 0.05
    sampler = Sampler(running.sampler(), Subscriber(config.run_dir / "weights"), late_s)
    thread = threading.Thread(target=sampler.run, args=(stop,))
    try:
        thread.start()
        learner(config, running.learner_channel(), FakeEngine()).run(threading.Event())
        ledger = read_ledger(running.client())
    finally:
        stop.set()
        thread.join(5)
        for client in running.clients:
            client.close()
        running.stop()
    assert ledger["closes"]
    steps = [line for line in MetricsReader(config.run_dir).new_lines() if line["event"] == "step"]
    assert len(steps) == 12
    # Every use of a group is in the account, as its first or as a further one.
    assert sum(line["num_groups"] for line in steps) == ledger["groups"]["trained"] + ledger["reused"]["uses"]
    assert (ledger["reused"]["uses"] > 0) == ("max_uses" in stream)
    assert max(line["age_max"] for line in steps) <= 2
    # The first step of a start has nothing to compare with; whatever came in later had signal.
    assert steps[0]["came_in"] == {}
    assert all(line["came_in"]["mixed"] == 1.0 for line in steps[1:] if line["came_in"]["num_groups"])
    for line in steps:
        parts = sum(line[f"age_{part}_mean"] for part in ("publish_lag", "in_flight", "in_queue"))
        assert parts == pytest.approx(line["age_mean"])
    # Late groups are waited for, lost, or trained on in part: one rollout of three is of the newest weights.
    is_lossy = stream.get("too_old") in ("drop", "requeue")
    assert (ledger["tokens"]["stale"] > 0) == is_lossy
    assert (ledger["losses"]["requeued"] > 0) == (stream.get("too_old") == "requeue")
    assert (ledger["tokens"]["baseline_only"] > 0) == (stream.get("too_old") == "baseline_only")
