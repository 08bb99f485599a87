"""Branching groups: one trunk, then as many samples from one state as the group has rollouts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator.schema import Problem
from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_environment import Environment
from stream_grpo.config_file import parse
from stream_grpo.environments.instance import Call, Reply
from stream_grpo.environments.outcome import judged, scored
from stream_grpo.evaluation import EvaluationRun
from stream_grpo.rewards.environment import check_environment
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.sampler.branching import num_trunk_actions, trunk_seed
from stream_grpo.sampler.rollout import continued_seed, make_rollout, rollout_seed
from stream_grpo.sampler.tallies import Tallies
from stream_grpo.sampler.trajectories import TrajectoryEngine
from stream_grpo.types import (
    NEVER_VALID,
    Decision,
    EndReason,
    Episode,
    Generation,
    GenerationRequest,
    PolicyVersion,
    RewardResult,
    Rollout,
    RolloutGroup,
    Trajectory,
)
from tests.learner.test_train_step import batch_of
from tests.sampler.acting import END, PROBLEM, WORLDS, Acting, Inside, all_of, around, decode, encode

NOT_SCORED = RewardResult(decision=Decision.ENV_ERROR, reward=None, verifier="environment", verifier_version="1")
Choose = Callable[[GenerationRequest, str], str]


class Choosing(Acting):
    """Says what `choose` answers to a request and its history, so that rollouts differ."""

    def __init__(self, choose: Choose, num_slots: int = 64) -> None:
        super().__init__(lambda history: "", num_slots)
        self._choose = choose

    def _ids(self, request: GenerationRequest) -> tuple[int, ...]:
        return (*encode(self._choose(request, decode(request.prompt_ids))), END)


def group_of(
    num_trunk: int, size: int = 4, name: str = "g", *, max_new_tokens: int = 100, seed: int = 7
) -> list[GenerationRequest]:
    episode = Episode(group=name, seed=3, problem=PROBLEM, num_trunk_actions=num_trunk)
    return [
        GenerationRequest(
            request_id=f"{name}/{i}",
            prompt_ids=encode("?"),
            seed=rollout_seed(seed, i),
            max_new_tokens=max_new_tokens,
            episode=episode,
        )
        for i in range(size)
    ]


def trajectory_of(generation: Generation) -> Trajectory:
    assert generation.trajectory is not None
    return generation.trajectory


def by_name(generations: Iterable[Generation]) -> dict[str, Generation]:
    return {generation.request_id: generation for generation in generations}


def num_done(history: str) -> int:
    """Actions that the history of a `Counter` has answers to."""
    return history.count("of seed")


def is_of_trunk(request: GenerationRequest) -> bool:
    """Of a group of `group_of`, by the seeds of the trunk's actions."""
    seed = trunk_seed(rollout_seed(7, 0))
    return request.seed in (seed, continued_seed(seed, len(request.prompt_ids) - 1))


def ends_at(last: int) -> Choose:
    """A policy whose actions tell who acts, and which ends by its action number `last`, from 1."""

    def choose(request: GenerationRequest, history: str) -> str:
        if num_done(history) + 1 == last:
            return "end"
        return f"go {request.request_id}"

    return choose


def as_group(rollouts: Iterable[Rollout]) -> RolloutGroup:
    return RolloutGroup(
        group_id="g",
        owner_epoch=0,
        problem_id="p",
        domain="d",
        sampler_id="s",
        ticket_step=0,
        config_hash="c",
        dispatched_at_s=0.0,
        finished_at_s=1.0,
        rollouts=tuple(rollouts),
    )


def rollouts_of(requests: Iterable[GenerationRequest], generations: Iterable[Generation]) -> list[Rollout]:
    """As the sampler makes them, with the scores of the environment."""
    found, rollouts = by_name(generations), []
    for request in requests:
        generation = found[request.request_id]
        row, text = scored(PROBLEM, generation, decode)
        result = NOT_SCORED if generation.end_reason in NEVER_VALID else check_environment(text, row, False)
        rollouts.append(make_rollout(request, *judged(generation, result)))
    return rollouts


# -- which groups branch, and where -----------------------------------------------------------------------------------


