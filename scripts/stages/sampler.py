"""The sampler's own work against vLLM's loop alone: one engine, the same prompts, in turns."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from vllm.inputs.engine import tokens_input

from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.rewards.composed import ComposedScoring
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.rundir import read_problems
from stream_grpo.sampler.engine import InProcessEngine, sampling_params
from stream_grpo.sampler.prompts import Prompts, end_token_ids, load_tokenizer
from stream_grpo.sampler.rollout import GroupInProgress, group_of, make_requests, request_of, task_id_of
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import Ticket

_NUM_AHEAD = 2
"""Groups under way to a full engine, as in the sampler's loop."""


class Turn(NamedTuple):
    """What one turn of either made."""

    num_tokens: int
    seconds: float
    cached_share: float = 0.0
    groups: tuple[bytes, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Sampled."""
        return self.num_tokens / self.seconds


def measured(config: Config, *, num_groups: int, num_rounds: int) -> dict[str, Any]:
    """Tokens a second of both, and the groups of the last turn that have signal, as the buffer is sent them."""
    engine, prompts = InProcessEngine(config), Prompts(config)
    problems, _ = read_problems(config, prompts, say=lambda text: None)
    chosen = random.Random(config.run.seed).choices(problems, k=num_groups)
    prompt_ids = [prompts.token_ids(problem) for problem in chosen]
    with ComposedScoring(config.rewards, {problem.verifier for problem in chosen}) as scoring:
        turns: dict[str, list[Turn]] = {"bare": [], "ours": []}
        bare(engine, config, prompt_ids[:2])
        for number in range(num_rounds):
            turns["bare"].append(bare(engine, config, prompt_ids))
            turns["ours"].append(ours(engine, prompts, scoring, config, chosen, number))
    engine.close()
    last = turns["ours"][-1]
    return {
        "tokens_per_s": median(turn.tokens_per_s for turn in turns["ours"]),
        "bare_tokens_per_s": median(turn.tokens_per_s for turn in turns["bare"]),
        "cached_share": last.cached_share,
        "groups": last.groups,
    }


def bare(engine: InProcessEngine, config: Config, prompts: Sequence[Sequence[int]]) -> Turn:
    """What a program writes that wants nothing of vLLM but samples with their logprobs: `n` of every prompt."""
    engine.clear_kv()
    llm = engine._llm
    params = sampling_params(config, end_token_ids(config.model.path, load_tokenizer(config.model.path)))
    params.n, params.max_tokens = config.sampler.group_size, config.sampler.max_new_tokens
    begun, num_tokens = time.perf_counter(), 0
    for index, ids in enumerate(prompts):
        llm.add_request(f"bare-{index}", tokens_input(list(ids), cache_salt=engine._salt), params)
    while llm.has_unfinished_requests():
        for output in llm.step():
            num_tokens += sum(len(completion.token_ids) for completion in output.outputs if output.finished)
    return Turn(num_tokens, time.perf_counter() - begun)


def ours(
    engine: InProcessEngine,
    prompts: Prompts,
    scoring: Scoring,
    config: Config,
    problems: Sequence[Problem],
    number: int,
) -> Turn:
    """From tickets to encoded groups, without sockets: prompts, requests, engine, text, scores, groups, bytes."""
    engine.clear_kv()
    begun, num_tokens, num_prompt, num_cached = time.perf_counter(), 0, 0, 0
    waiting = deque(enumerate(problems))
    running: dict[str, GroupInProgress] = {}
    made: list[bytes] = []
    has_signal: list[bool] = []
    group_size = config.sampler.group_size
    while waiting or running:
        while waiting and engine.num_unfinished <= engine.num_slots + (_NUM_AHEAD - 1) * group_size:
            index, problem = waiting.popleft()
            group = begin(config, prompts, problem, f"g{number}-{index}", seed=1000 * number + index)
            running[group.ticket.group_id] = group
            for request in group.unfinished:
                engine.add(request)
        for generation in engine.step():
            group = running[group_of(generation.request_id)]
            whole = group.take(generation)
            text = prompts.decode(whole.token_ids.tolist())
            scoring.submit(task_id_of(group.ticket, whole.request_id), group.problem, text, whole.end_reason)
            num_tokens += len(whole.token_ids)
            num_prompt += whole.num_prompt_tokens
            num_cached += whole.num_cached_tokens
        for task_id, reward in scoring.poll(0.0 if engine.num_unfinished else 0.005):
            request_id = request_of(task_id)
            group = running[group_of(request_id)]
            group.score(request_id, reward, prompts.decode)
            if group.is_complete:
                del running[group.ticket.group_id]
                finished = group.finish(sampler_id="bench", config_hash="", finished_at_s=time.time())
                made.append(encode_group(finished))
                has_signal.append(len({rollout.reward.reward for rollout in finished.rollouts}) > 1)
    seconds = time.perf_counter() - begun
    kept = tuple(data for data, keep in zip(made, has_signal, strict=True) if keep)
    return Turn(num_tokens, seconds, num_cached / num_prompt, kept)


def begin(config: Config, prompts: Prompts, problem: Problem, group_id: str, *, seed: int) -> GroupInProgress:
    """A group on a ticket that never ends."""
    ticket = Ticket(group_id=group_id, owner_epoch=0, step=0, seed=seed, issued_at_s=time.time(), deadline_s=math.inf)
    return GroupInProgress(ticket, problem, make_requests(ticket, prompts.token_ids(problem), config), time.time())
