"""A run that trains and publishes an adapter alone, with real vLLM and DeepSpeed, and goes on from its checkpoint."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stream_grpo.config_file import load
from stream_grpo.weights.adapter import Base
from tests.e2e.conftest import COMMAND, ROOT, Live, Run, arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def adapted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five steps of a rank 8 on all linear layers, held to the base, evaluated with vLLM before and after."""
    root = tmp_path_factory.mktemp("runs")
    settings: dict[str, object] = {
        "run.num_steps": 5,
        "learner.lora.rank": 8,
        "learner.learning_rate": 2e-3,
        "algo.kl": "k3",
        "algo.kl_place": "loss",
        "algo.regularize_without_signal": "true",
        "algo.kl_weight": 0.01,
        "algo.kl_reference": "fixed",
        "evaluation.num_problems": 8,
        "evaluation.num_samples": 2,
        "evaluation.num_engines": 1,
        "evaluation.interval": 0,
    }
    done = subprocess.run(arguments(made, root, "adapted", **settings), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(root / "adapted", done.stdout)


def newest(run: Run) -> Path:
    return run.path / "weights" / (run.path / "weights" / "latest").read_text().strip()


def test_the_account_closes_and_the_sampler_gives_the_learners_logprobs(adapted: Run) -> None:
    summary, config = adapted.summary, load(adapted.path / "config.toml")
    assert summary["ledger_closes"]
    assert summary["groups"]["trained"] == 5 * config.stream.groups_per_step
    assert summary["age"]["max"] <= config.stream.max_policy_age
    gap = summary["probe_gap"]
    assert gap["mean"] < 1e-4
    assert gap["max"] < 1e-3
    assert gap["num_tokens"] > 100
    # The policy moves away from the base that it is held to.
    kl = [line["k3_reference"] for line in adapted.lines("step")]
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert kl[-1] > 1e-6


def test_what_is_published_is_the_adapter(adapted: Run, made: Path) -> None:
    manifest = json.loads((newest(adapted) / "manifest.json").read_text())
    assert manifest["version"] == [0, 5]
    assert manifest["adapter"] == {
        "base_sha256": Base(made / "model", "float32").sha256,
        "rank": 8,
        "alpha": 32.0,
    }
    assert all(".lora_" in name for name in manifest["tensors"])
    published = (newest(adapted) / "model.safetensors").stat().st_size
    assert published < 0.3 * (made / "model" / "model.safetensors").stat().st_size
    status = [line for line in adapted.lines("status") if line["part"] == "sampler-0"][-1]
    shas = {json.loads(path.read_text())["sha256"] for path in (adapted.path / "weights").glob("*/manifest.json")}
    assert status["weights_sha256"] in shas


def test_the_model_folder_is_merged_and_the_adapter_beside_it_is_peft_s(adapted: Run, made: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = Path(adapted.summary["model_dir"])
    merged, base = (AutoModelForCausalLM.from_pretrained(path) for path in (model_dir, made / "model"))
    ids = AutoTokenizer.from_pretrained(model_dir)("12+34=", return_tensors="pt").input_ids
    with torch.no_grad():
        of_base = base(ids).logits.log_softmax(-1)
        in_peft = PeftModel.from_pretrained(base, str(model_dir.with_name("model-adapter"))).eval()
        gap = (merged(ids).logits.log_softmax(-1) - in_peft(ids).logits.log_softmax(-1)).abs().max()
        moved = (merged(ids).logits.log_softmax(-1) - of_base).abs().max()
    assert float(gap) < 1e-4
    assert float(moved) > 1e-3
    # vLLM has loaded the folder for the evaluation after training.
    assert adapted.summary["heldout_after"]["headline"]["num_problems"] > 0


def test_it_goes_on_from_its_checkpoint(adapted: Run, live: Callable[[list[str], Path], Live], made: Path) -> None:
    resume = [*COMMAND, "train", "--resume", str(adapted.path), "--set", "evaluation.num_problems=0"]
    resume += ["--set", "run.num_steps=7"]
    other = subprocess.run([*resume, "--set", "learner.lora.rank=4"], cwd=ROOT, capture_output=True, text=True)
    assert other.returncode != 0
    assert "holds an adapter of learner.lora.rank = 8" in other.stdout + other.stderr
    command = live(resume, adapted.path)
    code, output = command.end(timeout_s=200)
    assert code == 0, output
    steps: list[dict[str, Any]] = adapted.lines("step")
    assert [line["step"] for line in steps] == list(range(1, 8))
    assert {line["branch"] for line in steps} == {0, 1}
    assert adapted.summary["ledger_closes"]
    # The adapter that it goes on with is the one that it had: that of a new one is 0, exactly, as in the first step.
    assert steps[0]["k3_reference"] == 0.0
    assert steps[5]["k3_reference"] > 1e-4