def test_a_group_branches_by_its_seed_alone() -> None:
    # 4,000 seeds, a share of 0.3: three standard errors are 3 sqrt(0.3 x 0.7 / 4,000) = 0.022.
    acting = Environment(name="calculator", max_steps=8, branch_share=0.3, branch_turns=5)
    drawn = [num_trunk_actions(seed, acting) for seed in range(4000)]
    branching = [num for num in drawn if num]
    assert len(branching) / 4000 == pytest.approx(0.3, abs=0.022)
    # The turn is one of 2 to 5, each in a quarter of them: 3 sqrt(0.25 x 0.75 / 1,200) = 0.0375.
    for num in (1, 2, 3, 4):
        assert branching.count(num) / len(branching) == pytest.approx(0.25, abs=0.0375)
    assert set(branching) == {1, 2, 3, 4}
    # Known values: whoever changes the draw changes which groups branch in every run that is resumed.
    assert drawn[:16] == [1, 4, 0, 4, 2, 0, 0, 0, 0, 0, 0, 0, 1, 4, 0, 3]
    assert trunk_seed(7) == 2922277010428040588


def test_none_or_all_branch_up_to_the_last_turn() -> None:
    none, every = (Environment(name="calculator", max_steps=3, branch_share=share) for share in (0.0, 1.0))
    assert {num_trunk_actions(seed, none) for seed in range(100)} == {0}
    assert {num_trunk_actions(seed, every) for seed in range(100)} == {1, 2}


@pytest.mark.parametrize("text", ["go", "a much longer action"])
def test_the_turn_does_not_depend_on_how_the_trunk_went(text: str) -> None:
    def choose(request: GenerationRequest, history: str) -> str:
        return "end" if num_done(history) == 3 else text

    requests = group_of(2)
    for rollout in rollouts_of(requests, all_of(around(Choosing(choose)), requests)):
        # Turns count from 0: two actions of the trunk, then what each sampled.
        assert set(rollout.turn[rollout.loss_mask].tolist()) == {2, 3}


# -- what the rollouts of a group have in common -----------------------------------------------------------------------


def test_all_go_on_from_one_state_by_seeds_of_their_own() -> None:
    engine, environments, requests = Choosing(ends_at(4)), Inside(), group_of(2)
    made = around(engine, environments)
    found = by_name(all_of(made, requests))
    trunk = "<begin>go g/0", "<1 of seed 3>go g/0", "<2 of seed 3>"
    shared = [*encode(trunk[0]), END, *encode(trunk[1]), END, *encode(trunk[2])]
    for request in requests:
        name, generation = request.request_id, found[request.request_id]
        assert generation.token_ids.tolist()[: len(shared)] == shared
        assert decode(generation.token_ids.tolist()[len(shared) :]) == f"go {name}<3 of seed 3>end"
        assert generation.end_reason is EndReason.SUCCESS
        trajectory = trajectory_of(generation)
        assert (trajectory.num_trunk_tokens, trajectory.num_steps, trajectory.snapshot) == (len(shared), 4, b"p/3")
        # Its environment counted all four actions, those of the trunk included.
        assert trajectory.milestones == {"counted": 4.0}
        assert trajectory.num_calls == {"go": 3}
    # The trunk's two actions by a seed of the trunk, the decision by one of each rollout.
    first, second, *decisions = [request.seed for request in engine.requests][: 2 + len(requests)]
    assert first == trunk_seed(requests[0].seed)
    assert second == continued_seed(first, len(encode("<begin>go g/0<1 of seed 3>")) + 1)
    assert decisions == [continued_seed(request.seed, len(shared)) for request in requests]
    assert len({first, second, *decisions}) == 2 + len(requests)
    # The first keeps its environment; three others play the trunk's two actions again, with their first own one.
    assert [call.actions for call in environments.calls if len(call.actions) == 3] == [
        ("go g/0", "go g/0", f"go g/{i}") for i in range(4)
    ]
    assert len([call for call in environments.calls if not call.actions]) == 1
    assert made.status()["num_held"] == 0


