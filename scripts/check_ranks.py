"""Holds a learner of several ranks against one of a single rank, on the same recorded train batches.

The batches are those of a run, read from its journal step by step, or without `--run` drawn from a seed for a small
random Llama. Each case is a world of real processes under DeepSpeed in fp32. Goals: the loss of every step within 1e-5
of that on one rank, every weight within 1e-4 at the end, and a checkpoint after which the steps are made again bit for
bit. With `--resume-on N` a third of the steps each is made on `--ranks`, on N and on `--ranks` again, from one
checkpoint to the next; the same goals for losses and weights. Exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from stream_grpo.config import Config
from stream_grpo.config_file import load_run, parse
from stream_grpo.learner.batching import TrainBatch, make_train_batch
from stream_grpo.learner.branches import Branches
from stream_grpo.learner.checkpoint import newest_complete, write_checkpoint
from stream_grpo.learner.follower import Follower
from stream_grpo.learner.layout import Layout
from stream_grpo.learner.lead import LeadEngine, LeadStep
from stream_grpo.learner.process import enters_loss
from stream_grpo.learner.ranks import ALONE
from stream_grpo.learner.universal import ENGINE, fitting
from stream_grpo.parts import learner_crew, learner_engine, learner_step
from stream_grpo.rollouts.views import Groups, GroupView, journal_of
from stream_grpo.transport.codec import decode_group, encode_group
from stream_grpo.types import (
    Decision,
    EndReason,
    PolicyVersion,
    RewardResult,
    Rollout,
    RolloutGroup,
    forks_from_plain,
    forks_to_plain,
)

MAX_LOSS_GAP, MAX_WEIGHT_GAP = 1e-5, 1e-4
VOCAB = 64
CASE_LIMIT_S = 300.0
STARTS = "starts.json"


class Trained(NamedTuple):
    """What a world made of the batches."""

    losses: list[float]
    weights: Mapping[str, torch.Tensor]
    again: list[float]
    """The losses of the second half once more, from the checkpoint between the halves."""


class Leg(NamedTuple):
    """What one world does."""

    first: int
    """The batch that it begins with."""
    end: int
    """The first batch that it leaves."""
    is_resumed: bool
    """Whether it goes on from the newest checkpoint that there is."""
    makes_again: bool
    """Whether it goes back to its own checkpoint at the end."""


class Compared(NamedTuple):
    """One case against one rank."""

    loss_gap: float
    weight_gap: float
    is_resumed_exactly: bool | None
    """None where the ranks that go on are others."""

    @property
    def is_met(self) -> bool:
        """Whether all goals are."""
        is_near = self.loss_gap <= MAX_LOSS_GAP and self.weight_gap <= MAX_WEIGHT_GAP
        return is_near and self.is_resumed_exactly is not False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each case")
    parser.add_argument("--stages", type=int, nargs="*", choices=range(4), default=[0, 1, 2, 3], help="ZeRO stages")
    parser.add_argument("--resume-on", type=int, help="go on with so many ranks after a third, and back after another")
    parser.add_argument("--steps", type=int, default=20, help="train batches")
    parser.add_argument("--run", type=Path, help="a run whose batches are replayed; by default random ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="check-ranks-") as name:
        root = Path(name)
        config = load_run(options.run.resolve()) if options.run else small_config(root)
        num_steps = record(
            root / "batches", recorded(options.run) if options.run else drawn(options.steps), options.steps
        )
        if options.run:
            note_starts(root, options.run)
        found = compare(root, config, options.stages, options.ranks, options.resume_on)
    for stage, case in found.items():
        ranks = str(options.ranks) if options.resume_on is None else f"{options.ranks}, {options.resume_on}, then again"
        print(
            f"ZeRO {stage}, {ranks} ranks against 1, {num_steps} steps: loss {case.loss_gap:.1e} (goal "
            f"{MAX_LOSS_GAP:g}), weights {case.weight_gap:.1e} (goal {MAX_WEIGHT_GAP:g})"
            + ("" if case.is_resumed_exactly is None else f", resumed exactly: {case.is_resumed_exactly}")
        )
    if options.json:
        cases = {str(stage): case._asdict() for stage, case in found.items()}
        print(json.dumps({"ranks": options.ranks, "resume_on": options.resume_on, "steps": num_steps, "stages": cases}))
    return 0 if all(case.is_met for case in found.values()) else 1


def small_config(root: Path) -> Config:
    """A random Llama of two layers, and settings under which weights move."""
    torch.manual_seed(7)
    llama = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(root / "model")
    return parse(
        {
            "model": {"path": str(root / "model"), "max_length_tokens": 64},
            "sampler": {"group_size": 4, "max_new_tokens": 24},
            "stream": {"groups_per_step": 4},
            "learner": {"learning_rate": 1e-3, "microbatch_tokens": 128, "num_minibatches": 2},
            "algo": {"preset": "tis"},
        },
        "check_ranks",
    )


def drawn(num_steps: int, num_groups: int = 4, group_size: int = 4) -> Iterator[list[RolloutGroup]]:
    """Random groups of mixed lengths, sampled from about a flat distribution."""
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        yield [_drawn_group(rng, f"{step}.{g}", group_size) for g in range(num_groups)]


def _drawn_group(rng: np.random.Generator, name: str, group_size: int) -> RolloutGroup:
    prompt = rng.integers(0, VOCAB, int(rng.integers(2, 8)))
    return RolloutGroup(
        group_id=name, owner_epoch=0, problem_id=name, domain="", sampler_id="drawn", ticket_step=0, config_hash="",
        dispatched_at_s=0.0, finished_at_s=0.0,
        rollouts=tuple(_drawn_rollout(rng, prompt, float(i % 2)) for i in range(group_size)),
    )  # fmt: skip


def _drawn_rollout(rng: np.random.Generator, prompt: np.ndarray[Any, Any], reward: float) -> Rollout:
    ids = np.concatenate([prompt, rng.integers(0, VOCAB, int(rng.integers(1, 25)))]).astype(np.int32)
    sampled = np.arange(len(ids)) >= len(prompt)
    version = np.where(sampled, 0, -1).astype(np.int32)
    logprobs = np.where(sampled, np.minimum(-np.log(VOCAB) + rng.normal(0, 0.2, len(ids)), 0), 0)
    return Rollout(
        token_ids=ids, num_prompt_tokens=len(prompt), loss_mask=sampled,
        behavior_logprobs=logprobs.astype(np.float32), version_branch=version, version_step=version,
        turn=np.zeros(len(ids), dtype=np.int16), end_reason=EndReason.EOS, seed=0,
        reward=RewardResult(
            decision=Decision.PASS if reward else Decision.FAIL, reward=reward, verifier="drawn", verifier_version="1"
        ),
    )  # fmt: skip


def recorded(run: Path) -> Iterator[list[RolloutGroup]]:
    """The groups that each step of a run was made of, from its journal."""
    groups = Groups(journal_of(run))
    for _, views in _steps(groups):
        yield [decode_group(groups.data(view)) for view in views]


def _steps(groups: Groups) -> list[tuple[PolicyVersion, list[GroupView]]]:
    """The version that each step made, and of what."""
    steps: dict[PolicyVersion, list[GroupView]] = {}
    for view in groups.views.values():
        if view.made is not None:
            steps.setdefault(view.made, []).append(view)
    return sorted(steps.items())


def note_starts(root: Path, run: Path) -> None:
    """Write down at which version each step of a run began: what was too old then is too old in every case."""
    starts = [(made.branch, made.step - 1) for made, _ in _steps(Groups(journal_of(run)))]
    forks = forks_to_plain(Branches.load(run / "branches.json").forks)
    (root / STARTS).write_text(json.dumps({"starts": starts, "forks": forks}))


def is_trained(root: Path, step: int, config: Config) -> Callable[[Rollout], bool]:
    """Which rollouts of a step enter the loss; all, where nothing is noted."""
    if not (root / STARTS).exists():
        return lambda rollout: True
    plain = json.loads((root / STARTS).read_text())
    start, forks = PolicyVersion(*plain["starts"][step]), forks_from_plain(plain["forks"])
    return lambda rollout: enters_loss(rollout, config.stream, start, forks)


def record(folder: Path, batches: Iterator[list[RolloutGroup]], num_steps: int) -> int:
    """Write the first batches down, a file a group; returns how many there were."""
    steps = [groups for groups, _ in zip(batches, range(num_steps), strict=False)]
    for step, groups in enumerate(steps):
        (folder / f"{step:04d}").mkdir(parents=True)
        for index, group in enumerate(groups):
            (folder / f"{step:04d}" / f"{index:04d}").write_bytes(encode_group(group))
    return len(steps)


def compare(
    root: Path, config: Config, stages: Sequence[int], num_ranks: int, resume_on: int | None = None
) -> dict[int, Compared]:
    """Each stage on so many ranks, or on these and others by turns, against stage 1 on one."""
    one = trained(root, config, Layout(1, 1))
    found = {}
    for stage in stages:
        if resume_on is None:
            several = trained(root, config, Layout(num_ranks, stage))
        else:
            several = relayed(root, config, [Layout(ranks, stage) for ranks in (num_ranks, resume_on, num_ranks)])
        found[stage] = compared(one, several)
    return found


def compared(one: Trained, several: Trained) -> Compared:
    """The largest gaps."""
    num_again = len(several.again)
    return Compared(
        loss_gap=max(abs(a - b) for a, b in zip(one.losses, several.losses, strict=True)),
        weight_gap=max(float((one.weights[n] - w).abs().max()) for n, w in several.weights.items()),
        is_resumed_exactly=several.again == several.losses[-num_again:] if num_again else None,
    )


def trained(root: Path, config: Config, layout: Layout) -> Trained:
    """Train on the batches under `root` in a world of its own, the second half twice. Raises RuntimeError."""
    num_steps = len(list((root / "batches").iterdir()))
    with _folder(root) as out:
        return _made(root, config, out, layout, Leg(0, num_steps, is_resumed=False, makes_again=True))


def relayed(root: Path, config: Config, layouts: Sequence[Layout]) -> Trained:
    """The batches in as many parts, each on ranks of its own, from the checkpoint before. Raises RuntimeError."""
    num_steps = len(list((root / "batches").iterdir()))
    bounds = [num_steps * part // len(layouts) for part in range(len(layouts) + 1)]
    losses: list[float] = []
    with _folder(root) as out:
        for (first, end), layout in zip(pairwise(bounds), layouts, strict=True):
            leg = Leg(first, end, is_resumed=first > 0, makes_again=False)
            made = _made(root, config, out, layout, leg)
            losses += made.losses
    return Trained(losses, made.weights, [])


@contextmanager
def _folder(root: Path) -> Iterator[Path]:
    out = root / f"out-{uuid.uuid4().hex}"
    out.mkdir()
    yield out
    shutil.rmtree(out)


def _made(root: Path, config: Config, out: Path, layout: Layout, leg: Leg) -> Trained:
    """What one world makes of its batches. Raises RuntimeError where a rank fails."""
    learner = config.learner.model_copy(update=layout._asdict())
    config = config.model_copy(update={"learner": learner})
    with _world(layout.num_ranks, root, config, out, leg) as ranks:
        for rank in ranks:
            rank.join(CASE_LIMIT_S)
    if codes := [rank.exitcode for rank in ranks if rank.exitcode != 0]:
        raise RuntimeError(
            f"ZeRO {layout.zero_stage} on {layout.num_ranks} ranks: exit codes {codes} (None: not ended in time)"
        )
    losses = json.loads((out / "losses.json").read_text())
    # What a plain reader loads, so that the export is looked at too.
    weights = load_file(out / "model" / "model.safetensors")
    return Trained(losses["losses"], weights, losses["again"])


@contextmanager
def _world(num_ranks: int, root: Path, config: Config, out: Path, leg: Leg) -> Iterator[list[BaseProcess]]:
    spawn = multiprocessing.get_context("spawn")
    here = out / "ranks" / uuid.uuid4().hex
    ranks = [spawn.Process(target=_rank, args=(rank, root, config, out, here, leg)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    try:
        yield list(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _rank(rank: int, root: Path, config: Config, out: Path, rendezvous: Path, leg: Leg) -> None:
    crew = learner_crew(config, rank, rendezvous) if config.learner.num_ranks > 1 else None
    engine = learner_engine(config)
    step = learner_step(config, engine, crew or ALONE)
    if crew is None:
        _lead(engine, step, root, config, out, leg)
    elif rank == 0:
        _lead(LeadEngine(engine, crew), LeadStep(step, crew), root, config, out, leg)
        crew.dismiss()
    else:
        Follower(engine, step, crew).run(Event())


def _lead(engine: Any, step: Any, root: Path, config: Config, out: Path, leg: Leg) -> None:
    """The steps of a leg and a checkpoint: half way, from where they are made once more, or at the end."""
    folders = sorted((root / "batches").iterdir())[leg.first : leg.end]
    if leg.is_resumed:
        _restore(engine, step, config, out)
    half = len(folders) // 2 if leg.makes_again else len(folders)
    losses = [_loss(engine, step, folder, config) for folder in folders[:half]]
    version, state = PolicyVersion(0, leg.first + half), step.state()
    write_checkpoint(out / "checkpoints", version, lambda path: engine.save(path / ENGINE, state))
    losses += [_loss(engine, step, folder, config) for folder in folders[half:]]
    engine.export(out / "model")
    again = []
    if leg.makes_again:
        _restore(engine, step, config, out)
        again = [_loss(engine, step, folder, config) for folder in folders[half:]]
    (out / "losses.json").write_text(json.dumps({"losses": losses, "again": again}))


def _restore(engine: Any, step: Any, config: Config, out: Path) -> None:
    newest, _ = newest_complete(out / "checkpoints")
    assert newest is not None
    step.restore(engine.load(fitting(newest, Layout(config.learner.num_ranks, config.learner.zero_stage))))


def _loss(engine: Any, step: Any, folder: Path, config: Config) -> float:
    groups = [decode_group(path.read_bytes()) for path in sorted(folder.iterdir())]
    learner = config.learner
    rewarded = step.rewarded(groups, vocab_size=engine.vocab_size, microbatch_tokens=learner.microbatch_tokens)
    batch: TrainBatch = make_train_batch(
        rewarded, step.advantages, vocab_size=engine.vocab_size, microbatch_tokens=learner.microbatch_tokens,
        num_minibatches=learner.num_minibatches, num_ranks=learner.num_ranks,
        is_trained=is_trained(folder.parents[1], int(folder.name), config), attention_cost=engine.attention_cost,
        share_prompts=learner.share_prompts, packing=learner.packing,
    )  # fmt: skip
    return float(step.run(batch)["loss"])


if __name__ == "__main__":
    sys.exit(main())
