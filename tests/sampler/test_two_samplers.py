"""Two samplers on one buffer: one whose weights cannot be proved goes, the other works on, and no group is lost."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stream_grpo.errors import ProbeError
from stream_grpo.types import Generation, PolicyVersion
from tests.sampler.loop import Outside, Running
from tests.sampler.test_heldout import Differing, Learning


class Stale(Differing):
    """Keeps its first weights whatever it is given, and never ends a sequence."""

    def apply_weights(self, named_tensors: Mapping[str, Any], version: PolicyVersion, *, recompute_kv: bool) -> float:
        self.probe_error = 0.5 if version.step > 0 else 0.0
        return super().apply_weights(named_tensors, version, recompute_kv=recompute_kv)

    def step(self) -> list[Generation]:
        return []


def test_c23_one_that_fails_its_proof_is_named_and_leaves_the_other_working(tmp_path: Path) -> None:
    outside = Outside(plays_buffer=False)
    learning = Learning(outside, tmp_path)
    training = threading.Thread(target=learning.train, args=(PolicyVersion(0, 0), {}, 6))
    training.start()
    settings = {"stream": Learning.STREAM}
    try:
        broken = Stale(num_slots=4)
        failing = Running(outside, tmp_path, broken, sampler_id="s1", **settings)
        # It holds 4 of the 6 tickets that age 2 allows at 2 groups a step.
        failing.wait(lambda: broken.num_unfinished == 8)
        working = Running(outside, tmp_path, Differing(num_slots=4), sampler_id="s0", **settings)
        # The first step publishes weights that the broken one refuses, twice.
        with pytest.raises(ProbeError, match=r"weights 0\.1: probe logprobs differ"):
            failing.until(lambda: False)
        assert broken.num_unfinished == 0
        # What is left for the other goes on; then the learner waits for the groups of the broken one.
        working.wait(lambda: working.process is not None and working.process.status()["num_groups_done"] == 4)
        assert working.error is None
        # The launcher starts it again under its name: its tickets are issued anew, to whoever asks.
        again = Running(outside, tmp_path, Differing(num_slots=4), sampler_id="s1", **settings)
        training.join(timeout=20)
        assert not training.is_alive()
        again.until(lambda: True)
        working.until(lambda: True)
    finally:
        account = learning.close()
        outside.close()
    assert account["closes"]
    assert account["groups"]["trained"] == 6 * 2
    log = pa.ipc.open_stream(tmp_path / "journal" / "transitions-000001.arrow").read_all().to_pylist()
    issued = [(row["group_id"], row["owner_epoch"]) for row in log if row["kind"] == "ticketed"]
    held = [row["group_id"] for row in log if row["kind"] == "ticketed" and row["sampler_id"] == "s1"][:4]
    assert {(group_id, 1) for group_id in held} <= set(issued)
    trained = {row["group_id"] for row in log if row["kind"] == "trained"}
    assert trained >= set(held)
