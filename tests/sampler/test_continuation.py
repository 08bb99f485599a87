"""What a group has so far as a record, and the group that goes on from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stream_grpo.sampler.continuation import continued_group, generation_of
from stream_grpo.sampler.rollout import GroupInProgress, continued_seed, joined, make_requests, make_rollout
from stream_grpo.transport.codec import decode_group, encode_group
from stream_grpo.types import EndReason, Generation, PolicyVersion, RolloutGroup
from tests.sampler.test_rollout import PROBLEM, REWARD, TICKET, config

V4, V5 = PolicyVersion(0, 4), PolicyVersion(0, 5)
AGAIN = replace(TICKET, owner_epoch=3, step=9)


def sampled(
    index: int,
    ids: list[int],
    end_reason: EndReason = EndReason.EOS,
    version: PolicyVersion = V4,
    mixed_context_from: int | None = None,
) -> Generation:
    return Generation(
        request_id=f"g/7/{index}",
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([-token / 100 for token in ids], np.float32),
        versions=(version,) * len(ids),
        end_reason=end_reason,
        mixed_context_from=mixed_context_from,
    )


def so_far(group: GroupInProgress, *running: Generation, config_hash: str = "c") -> RolloutGroup:
    record = group.so_far(running, sampler_id="s0", config_hash=config_hash, now_s=2.0)
    return decode_group(encode_group(record))


def begun(group_size: int = 3) -> GroupInProgress:
    requests = make_requests(TICKET, [5, 6], config(group_size=group_size, max_new_tokens=6))
    return GroupInProgress(TICKET, PROBLEM, requests, 1.0)


def go_on(prefix: RolloutGroup) -> GroupInProgress:
    of_three = config(group_size=len(prefix.rollouts), max_new_tokens=6)
    return continued_group(AGAIN, PROBLEM, prefix, of_three)


def test_a_record_so_far_says_of_every_rollout_how_far_it_is() -> None:
    group = begun()
    group.add(sampled(0, [20, 21]), REWARD)
    group.take(sampled(1, [30]))
    record = so_far(group, sampled(2, [40, 41, 42], EndReason.PARTIAL))
    scored, unscored, running = record.rollouts
    assert (scored.end_reason, scored.reward) == (EndReason.EOS, REWARD)
    assert (unscored.end_reason, unscored.reward.reward, unscored.valid) == (EndReason.EOS, None, False)
    assert (running.end_reason, running.reward.reward, running.valid) == (EndReason.PARTIAL, None, False)
    assert running.token_ids.tolist() == [5, 6, 40, 41, 42]
    assert record.num_sampled_tokens == 6
    assert group.num_tokens == 3  # the engine alone knows of the other 3


def test_what_has_ended_is_not_sampled_again_and_what_has_not_goes_on_from_its_tokens() -> None:
    group = begun()
    group.add(sampled(0, [20, 21]), REWARD)
    group.take(sampled(1, [30]))
    group = go_on(so_far(group, sampled(2, [40, 41], EndReason.PARTIAL)))
    assert [generation.request_id for generation in group.unscored] == ["g/7/0", "g/7/1"]
    (rest,) = group.unfinished
    original = begun().unfinished[2]
    assert rest.prompt_ids == (5, 6, 40, 41)
    assert rest.max_new_tokens == 6 - 2
    assert rest.seed == continued_seed(original.seed, 2) != original.seed
    whole = group.take(sampled(2, [43], EndReason.EOS, V5))
    assert whole.token_ids.tolist() == [40, 41, 43]
    for index in range(3):
        group.score(f"g/7/{index}", REWARD)
    done = group.finish(sampler_id="s1", config_hash="c", finished_at_s=9.0)
    assert (done.owner_epoch, done.sampler_id, done.dispatched_at_s) == (3, "s1", 1.0)
    # The step of the first ticket decides every schedule.
    assert done.ticket_step == TICKET.step
    last = done.rollouts[2]
    assert last.token_ids.tolist() == [5, 6, 40, 41, 43]
    assert last.behavior_logprobs.tolist() == pytest.approx([0, 0, -0.40, -0.41, -0.43])
    assert last.version_step.tolist() == [-1, -1, 4, 4, 5]
    assert last.seed == original.seed
    assert done.rollouts[0].reward == REWARD


def test_a_group_goes_on_with_as_many_rollouts_as_it_was_begun_with() -> None:
    prefix = so_far(begun(3), *(sampled(index, [20], EndReason.PARTIAL) for index in range(3)))
    # Whatever the configuration has others begin with.
    group = continued_group(AGAIN, PROBLEM, prefix, config(group_size=2, max_new_tokens=6))
    assert (group.size, len(group.unfinished)) == (3, 3)


def test_a_rollout_without_a_token_begins_by_its_own_seed() -> None:
    group = go_on(so_far(begun(2), *(sampled(index, [], EndReason.PARTIAL) for index in (0, 1))))
    assert group.unfinished == begun(2).unfinished


def test_a_group_may_be_continued_more_than_once() -> None:
    first = [sampled(0, [20, 21], EndReason.PARTIAL), sampled(1, [], EndReason.PARTIAL)]
    group = go_on(so_far(begun(2), *first))
    assert group.num_tokens == 2
    group = go_on(so_far(group, sampled(0, [22], EndReason.PARTIAL), sampled(1, [30], EndReason.PARTIAL)))
    assert group.num_tokens == 4
    rest = group.unfinished[0]
    assert (rest.prompt_ids, rest.max_new_tokens) == ((5, 6, 20, 21, 22), 3)
    assert rest.seed == continued_seed(begun(2).unfinished[0].seed, 3)


def test_rewards_of_a_complete_record_are_dropped_and_all_are_scored_again() -> None:
    group = begun(2)
    group.add(sampled(0, [20]), REWARD)
    group.add(sampled(1, [30], EndReason.LENGTH), REWARD)
    record = so_far(group)
    again = go_on(record)
    assert [generation.request_id for generation in again.unscored] == ["g/7/0", "g/7/1"]
    assert again.unfinished == []


@pytest.mark.parametrize(
    ("of_begun", "of_rest", "expected"), [(None, None, None), (None, 1, 3), (1, None, 1), (1, 0, 1), (None, 0, 2)]
)
def test_a_rest_is_of_mixed_context_where_it_or_its_beginning_is(
    of_begun: int | None, of_rest: int | None, expected: int | None
) -> None:
    # 2 tokens were begun: the first of the rest is the third of the whole.
    first = sampled(0, [20, 21], EndReason.PARTIAL, mixed_context_from=of_begun)
    assert joined(first, sampled(0, [22, 23], mixed_context_from=of_rest)).mixed_context_from == expected


def test_a_rollout_and_its_generation_say_the_same() -> None:
    request = begun(2).unfinished[0]
    generation = sampled(0, [20, 21, 22], mixed_context_from=1)
    rollout = make_rollout(request, generation, REWARD)
    again = generation_of("g/7/0", rollout)
    assert (again.versions, again.end_reason, again.mixed_context_from) == (
        generation.versions, generation.end_reason, 1
    )  # fmt: skip
    assert again.token_ids.tolist() == [20, 21, 22]
    assert again.logprobs.tolist() == generation.logprobs.tolist()