def test_the_trunk_is_sampled_by_one_and_trained_by_none() -> None:
    requests = group_of(2)
    rollouts = rollouts_of(requests, all_of(around(Choosing(ends_at(4))), requests))
    num_prompt, num_observed = 1, len("<begin>") + 2 * len("<1 of seed 3>")
    num_played = 2 * len(encode("go g/0?"))  # the last stands for the end token
    start = num_prompt + num_observed + num_played
    for rollout in rollouts:
        assert not rollout.loss_mask[:start].any()
        # "go g/i" and "end", each with its end: 7 + 4 tokens.
        assert rollout.num_target_tokens == 7 + 4
        assert rollout.loss_mask[start : start + 7].all()
    first, *others = rollouts
    assert (first.num_sampled_tokens, [r.num_sampled_tokens for r in others]) == (num_played + 11, [11] * 3)
    # Of what it sampled the first has logprobs and versions, the others have nothing.
    played = first.is_sampled & ~first.loss_mask
    assert (first.behavior_logprobs[played] < 0).all()
    assert (first.version_step[played] == 0).all()
    for rollout in others:
        assert (rollout.behavior_logprobs[:start] == 0).all()
        assert (rollout.version_step[:start] == -1).all()
        assert (rollout.version_branch[:start] == -1).all()
    group = as_group(rollouts)
    assert group.num_trunk_tokens == num_played
    assert group.num_sampled_tokens == num_played + 4 * 11


def test_advantages_are_those_of_the_second_action_alone() -> None:
    says = {"g/0": "1", "g/1": "0", "g/2": "2", "g/3": "3"}

    def choose(request: GenerationRequest, history: str) -> str:
        return says[request.request_id] if "open" in history else "left"

    requests = group_of(1)
    environments = Inside(f"{WORLDS}.TwoSteps")
    rollouts = rollouts_of(requests, all_of(around(Choosing(choose), environments), requests))
    # Behind the left door each number is worth twice: 2, 0, 4 and 6, whose mean is 3.
    assert [rollout.reward.reward for rollout in rollouts] == [2.0, 0.0, 4.0, 6.0]
    recipe = Recipe.model_validate(PRESETS["dr_grpo"].recipe.model_dump())
    batch = batch_of(recipe, [small_ids(as_group(rollouts))])
    (micro,) = batch.minibatches[0].microbatches
    assert sorted(micro.advantages_B.tolist()) == [-3.0, -1.0, 1.0, 3.0]
    # A number and its end token each, and nothing of the door.
    assert batch.num_tokens == 4 * 2
    assert micro.mask_BT.sum(axis=1).tolist() == [2] * 4
    # Scores of single actions are those of what is compared: that of the door is of nobody's choice.
    assert [[step.score for step in rollout.reward.steps] for rollout in rollouts] == [[2.0], [0.0], [4.0], [6.0]]
    assert all(r.reward.steps[0].end == len(r.token_ids) - r.num_prompt_tokens for r in rollouts)


@pytest.mark.parametrize(("num_trunk", "expected", "error"), [(0, 3.6875, 0.12), (1, 0.625, 0.03)])
def test_what_came_before_the_decision_is_no_part_of_the_variance(
    num_trunk: int, expected: float, error: float
) -> None:
    # Left or right, then 3 or 4, each in half of all cases: 6 or 8 (mean 7, variance 1) behind the left door, 3 or 4
    # (mean 3.5, variance 1/4) behind the right one. E[Var(R | h)] = 0.625 and Var(E[R | h]) = 1.75^2 = 3.0625.
    def choose(request: GenerationRequest, history: str) -> str:
        return random.Random(request.seed).choice(("3", "4") if "open" in history else ("left", "right"))

    num_groups, size = 400, 4
    requests = [one for n in range(num_groups) for one in group_of(num_trunk, size, f"g{n}", seed=n)]
    made = around(Choosing(choose, num_slots=10_000), Inside(f"{WORLDS}.TwoSteps"))
    found = by_name(all_of(made, requests))
    scores = [trajectory_of(found[request.request_id]).scores[0] for request in requests]
    variances = np.var(np.reshape(scores, (num_groups, size)), axis=1, ddof=1)
    assert variances.mean() == pytest.approx(expected, abs=3 * error)
    # The error that the tolerance is made of.
    assert variances.std() / np.sqrt(num_groups) < 1.1 * error


def small_ids(group: RolloutGroup) -> RolloutGroup:
    """The same with ids of the small vocabulary of the learner's tests."""
    return replace(group, rollouts=tuple(replace(r, token_ids=r.token_ids % 7) for r in group.rollouts))


