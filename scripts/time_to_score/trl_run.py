"""One training by TRL's GRPOTrainer, in TRL's own environment; its only argument is a JSON object.

Weights are saved every so many steps, or every `every_s` seconds, with the time they were reached at, which leaves out
what saving took. With `save_every` it leaves checkpoints, and ends after `stop_after_s` seconds of training; the same
request again goes on from the newest.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from trl_clock import CLOCK, Clock

from stream_grpo.types import Decision


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["num_threads"])
    folder = Path(options["folder"])
    clock = Clock(folder, options.get("every"), options.get("every_s"), options.get("stop_after_s"))
    checkpoint = newest_checkpoint(folder / "trainer")
    if checkpoint is not None:
        clock.read(checkpoint)
    trainer = make_trainer(options, clock)
    timed(trainer, clock)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds, steps = clock.seconds, trainer.state.global_step
    loop = {
        "wall_s": seconds,
        "steps": steps,
        "sampler_s": clock.generate_s,
        "learner_s": seconds - clock.generate_s,
        "tokens": clock.num_tokens,
        "trained_share": 1.0,
    }
    made = {
        "began_s": clock.began_s,
        "snapshots": clock.found,
        "loop": loop,
        "seconds": seconds,
        "is_done": steps >= options["num_steps"],
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
        "server_needs_cuda": server_needs_cuda(),
    }
    (folder / "trl.json").write_text(json.dumps(made))


def make_trainer(options: dict[str, Any], clock: Clock) -> GRPOTrainer:
    """GRPOTrainer with a batch, an optimizer and a reward like those of this trainer's run."""
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    ends = end_token_ids(Path(options["model"]), tokenizer)

    def reward(completions: list[Any], completion_ids: list[list[int]], row: list[str], **_: Any) -> list[float]:
        clock.num_tokens += sum(map(len, completion_ids))
        return [
            score(said if isinstance(said, str) else said[0]["content"], ids[-1] not in ends, json.loads(about))
            for said, ids, about in zip(completions, completion_ids, row, strict=True)
        ]

    batch_size = options["group_size"] * options["groups_per_step"]
    save_every = options.get("save_every")
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": save_every, "save_total_limit": 1}
    arguments = GRPOConfig(
        output_dir=str(clock.folder / "trainer"),
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
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_vllm=options.get("use_vllm", False),
        **(more if save_every else {"save_strategy": "no"}),
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"])),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([row for path in options["pool"] for row in rows(Path(path))]),
        callbacks=[clock],
    )


def timed(trainer: Any, clock: Clock) -> None:
    """Count the seconds of generation."""
    generate: Callable[..., Any] = trainer._generate_single_turn

    def counted(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return generate(*given, **named)
        finally:
            clock.generate_s += time.perf_counter() - begun

    trainer._generate_single_turn = counted


def newest_checkpoint(folder: Path) -> Path | None:
    """The last one that was left whole, with its time; those that a killed process left half are removed."""
    while folder.is_dir() and (found := get_last_checkpoint(str(folder))) is not None:
        if (Path(found) / CLOCK).exists():
            return Path(found)
        shutil.rmtree(found)
    return None


def rows(path: Path) -> list[dict[str, Any]]:
    """Of a pool file what TRL needs, and the row as it is for the reward."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{"prompt": json.loads(line)["prompt"], "row": line} for line in lines]


def score(text: str, is_cut: bool, row: dict[str, Any]) -> float:
    """The reward that this trainer's runs have: the verifier itself."""
    name = row["verifier"]
    verifier = getattr(importlib.import_module(f"stream_grpo.rewards.{name}"), name)
    problem: Any = SimpleNamespace(problem_id=row.get("id", ""), answer=row["answer"], extra=row)
    return float(verifier(text, problem, is_cut).decision is Decision.PASS)


def end_token_ids(model: Path, tokenizer: Any) -> set[int]:
    """Tokens that end a response, as this trainer knows them."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = model / name
        ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found |= set(ends) if isinstance(ends, list) else {ends}
    return found - {None}


def server_needs_cuda() -> bool:
    """Whether TRL's other way to vLLM, a server, refuses to send weights from a CPU."""
    client = importlib.import_module("trl.generation.vllm_client").VLLMClient
    return "needs a CUDA device" in inspect.getsource(client.init_communicator)


if __name__ == "__main__":
    main()
