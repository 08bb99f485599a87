"""From a ticket to requests, and from generations to a group."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.sampler.rollout import (
    GroupInProgress,
    config_hash,
    group_of,
    make_requests,
    refused_group,
    request_of,
    rollout_seed,
    task_id_of,
)
from stream_grpo.types import (
    Decision,
    EndReason,
    Generation,
    PolicyVersion,
    RewardResult,
    StepScore,
    Ticket,
    sampling_part,
)

TICKET = Ticket(group_id="g/7", owner_epoch=2, step=5, seed=11, issued_at_s=0.0, deadline_s=100.0)
PROBLEM = Problem(problem_id="p1", prompt="1+1=", answer="2", verifier="exact", domain="add-1")
REWARD = RewardResult(decision=Decision.PASS, reward=1.0, verifier="exact", verifier_version="1")


def config(**sampler: object) -> Config:
    sampler = {"group_size": 2, "max_new_tokens": 4} | sampler
    return parse({"model": {"path": "m", "max_length_tokens": 16}, "sampler": sampler}, source="test")


def generation(request_id: str, num_tokens: int = 2, **more: object) -> Generation:
    return Generation(
        request_id=request_id,
        token_ids=np.arange(20, 20 + num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        versions=(PolicyVersion(0, 4),) * (num_tokens - 1) + (PolicyVersion(1, 5),),
        end_reason=EndReason.EOS,
        **more,  # type: ignore[arg-type]
    )


def test_every_rollout_has_a_seed_of_its_own_that_never_changes() -> None:
    # The first 64 bits of sha256("11/0"), halved so that they fit a signed 64-bit column.
    expected = int(hashlib.sha256(b"11/0").hexdigest()[:16], 16) // 2
    assert rollout_seed(11, 0) == expected
    seeds = {rollout_seed(group, index) for group in range(50) for index in range(8)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_group_becomes_as_many_requests_as_it_has_rollouts() -> None:
    requests = make_requests(TICKET, [5, 6], config())
    assert [r.request_id for r in requests] == ["g/7/0", "g/7/1"]
    assert [r.seed for r in requests] == [rollout_seed(11, 0), rollout_seed(11, 1)]
    assert requests[0].prompt_ids == (5, 6)
    assert requests[0].max_new_tokens == 4
    assert group_of("g/7/1") == "g/7"


def test_prompt_and_response_stand_in_one_array_and_only_the_response_is_the_policys() -> None:
    group = GroupInProgress(TICKET, PROBLEM, make_requests(TICKET, [5, 6, 7], config()), 1.0)
    # In reverse: they come in any order and stand in theirs.
    group.add(generation("g/7/1"), REWARD)
    assert [r.request_id for r in group.unfinished] == ["g/7/0"]
    group.add(generation("g/7/0", mixed_context_from=1), REWARD)
    done = group.finish(sampler_id="s0", config_hash="c", finished_at_s=3.0)
    assert (done.group_id, done.owner_epoch, done.ticket_step) == ("g/7", 2, 5)
    assert (done.problem_id, done.domain, done.sampler_id, done.config_hash) == ("p1", "add-1", "s0", "c")
    assert (done.dispatched_at_s, done.finished_at_s) == (1.0, 3.0)
    first, second = done.rollouts
    assert first.token_ids.tolist() == [5, 6, 7, 20, 21]
    assert first.loss_mask.tolist() == [False, False, False, True, True]
    assert first.behavior_logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert first.version_branch.tolist() == [-1, -1, -1, 0, 1]
    assert first.version_step.tolist() == [-1, -1, -1, 4, 5]
    # The second response token: index 3 + 1 of the whole.
    assert first.mixed_context_from == 4
    assert second.mixed_context_from is None
    assert (first.seed, second.seed) == (rollout_seed(11, 0), rollout_seed(11, 1))


def test_a_generation_counts_once_and_only_for_its_group() -> None:
    group = GroupInProgress(TICKET, PROBLEM, make_requests(TICKET, [5], config()), 1.0)
    group.add(generation("g/7/0"), REWARD)
    for request_id in ("g/7/0", "other/0"):
        with pytest.raises(ValueError, match="not awaited"):
            group.add(generation(request_id), REWARD)
    with pytest.raises(ValueError, match="lacks"):
        group.finish(sampler_id="s0", config_hash="c", finished_at_s=3.0)


def test_a_generation_waits_for_its_reward() -> None:
    group = GroupInProgress(TICKET, PROBLEM, make_requests(TICKET, [5], config()), 1.0)
    assert group.take(generation("g/7/1")).request_id == "g/7/1"
    assert [r.request_id for r in group.unfinished] == ["g/7/0"]
    assert [g.request_id for g in group.unscored] == ["g/7/1"]
    with pytest.raises(ValueError, match="not awaited"):
        group.take(generation("g/7/1"))
    group.take(generation("g/7/0"))
    assert (group.unfinished, group.is_complete) == ([], False)
    with pytest.raises(ValueError, match=r"lacks \['g/7/0', 'g/7/1'\]"):
        group.finish(sampler_id="s0", config_hash="c", finished_at_s=3.0)
    for request_id in ("g/7/0", "g/7/1"):
        group.score(request_id, REWARD)
    assert (group.unscored, group.is_complete) == ([], True)


def test_a_score_is_of_one_ticket() -> None:
    task_id = task_id_of(TICKET, "g/7/1")
    assert request_of(task_id) == "g/7/1"
    assert task_id != task_id_of(replace(TICKET, owner_epoch=3), "g/7/1")
    assert request_of(task_id_of(TICKET, "g/7/1", attempt=2)) == "g/7/1"
    assert task_id != task_id_of(TICKET, "g/7/1", attempt=2)


def test_a_refused_problem_gives_a_group_without_tokens_or_rewards_that_says_why() -> None:
    group = refused_group(TICKET, PROBLEM, "too long", config(), 1.0).finish(
        sampler_id="s0", config_hash="c", finished_at_s=1.0
    )
    assert [r.reward.evidence for r in group.rollouts] == ["too long", "too long"]
    assert not any(r.valid or r.reward.reward is not None or len(r.token_ids) for r in group.rollouts)


def test_the_configuration_hash_changes_with_the_meaning_and_with_nothing_else() -> None:
    base = config_hash(config(), "tok", "exact=1")
    assert base == config_hash(config(max_num_seqs=9, num_threads=3), "tok", "exact=1")
    others = [
        config_hash(config(temperature=0.9), "tok", "exact=1"),
        config_hash(config(max_new_tokens=5), "tok", "exact=1"),
        config_hash(config(group_size=3), "tok", "exact=1"),
        config_hash(config(), "tok2", "exact=1"),
        config_hash(config(), "tok", "exact=2"),
    ]
    assert len({base, *others}) == 6
    several = parse({"model": {"path": "m"}, "curator": {"group_sizes": [4, 8]}}, "test")
    assert config_hash(several, "tok", "exact=1") != config_hash(
        parse({"model": {"path": "m"}}, "test"), "tok", "exact=1"
    )
    # Its first part is of sampling alone: what differs in rewards only can be scored again.
    assert [sampling_part(other) == sampling_part(base) for other in others] == [False] * 4 + [True]


def test_steps_of_a_reward_end_at_tokens_of_the_response() -> None:
    group = GroupInProgress(TICKET, PROBLEM, make_requests(TICKET, [5, 6, 7], config()), 1.0)
    group.take(generation("g/7/0", num_tokens=3))
    group.take(generation("g/7/1", num_tokens=1))
    reward = replace(REWARD, steps=(StepScore(2, 0.5), StepScore(6, 1.0)))
    # Every token is two characters: the first step ends with the first token, the second with the third.
    group.score("g/7/0", reward, lambda ids: "ab" * len(ids))
    group.score("g/7/1", REWARD, lambda ids: "ab" * len(ids))
    first, second = group.finish(sampler_id="s0", config_hash="c", finished_at_s=3.0).rollouts
    assert first.reward.steps == (StepScore(1, 0.5), StepScore(3, 1.0))
    assert second.reward.steps == ()