def test_limits_and_costs_count_the_trunk_for_all() -> None:
    # "go g/0" and its end are 7 tokens, twice in the trunk: of 20 tokens 6 are left to each, which cuts "go g/i".
    requests = group_of(2, max_new_tokens=20)
    engine = Choosing(ends_at(9))
    found = all_of(around(engine), requests)
    assert {generation.end_reason for generation in found} == {EndReason.LENGTH}
    assert [request.max_new_tokens for request in engine.requests[2:]] == [6] * 4
    assert {generation.num_action_tokens for generation in found} == {20}
    assert sorted(generation.num_sampled for generation in found) == [6, 6, 6, 20]


def test_the_trunk_may_be_of_older_weights() -> None:
    engine, requests = Choosing(ends_at(3)), group_of(1)
    made = around(engine)
    for request in requests:
        made.add(request)
    while len(engine.requests) < 1 + len(requests):
        made.step()
    made.apply_weights({}, PolicyVersion(0, 1), recompute_kv=False)
    found: list[Generation] = []
    while made.num_unfinished:
        found += made.step()
    first, *others = rollouts_of(requests, found)
    # The age of the first is bounded by the tokens of its trunk, as by any that it sampled.
    assert first.versions() == {PolicyVersion(0, 0), PolicyVersion(0, 1)}
    assert [rollout.versions() for rollout in others] == [{PolicyVersion(0, 1)}] * 3


def test_replicas_play_the_trunk_too() -> None:
    requests = group_of(1, size=2)
    environments = Inside(f"{WORLDS}.TwoSteps")

    def choose(request: GenerationRequest, history: str) -> str:
        return request.request_id[-1] if "open" in history else "left"

    found = by_name(all_of(around(Choosing(choose), environments, replicas=3), requests))
    assert [trajectory_of(found[f"g/{i}"]).scores for i in range(2)] == [(0.0,) * 3, (2.0,) * 3]
    replayed = [call.actions for call in environments.calls if call.open_loop]
    assert sorted(replayed) == [("left", "0")] * 2 + [("left", "1")] * 2


# -- a trunk that ends before its turn --------------------------------------------------------------------------------


def test_the_action_that_ended_the_trunk_is_sampled_anew_by_all() -> None:
    # The trunk would have 4 actions and ends by its third, which only the trunk's own chance makes an end.
    engine, environments, requests = Choosing(_trunk_ends_at(3)), Inside(), group_of(4)
    made = around(engine, environments)
    found = all_of(made, requests)
    shared = [*encode("<begin>go"), END, *encode("<1 of seed 3>go"), END, *encode("<2 of seed 3>")]
    for generation in found:
        assert generation.token_ids.tolist()[: len(shared)] == shared
        assert trajectory_of(generation).num_trunk_tokens == len(shared)
        assert decode(generation.token_ids.tolist()[len(shared) :]) == "go<3 of seed 3>end"
        # Nothing is left of the end that was dropped.
        assert (trajectory_of(generation).milestones, trajectory_of(generation).num_steps) == ({"counted": 4.0}, 4)
        assert trajectory_of(generation).scores == (1.0,)
    status = made.status()
    # "end" and its end token are sampled and in no record.
    assert (status["num_trunks_cut"], status["num_trunk_tokens_dropped"]) == (1, 4)
    assert sum(generation.num_sampled for generation in found) + 4 == engine.num_busy
    # Its environment is over: that of the first begins again, with the trunk's actions, under another name.
    assert environments.calls[0].trajectory in environments.forgotten
    names = {call.trajectory for call in environments.calls if call.trajectory.startswith("g/0")}
    assert len(names) == 2


def _trunk_ends_at(last: int) -> Choose:
    """The trunk ends by that action, every rollout by its fourth."""

    def choose(request: GenerationRequest, history: str) -> str:
        return "end" if num_done(history) + 1 == (last if is_of_trunk(request) else 4) else "go"

    return choose


