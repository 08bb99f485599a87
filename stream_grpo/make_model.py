"""Makes the small model and its problems: a Llama trained on what a teacher writes who errs, on one CPU core.

It adds with a scratchpad. The teacher is wrong in some scratchpad steps (`error_rate`), and a model trained to
convergence samples its errors at the same rate: at temperature 1 about (1 - error_rate)^d of the sums of d digits come
out right. The room that reinforcement learning has is this noise; taken greedily the model is right nearly always.

With another task the model calls a tool instead, and its errors are in the copying of the call: sums by a calculator
(`arithmetic_calls`), or requests on a database by SQL (`stock_calls`).
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stream_grpo.errors import ConfigError
from stream_grpo.files import sha256
from stream_grpo.lessons import LESSONS, Task

MANIFEST = "make_model.json"

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def vocabulary_of(task: Task) -> dict[str, int]:
    """Token to id: the special tokens, then those of the task."""
    return {token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *LESSONS[task].tokens])}


VOCABULARY = vocabulary_of("scratchpad")
PAD, BOS, EOS = (VOCABULARY[SPECIAL_TOKENS[name]] for name in ("pad_token", "bos_token", "eos_token"))

MODEL_SHAPE: Mapping[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    # The usual 0.02 and 10000 suit large models and long texts; with them these sums take more steps to learn.
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}

WARMUP_STEPS = 30
IGNORED = -100
"""Target of a position whose next token is not trained on."""


def make_model(
    out: Path,
    seed: int = 0,
    *,
    steps: int = 450,
    batch_size: int = 64,
    learning_rate: float = 4e-3,
    error_rate: float = 0.12,
    tie_word_embeddings: bool = True,
    task: Task = "scratchpad",
    pool_counts: Mapping[Any, int] | None = None,
    held_out_counts: Mapping[Any, int] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the folder `out`: model/ (a Hugging Face folder), pool.jsonl, heldout.jsonl, make_model.json.

    `task`: what the model is taught; `calculator`, `records`: calls in that environment, see docs/environments.md.
    `pool_counts`, `held_out_counts`: problems by kind; by default those of the task.

    The folder appears whole or not at all, and is the same bytes for the same arguments and library versions. Where
    it is already there, complete and made with the same settings, nothing is done. Progress goes to `report`.

    Returns the content of make_model.json: settings, library versions, and the SHA-256 of every other file.

    Raises ConfigError when `out` exists and is anything else than an empty folder or what would be made.
    """
    lesson = LESSONS[task]
    pool_counts = lesson.pool_counts if pool_counts is None else pool_counts
    held_out_counts = lesson.held_out_counts if held_out_counts is None else held_out_counts
    settings = {
        "seed": seed,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "error_rate": error_rate,
        "tie_word_embeddings": tie_word_embeddings,
        "pool_counts": {str(kind): count for kind, count in pool_counts.items()},
        "held_out_counts": {str(kind): count for kind, count in held_out_counts.items()},
        "training_shares": {str(kind): share for kind, share in lesson.shares.items()},
        "warmup_steps": WARMUP_STEPS,
        "model_shape": dict(MODEL_SHAPE),
    }
    if task != "scratchpad":
        settings["task"] = task
    vocabulary = vocabulary_of(task)
    if made := _already_made(out, settings):
        report(f"{out}: already made")
        return made
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: no folder can be made there: {error.strerror}") from error
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{out}: nothing may be written to {out.parent}; name another place")
    started_s = time.monotonic()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(tie_word_embeddings, vocabulary)
        _train(model, random.Random(seed), steps, batch_size, learning_rate, error_rate, report, task)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / "made"
        model.save_pretrained(folder / "model")
        new_tokenizer(vocabulary).save_pretrained(folder / "model")
        _write_rows(folder / "pool.jsonl", lesson.rows(pool_counts, seed, held_out=False))
        _write_rows(folder / "heldout.jsonl", lesson.rows(held_out_counts, seed, held_out=True))
        manifest = {"settings": settings, "made_with": _library_versions(), "files": _hashes(folder)}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        folder.rename(out)
    report(f"{out}: made in {time.monotonic() - started_s:.0f} s")
    return manifest


def new_model(tie_word_embeddings: bool = True, vocabulary: Mapping[str, int] = VOCABULARY) -> LlamaForCausalLM:
    """The untrained model, initialised from torch's global generator."""
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **MODEL_SHAPE,
    )
    return LlamaForCausalLM(config)


