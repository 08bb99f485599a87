"""A run whose engines are on GPUs. Run by `scripts/test_gpu`, nowhere else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import ROOT, arguments, made

__all__ = ["made"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NUM_STEPS = 8


def summary_of(made: Path, root: Path, **settings: object) -> dict[str, Any]:
    """Of a short run, from its first weights to its account."""
    chosen = {"run.num_steps": NUM_STEPS, "evaluation.num_problems": 0, "evaluation.interval": 0, **settings}
    done = subprocess.run(arguments(made, root, "r", **chosen), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((root / "r" / "summary.json").read_text())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sampler_and_learner_share_a_gpu(made: Path, tmp_path: Path, stage: int, dtype: str) -> None:
    summary = summary_of(
        made,
        tmp_path,
        **{
            "model.dtype": dtype,
            "cluster.colocate": "true",
            "sampler.num_gpus": 0.5,
            "sampler.gpu_memory_utilization": 0.3,
            "learner.num_gpus": 0.5,
            "learner.zero_stage": stage,
        },
    )
    assert summary["steps"] == NUM_STEPS
    assert summary["ledger_closes"]
    assert summary["probe_gap"]["num_tokens"] > 0


def test_a_sampler_on_a_gpu_feeds_a_learner_on_cpu_through_the_official_weight_transfer(
    made: Path, tmp_path: Path
) -> None:
    summary = summary_of(made, tmp_path, **{"sampler.num_gpus": 1, "sampler.engine": "async"})
    assert summary["steps"] == NUM_STEPS
    assert summary["ledger_closes"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU at either end")
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_go_from_gpu_to_gpu_over_nccl(made: Path, tmp_path: Path, stage: int) -> None:
    chosen = {"weights.transfer": "nccl", "sampler.num_gpus": 1, "sampler.engine": "async", "learner.num_gpus": 1}
    summary = summary_of(made, tmp_path, **chosen, **{"learner.zero_stage": stage})
    assert summary["steps"] == NUM_STEPS
    assert summary["ledger_closes"]
    assert summary["probe_gap"]["num_tokens"] > 0
    # No tensor is a file but the hash of all.
    assert sum(path.stat().st_size for path in (tmp_path / "r" / "weights").rglob("*.safetensors")) < 1000


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs a GPU for each rank and one for the sampler")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_have_a_gpu_each(made: Path, tmp_path: Path, stage: int) -> None:
    chosen = {"sampler.num_gpus": 1, "learner.num_ranks": 2, "learner.num_gpus": 1, "learner.zero_stage": stage}
    summary = summary_of(made, tmp_path, **chosen)
    assert summary["steps"] == NUM_STEPS
    assert summary["ledger_closes"]
