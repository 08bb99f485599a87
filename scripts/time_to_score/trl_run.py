"""One training by TRL's GRPOTrainer, in TRL's own environment; its only argument is a JSON object.

Weights are saved with the time they were reached at, which leaves out what saving took.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from stream_grpo.rewards.exact import exact
from stream_grpo.types import Decision


class Snapshots(TrainerCallback):
    """Saves weights as training goes, and keeps the clock."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._saving_s = 0.0
        self.num_tokens = 0
        """Generated so far."""
        self.began_s = 0.0
        """Unix time at which training began."""
        self.found: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save what training begins with; the clock runs from here."""
        self._save(given["model"], 0)
        self.began_s, self._begun, self._saving_s = time.time(), time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save where it is time."""
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._save(given["model"], state.global_step)

    def _save(self, model: Any, step: int) -> None:
        begun = time.perf_counter()
        seconds = begun - self._begun - self._saving_s if step else 0.0
        # Of tied weights one: it is what `named_parameters` gives.
        tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        save_file(tensors, self._folder / f"{step:06}.safetensors")
        self.found.append({"step": step, "seconds": seconds, "tokens": self.num_tokens})
        self._saving_s += time.perf_counter() - begun


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["num_threads"])
    folder = Path(options["folder"])
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    snapshots = Snapshots(folder, options["every"])

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: list[Any]) -> list[float]:
        snapshots.num_tokens += sum(map(len, completion_ids))
        return [
            score(text, ids[-1:] != [tokenizer.eos_token_id], answer, prefix)
            for text, ids, answer, prefix in zip(
                completions, completion_ids, columns["answer"], columns["answer_prefix"], strict=True
            )
        ]

    batch_size = options["group_size"] * options["groups_per_step"]
    arguments = GRPOConfig(
        output_dir=str(folder / "trainer"),
        seed=options["seed"],
        max_steps=options["num_steps"],
        learning_rate=options["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options["warmup_steps"],
        adam_beta1=options["adam_betas"][0],
        adam_beta2=options["adam_betas"][1],
        weight_decay=options["weight_decay"],
        max_grad_norm=options["max_grad_norm"],
        per_device_train_batch_size=batch_size // options["num_microbatches"],
        gradient_accumulation_steps=options["num_microbatches"],
        num_generations=options["group_size"],
        max_completion_length=options["max_new_tokens"],
        temperature=options["temperature"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([row for path in options["pool"] for row in rows(Path(path))]),
        callbacks=[snapshots],
    )
    trainer.train()
    names = ("trl", "transformers", "torch")
    made = {
        "began_s": snapshots.began_s,
        "snapshots": snapshots.found,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    (folder / "trl.json").write_text(json.dumps(made))


def rows(path: Path) -> list[dict[str, str]]:
    """Of a pool file what TRL and the reward need."""
    found = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [{name: row[name] for name in ("prompt", "answer", "answer_prefix")} for row in found]


def score(text: str, is_cut: bool, answer: str, prefix: str) -> float:
    """The reward that this trainer's runs have: the verifier itself."""
    problem: Any = SimpleNamespace(problem_id="", answer=answer, extra={"answer_prefix": prefix})
    return float(exact(text, problem, is_cut).decision is Decision.PASS)


if __name__ == "__main__":
    main()
