"""What it saves to keep keys and values of trajectories that wait: seconds of sampling, and how logprobs differ.

The real engine in this process on a model folder, or on random weights of the size of SmolLM2-135M; groups of
trajectories whose environment answers at once with tokens of its own, with `environment.waiting_kv` drop and keep in
turns, the faster round of each. The prompts of a group are shared either way. Prints the ratio. With `--json` a last
line {speedup, drop_s, keep_s, history_tokens, cached_share, logprob_gap}.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stream_grpo.config_environment import Environment
from stream_grpo.config_file import parse
from stream_grpo.environments.instance import Call, Reply
from stream_grpo.environments.protocol import Start, Step
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.sampler.environment import environment as sampler_environment
from stream_grpo.types import Episode, Generation, GenerationRequest

TEXT_TOKENS = 1000
"""Ids of prompts and observations are drawn from those below; the first two may be special."""


class Answering:
    """Environments that answer at once."""

    def __init__(self) -> None:
        self._replies: list[tuple[str, Reply]] = []

    def submit(self, call: Call) -> None:
        """Ask it."""
        reply = Reply(step=Step(observation=".")) if call.actions else Reply(start=Start(snapshot=b"s"))
        self._replies.append((call.trajectory, reply))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reply]]:
        """All answers."""
        replies, self._replies = self._replies, []
        return replies

    def forget(self, trajectory: str) -> None:
        """Nothing is kept."""

    def status(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


class Observed:
    """Every observation has the same tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._ids = tuple(np.random.default_rng(1).integers(2, TEXT_TOKENS, num_tokens).tolist())

    def token_ids(self, text: str, after: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids."""
        return self._ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; by default random weights of SmolLM2-135M's size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--action-tokens", type=int, default=16)
    parser.add_argument("--observation-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one group of two and one round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.turns < 2:
        parser.error(f"--turns {arguments.turns}: the first action has no history to keep; use 2 or more")
    if arguments.quick:
        arguments.groups, arguments.group_size, arguments.rounds = 1, 2, 1
    with tempfile.TemporaryDirectory() as name:
        result = measured(arguments.model or random_model(Path(name)), arguments)
    print(
        f"{result['history_tokens']:,} tokens of histories, {result['cached_share']:.0%} of them read where they are "
        f"kept: {result['drop_s']:.2f} s with drop, {result['keep_s']:.2f} s with keep, {result['speedup']:.2f} times "
        f"faster; logprobs differ by {result['logprob_gap']:.1e} at most"
    )
    if arguments.json:
        print(json.dumps(result))


def random_model(directory: Path) -> Path:
    """SmolLM2-135M's shape, and a tokenizer that has an end and else is not asked."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    backend = Tokenizer(WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return directory


def measured(model: Path, arguments: argparse.Namespace) -> dict[str, float | int]:
    """Both ways in turns; the fastest of each."""
    per_turn = arguments.action_tokens + arguments.observation_tokens
    num = arguments.groups * arguments.group_size
    config = parse(
        {
            "model": {
                "path": str(model),
                "dtype": arguments.dtype,
                "max_length_tokens": arguments.prompt_tokens + arguments.turns * per_turn,
            },
            "sampler": {
                "temperature": 1.0,
                "max_num_seqs": num,
                "group_size": 2,
                "max_new_tokens": arguments.turns * arguments.action_tokens,
                "kv_cache_bytes": 1 << 30,
                "num_threads": arguments.threads,
                "prefix_cache": True,
            },
        },
        source="bench_turns",
    )
    os.environ.update(sampler_environment(config))
    from stream_grpo.sampler.engine import InProcessEngine

    engine = InProcessEngine(config)
    best = {"drop": math.inf, "keep": math.inf}
    logprobs: dict[str, Any] = {}
    cached = (0, 0)
    sampled(engine, "drop", requests(arguments, 1), arguments)  # what is made on first use
    for _ in range(arguments.rounds):
        for way in best:
            engine.clear_kv()
            begun = time.perf_counter()
            found, history = sampled(engine, way, requests(arguments, num), arguments)
            best[way] = min(best[way], time.perf_counter() - begun)
            logprobs[way] = found
            if way == "keep":
                cached = history
    engine.close()
    gaps = [0.0]
    for name, kept in logprobs["keep"].items():
        dropped = logprobs["drop"][name]
        if kept.token_ids.tolist() != dropped.token_ids.tolist():
            raise SystemExit(f"{name}: other tokens were sampled, which rounding may do on rare occasions; try again")
        gaps.append(float(np.abs(kept.logprobs - dropped.logprobs).max()))
    return {
        "speedup": best["drop"] / best["keep"],
        "drop_s": best["drop"],
        "keep_s": best["keep"],
        "history_tokens": cached[0],
        "cached_share": cached[1] / cached[0],
        "logprob_gap": max(gaps),
    }


def requests(arguments: argparse.Namespace, num: int) -> list[GenerationRequest]:
    """Trajectories of groups, each with a prompt of its own."""
    made = []
    for number in range(num):
        group, index = divmod(number, arguments.group_size)
        prompt = np.random.default_rng(100 + group).integers(2, TEXT_TOKENS, arguments.prompt_tokens)
        problem = ProblemRow(problem_id=f"p{group}", answer="", verifier="environment")
        made.append(
            GenerationRequest(
                request_id=f"g{group}/{index}",
                prompt_ids=tuple(prompt.tolist()),
                seed=number,
                max_new_tokens=arguments.turns * arguments.action_tokens,
                episode=Episode(group=f"g{group}", seed=group, problem=problem),
            )
        )
    return made


def sampled(
    engine: Any, way: Any, asked: Sequence[GenerationRequest], arguments: argparse.Namespace
) -> tuple[dict[str, Generation], tuple[int, int]]:
    """The trajectories by name, and the tokens of their histories: all, and those that were read."""
    from stream_grpo.sampler.trajectories import TrajectoryEngine

    settings = Environment(
        name="calculator", max_steps=arguments.turns, max_turn_tokens=arguments.action_tokens, waiting_kv=way
    )
    made = TrajectoryEngine(engine, Answering(), Observed(arguments.observation_tokens), lambda ids: "", settings)
    for one in asked:
        made.add(one)
    done: dict[str, Generation] = {}
    while made.num_unfinished:
        done |= {generation.request_id: generation for generation in made.step()}
    status = made.status()
    return done, (status["num_history_tokens"], status["num_history_cached"])


if __name__ == "__main__":
    main()