def test_a_trunk_that_ends_by_its_first_action_leaves_a_plain_group() -> None:
    branching, plain = group_of(3), group_of(0)
    engine, other = Choosing(_trunk_ends_at(1)), Choosing(_trunk_ends_at(1))
    made = around(engine)
    found, expected = by_name(all_of(made, branching)), by_name(all_of(around(other), plain))
    # Bit for bit: the same seeds, ids, logprobs, scores.
    assert {r.seed for r in engine.requests} - {trunk_seed(branching[0].seed)} == {r.seed for r in other.requests}
    for name, generation in found.items():
        assert generation.token_ids.tolist() == expected[name].token_ids.tolist()
        assert generation.logprobs.tolist() == expected[name].logprobs.tolist()
    ours, theirs = rollouts_of(branching, found.values()), rollouts_of(plain, expected.values())
    for one, another in zip(ours, theirs, strict=True):
        assert one.loss_mask.tolist() == another.loss_mask.tolist()
        assert one.version_step.tolist() == another.version_step.tolist()
        assert one.reward == another.reward
    assert as_group(ours).num_trunk_tokens == 0
    assert made.status()["num_trunk_tokens_dropped"] == 4


def test_a_trunk_that_uses_up_its_tokens_is_cut_before_its_last_action() -> None:
    # Three tokens an action, of 7: the third of the trunk is cut at one token, and the decision is before it.
    requests = group_of(5, max_new_tokens=7)
    found = all_of(around(Acting(lambda history: "go")), requests)
    assert {trajectory_of(generation).num_trunk_tokens for generation in found} == {
        len("<begin>go?<1 of seed 3>go?<2 of seed 3>")
    }
    assert sorted(generation.num_sampled for generation in found) == [1, 1, 1, 7]


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_trunk_that_fails_leaves_the_others_a_plain_group() -> None:
    def choose(request: GenerationRequest, history: str) -> str:
        if request.request_id == "g/0" and num_done(history) == 1:
            return "raise"
        return "end" if num_done(history) == 1 else "go"

    requests = group_of(3)
    made = around(Choosing(choose))
    first, *others = rollouts_of(requests, all_of(made, requests))
    assert (first.end_reason, first.valid) == (EndReason.ENV_ERROR, False)
    assert [rollout.end_reason for rollout in others] == [EndReason.SUCCESS] * 3
    assert {int(rollout.turn[rollout.loss_mask].min()) for rollout in others} == {0}
    assert as_group([first, *others]).num_trunk_tokens == 0
    status = made.status()
    assert (status["num_trunks_failed"], status["num_held"], status["num_trunk_tokens_dropped"]) == (1, 0, 0)


def test_who_is_added_again_after_a_trunk_has_failed_plays_no_other_one() -> None:
    def choose(request: GenerationRequest, history: str) -> str:
        if request.request_id == "g/0" and num_done(history) == 1:
            return "raise"
        return "end" if num_done(history) == 1 else "go"

    requests = group_of(3)
    made = around(Choosing(choose))
    for request in requests:
        made.add(request)
    found: list[Generation] = []
    while not found:
        found += made.step()
    assert [generation.request_id for generation in found] == ["g/0"]
    # As Updater.update does where a proof fails, right behind the failure.
    made.abort([request.request_id for request in requests[1:]])
    for request in requests[1:]:
        made.add(request)
    assert made.status()["num_held"] == 0
    while made.num_unfinished:
        found += made.step()
    first, *others = rollouts_of(requests, found)
    assert not first.valid
    assert {int(rollout.turn[rollout.loss_mask].min()) for rollout in others} == {0}
    assert as_group([first, *others]).num_trunk_tokens == 0
    assert made.status()["num_trunks_failed"] == 1


def test_an_environment_that_is_not_repeatable_ends_those_that_play_the_trunk_again() -> None:
    def choose(request: GenerationRequest, history: str) -> str:
        return "end" if len(request.prompt_ids) > 20 else "odd"

    requests = group_of(1)
    first, *others = rollouts_of(requests, all_of(around(Choosing(choose)), requests))
    assert first.end_reason is EndReason.SUCCESS
    assert [rollout.end_reason for rollout in others] == [EndReason.ENV_ERROR] * 3