def new_tokenizer(vocabulary: Mapping[str, int] = VOCABULARY) -> PreTrainedTokenizerFast:
    """One token per character, or the longest of the vocabulary that stands there.

    It adds no special token to a prompt, as the model is trained without any before it.
    """
    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=SPECIAL_TOKENS["unk_token"]))
    has_words = any(len(token) > 1 for token in vocabulary.keys() - set(SPECIAL_TOKENS.values()))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_pattern(vocabulary)) if has_words else "", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL_SHAPE["max_position_embeddings"],
        **SPECIAL_TOKENS,
    )


def _pattern(vocabulary: Mapping[str, int]) -> str:
    """Matches the longest token that stands at a place, or else one character."""
    longest_first = sorted(vocabulary.keys() - set(SPECIAL_TOKENS.values()), key=lambda token: (-len(token), token))
    return "|".join([*map(re.escape, longest_first), r"[\s\S]"])


def _train(
    model: LlamaForCausalLM,
    rng: random.Random,
    steps: int,
    batch_size: int,
    learning_rate: float,
    error_rate: float,
    report: Callable[[str], None],
    task: Task = "scratchpad",
) -> None:
    """AdamW on the response tokens, linear warmup then cosine to 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    started_s = time.monotonic()
    for step in range(steps):
        warmth = min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.param_groups[0]["lr"] = learning_rate * warmth * 0.5 * (1 + math.cos(math.pi * step / steps))
        token_ids_BT, targets_BT = _batch(rng, batch_size, error_rate, task)
        # Padding stands to the right of everything, where causal attention never looks: no attention mask is needed.
        logits_BTV = model(input_ids=token_ids_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            report(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {time.monotonic() - started_s:.0f} s")


def _batch(
    rng: random.Random, batch_size: int, error_rate: float, task: Task = "scratchpad"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and next-token targets [B, T], which cover what the model writes, each with its end, alone.

    No held-out problem.
    """
    lesson, vocabulary = LESSONS[task], vocabulary_of(task)
    split = re.compile(_pattern(vocabulary)).findall
    examples = []
    for kind in rng.choices(list(lesson.shares), weights=list(lesson.shares.values()), k=batch_size):
        parts = [(split(part.text), part.is_action) for part in lesson.example(kind, rng, error_rate)]
        examples.append(_encoded(parts, vocabulary))
    length = max(len(ids) for ids, _ in examples)
    token_ids_BT = np.full((batch_size, length), PAD, dtype=np.int64)
    targets_BT = np.full((batch_size, length), IGNORED, dtype=np.int64)
    for row, (ids, targets) in enumerate(examples):
        token_ids_BT[row, : len(ids)] = ids
        targets_BT[row, : len(ids) - 1] = targets[1:]
    return torch.from_numpy(token_ids_BT), torch.from_numpy(targets_BT)


def _encoded(parts: Sequence[tuple[Sequence[str], bool]], vocabulary: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """The ids of an example, and the same with those that the model does not write replaced by IGNORED.

    `parts`: tokens, and whether the model is to write them, and their end.
    """
    ids: list[int] = []
    targets: list[int] = []
    for tokens, is_action in parts:
        of_part = [*(vocabulary[token] for token in tokens), *([EOS] if is_action else [])]
        ids += of_part
        targets += of_part if is_action else [IGNORED] * len(of_part)
    return ids, targets


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in floating point depend on the number of threads: one, so that the model does not."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _already_made(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a complete folder with these settings; None where `out` is free."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    advice = "remove it or choose another folder"
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        made_with, files = manifest["settings"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{out} exists and holds no readable {MANIFEST}: {advice}") from error
    for name in {**settings, **made_with}:
        if made_with.get(name) != settings.get(name):
            found, asked = made_with.get(name), settings.get(name)
            raise ConfigError(f"{out} was made with {name} = {found!r}, not {asked!r}: {advice}")
    for name, digest in files.items():
        if not (out / name).is_file() or sha256(out / name) != digest:
            raise ConfigError(f"{out / name} is missing or not as it was made: {advice}")
    return manifest


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 by path relative to the folder."""
    return {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _library_versions() -> dict[str, str]:
    modules = {"numpy": np, "tokenizers": tokenizers, "torch": torch, "transformers": transformers}
    return {name: module.__version__ for name, module in modules.items()}
