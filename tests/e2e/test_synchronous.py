"""At `max_policy_age` 0 a run equals, bit for bit, its classes called in order without transport."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import load, parse, to_toml
from tests.e2e.conftest import ROOT
from tests.e2e.synchronous import ENGINE, RESULT

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NUM_STEPS, GROUPS_PER_STEP = 5, 6


@dataclass(frozen=True)
class Both:
    """The folder of the run with transport, its log, and what the sequential loop came to."""

    run_dir: Path
    log: list[dict[str, Any]]
    sequential: dict[str, Any]
    engine_dir: Path
    """DeepSpeed's checkpoint of the sequential loop."""

    def ids(self, kind: str, reason: str = "") -> list[str]:
        return [row["group_id"] for row in self.log if row["kind"] == kind and row["reason"] == reason]


@pytest.fixture(scope="module")
def both(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Five steps over the sockets, and the same five in one loop, each in a process of its own, side by side."""
    import torch

    root = tmp_path_factory.mktemp("runs")
    started = [start(made, root, way) for way in ("transport", "sequential")]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    run_dir, sequential_dir = root / "transport", root / "sequential"
    log = pa.ipc.open_stream(run_dir / "journal" / "transitions-000001.arrow").read_all().to_pylist()
    return Both(run_dir, log, torch.load(sequential_dir / RESULT, weights_only=False), sequential_dir / ENGINE)


def start(made: Path, root: Path, way: str) -> subprocess.Popen[str]:
    path = root / f"{way}.toml"
    path.write_text(to_toml(configuration(made, root, way)))
    command = [sys.executable, "-m", "tests.e2e.synchronous", way, str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def configuration(made: Path, root: Path, name: str) -> Config:
    """That of the quickstart, smaller and at age 0."""
    tree = load(ROOT / "configs" / "arithmetic-cpu.toml").model_dump(mode="json", exclude_unset=True)
    chosen: dict[str, dict[str, Any]] = {
        "run": {"root": str(root), "name": name, "num_steps": NUM_STEPS},
        "model": {"path": str(made / "model")},
        "pool": {"files": [str(made / "pool.jsonl")]},
        "sampler": {"group_size": 8},
        "stream": {"max_policy_age": 0, "groups_per_step": GROUPS_PER_STEP, "sample_deadline_s": 600.0},
        "weights": {"keep_versions": NUM_STEPS + 1},
        "evaluation": {"files": [], "num_problems": 0, "interval": 0, "domains": []},
    }
    sections: Mapping[str, Any] = {key: {**tree.get(key, {}), **chosen.get(key, {})} for key in {**tree, **chosen}}
    return parse(sections, source="test")


def test_the_same_problems_are_picked_for_the_same_groups(both: Both) -> None:
    picks = {row["group_id"]: row["problem_id"] for row in both.log if row["problem_id"]}
    assert len(picks) >= NUM_STEPS * GROUPS_PER_STEP
    assert picks == both.sequential["picks"]


def test_the_same_tokens_are_sampled_with_the_same_logprobs(both: Both) -> None:
    segments = sorted((both.run_dir / "journal").glob("segment-*.arrow"))
    rows = [row for path in segments for row in pa.ipc.open_stream(path).read_all().to_pylist()]
    sequential = both.sequential["rollouts"]
    index: dict[str, int] = {}
    for row in rows:
        i = index[row["group_id"]] = index.get(row["group_id"], -1) + 1
        token_ids, logprobs, seed = sequential.pop(f"{row['group_id']}/{i}")
        assert row["token_ids"] == token_ids.tolist()
        assert row["behavior_logprobs"] == logprobs.tolist()
        assert row["seed"] == seed
    assert not sequential
    assert len(rows) >= NUM_STEPS * GROUPS_PER_STEP * 8


def test_the_same_groups_are_trained_in_every_step_and_the_same_are_surplus(both: Both) -> None:
    trained = [row for row in both.log if row["kind"] == "trained"]
    batches = [[row["group_id"] for row in trained if row["step"] == step + 1] for step in range(NUM_STEPS)]
    assert batches == both.sequential["batches"]
    # Blocks are of more groups than are missing, as not all have signal: some were left over.
    assert both.ids("stale", "surplus") == both.sequential["surplus"] != []
    assert len(both.ids("stale")) == 0


def test_the_weights_after_every_step_are_the_same(both: Both) -> None:
    import torch
    from safetensors.torch import load_file

    digests = set()
    for step in range(NUM_STEPS + 1):
        path = both.run_dir / "weights" / f"0.{step:08d}" / "model.safetensors"
        run, sequential = load_file(path), both.sequential["weights"][step]
        assert run.keys() == sequential.keys()
        assert all(torch.equal(run[name], sequential[name]) for name in run)
        digests.add(path.read_bytes())
    assert len(digests) == NUM_STEPS + 1  # every step moved them


def test_the_optimizer_ends_in_the_same_state(both: Both) -> None:
    import torch

    folders = [
        both.run_dir / "checkpoints" / f"checkpoint-0.{NUM_STEPS}" / "engine" / "state",
        both.engine_dir / "state",
    ]
    names = [sorted(path.name for path in folder.glob("*.pt")) for folder in folders]
    assert names[0] == names[1] != []
    num_tensors = 0
    for name in names[0]:
        run, sequential = (dict(_tensors(torch.load(folder / name, weights_only=False))) for folder in folders)
        assert run.keys() == sequential.keys()
        assert all(torch.equal(run[key], sequential[key]) for key in run)
        num_tensors += len(run)
    assert num_tensors > 2  # weights, and the two running means of AdamW


def _tensors(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor in a checkpoint file, by where it stands."""
    import torch

    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _tensors(value, f"{path}/{key}")