def test_those_that_wait_for_a_trunk_end_as_it_does_at_the_deadline() -> None:
    requests = group_of(2)
    sampling = around(Acting(lambda history: "go" * 20))
    waiting = around(Acting(lambda history: "go"), Inside(holds=lambda call: bool(call.actions)))
    for made, end in ((sampling, EndReason.MODEL_TIMEOUT), (waiting, EndReason.ENV_ERROR)):
        for request in requests:
            made.add(request)
        for _ in range(6):
            made.step()
        assert made.status()["num_held"] == 3
        ended = by_name(made.abort([request.request_id for request in requests]))
        assert {generation.end_reason for generation in ended.values()} == {end}
        assert [len(ended[f"g/{i}"].token_ids) > 0 for i in range(4)] == [True, False, False, False]
        assert not any(rollout.valid for rollout in rollouts_of(requests, ended.values()))
        assert made.num_unfinished == 0
        assert made.step() == []
        assert (made.status()["num_held"], made.status()["num_trunks_failed"]) == (0, 0)


@pytest.mark.parametrize("first_is_done", [False, True])
def test_what_is_sampled_again_with_proved_weights_goes_on_from_the_same_trunk(first_is_done: bool) -> None:
    def choose(request: GenerationRequest, history: str) -> str:
        if not num_done(history):
            return f"go {trunk_seed(requests[0].seed) == request.seed}"
        return "end" if request.request_id == "g/0" else "go on and on" if num_done(history) == 1 else "end"

    requests = group_of(1)
    engine = Choosing(choose)
    made = around(engine)
    for request in requests:
        made.add(request)
    found: list[Generation] = []
    while not (found if first_is_done else len(engine.requests) > len(requests)):
        found += made.step()
    assert len(found) == first_is_done
    # As Updater.update does where a proof fails: no step in between.
    again = requests[1:] if first_is_done else requests
    made.abort([request.request_id for request in again])
    for request in again:
        made.add(request)
    assert made.status()["num_held"] == 0
    while made.num_unfinished:
        found += made.step()
    first, *others = rollouts_of(requests, found)
    start = int(np.argmax(first.loss_mask))
    assert [r.token_ids[:start].tolist() for r in others] == [first.token_ids[:start].tolist()] * 3
    assert decode(first.token_ids.tolist()[1:start]) == "<begin>go True<1 of seed 3>"
    # Its tokens are in one record, and were sampled once.
    assert as_group([first, *others]).num_trunk_tokens == len("go True") + 1
    assert [r.num_sampled_tokens - r.num_target_tokens for r in others] == [0, 0, 0]


def test_a_trunk_that_is_aborted_to_be_sampled_again_is_played_anew() -> None:
    requests, engine = group_of(2), Choosing(ends_at(4))
    made = around(engine)
    for request in requests:
        made.add(request)
    for _ in range(5):
        made.step()
    made.abort([request.request_id for request in requests])
    found = all_of(made, requests)
    assert {generation.end_reason for generation in found} == {EndReason.SUCCESS}
    assert {trajectory_of(g).num_trunk_tokens for g in found} == {
        len("<begin>go g/0?<1 of seed 3>go g/0?<2 of seed 3>")
    }
    assert made.status()["num_trunks_failed"] == 0


def test_who_waits_for_a_trunk_holds_no_slot() -> None:
    engine = Acting(lambda history: "go", num_slots=2)
    made = around(engine, Inside(holds=lambda call: bool(call.actions)))
    for request in group_of(2):
        made.add(request)
    for _ in range(6):
        made.step()
    # One waits for its environment, three for the trunk: four that may wait, beside two slots.
    assert (made.num_unfinished, made.num_slots) == (4, 6)
    assert made.only_waits


def test_an_evaluation_never_branches() -> None:
    scoring = Scoring(parse({"model": {"path": "m"}}, "test").rewards)
    run = EvaluationRun(
        [Problem(problem_id="p", prompt="?", answer="", verifier="environment")],
        lambda problem: encode("?"),
        decode,
        scoring,
        num_samples=4,
        seed=0,
        max_new_tokens=60,
        has_environment=True,
    )
    requests = list(run.requests)
    assert len(requests) == 4
    assert {request.episode.num_trunk_actions for request in requests if request.episode} == {0}


def test_the_tallies_say_how_many_branched_where_and_what_it_took() -> None:
    tallies = Tallies()
    for num_trunk in (0, 1, 3):
        requests = group_of(num_trunk)
        tallies.add(as_group(rollouts_of(requests, all_of(around(Choosing(ends_at(5))), requests))))
    fields = tallies.as_fields()
    # Turns 2 and 4 of the two that branch.
    assert (fields["branching_share"], fields["decision_turn_mean"]) == (2 / 3, 3.0)
    # An action has 7 tokens, the last 4: of all 4 x (4 x 7 + 4), behind the first 4 x (3 x 7 + 4) + 7, behind the
    # third 4 x (7 + 4) + 21.
    assert fields["trunk_token_share"] == (7 + 21) / (128 + 107 + 65)
    # 4 x 7 + 4 of every trajectory, whoever sampled its first ones.
    assert fields["tokens_per_success"] == 32.0
    assert Tallies().as_fields()["decision_turn_mean"] is None


# -- whatever the policy does -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 5),
    num_trunk=st.integers(1, 4),
    seeds=st.integers(0, 2**32),
    max_new_tokens=st.integers(1, 30),
    num_slots=st.integers(1, 6),
)
def test_whatever_the_policy_does_a_group_is_comparable_and_its_account_closes(
    size: int, num_trunk: int, seeds: int, max_new_tokens: int, num_slots: int
) -> None:
    """An action is drawn by the seed of its request: one goes on, one of other length too, one ends, one fails."""

    def choose(request: GenerationRequest, history: str) -> str:
        return ("go", "go on", "end", "go", "raise", "go")[(request.seed ^ seeds) % 6]

    requests = group_of(num_trunk, size, max_new_tokens=max_new_tokens)
    engine = Choosing(choose, num_slots)
    made = around(engine, max_steps=5)
    found = by_name(all_of(made, requests))
    assert found.keys() == {request.request_id for request in requests}
    rollouts = rollouts_of(requests, found.values())
    status = made.status()
    # Every token that was sampled is in one record, or was dropped with the end of a trunk.
    num_sampled = sum(rollout.num_sampled_tokens for rollout in rollouts)
    assert num_sampled + status["num_trunk_tokens_dropped"] == engine.num_busy
    masked = [int((r.is_sampled & ~r.loss_mask).sum()) for r in rollouts]
    assert sum(count > 0 for count in masked) <= 1
    assert not any(masked[1:])
    for rollout in rollouts:
        assert (rollout.behavior_logprobs[~rollout.is_sampled] == 0).all()
        assert (rollout.version_step[~rollout.is_sampled] == -1).all()
    if status["num_trunks_failed"]:
        assert not rollouts[0].valid
        assert masked[0] == 0
    # Up to the decision all are of one history, and none is trained on it.
    together = rollouts[1:] if status["num_trunks_failed"] else rollouts
    (start,) = {int(np.argmax(rollout.loss_mask)) for rollout in together}
    assert len({tuple(rollout.token_ids[:start].tolist()) for rollout in together}) == 1
    assert all(rollout.num_target_tokens for rollout in together)
    # What each samples first comes from a seed that nobody else has.
    decisions = [r.seed for r in engine.requests if len(r.prompt_ids) == start and not is_of_trunk(r)]
    assert len(set(decisions)) == len(decisions) == len(together)
    # Nothing is left behind.
    made.step()
    assert (made.num_unfinished, status["num_held"], made._branches._groups) == (0, 0, {})


class Late(Inside):
    """Answers a call after as many polls as its name has it."""

    def __init__(self, delay: Callable[[Call], int]) -> None:
        super().__init__()
        self._delay, self._now, self._due = delay, 0, list[tuple[int, Call]]()

    def submit(self, call: Call) -> None:
        self._due.append((self._now + self._delay(call), call))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reply]]:
        self._now += 1
        due = [(at, call) for at, call in self._due if at < self._now]
        self._due = [pair for pair in self._due if pair not in due]
        return [(call.trajectory, self._answer(call)) for _, call in due]


def test_what_is_sampled_does_not_depend_on_how_slow_environments_are() -> None:
    def made_of(delay: Callable[[Call], int]) -> dict[str, list[int]]:
        requests = [*group_of(2, name="g"), *group_of(1, name="h"), *group_of(0, name="k")]
        made: TrajectoryEngine = around(Choosing(ends_at(4)), Late(delay))
        return {g.request_id: g.token_ids.tolist() for g in all_of(made, requests)}

    fast, slow = made_of(lambda call: 0), made_of(lambda call: 3 * len(call.trajectory) + 5 * len(call.actions))
    assert fast == slow
    assert len(fast) == 12
