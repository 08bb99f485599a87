"""Trajectories: what an engine and an environment make of a request together."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from stream_grpo.environments.instance import Call, Instances, Reply
from stream_grpo.environments.loading import load
from stream_grpo.environments.noise import MeanSquares, mean_squares, noise_share, wrong_order_share
from stream_grpo.environments.outcome import judged, scored
from stream_grpo.environments.protocol import End, Start, Step
from stream_grpo.rewards.environment import check_environment
from stream_grpo.sampler.rollout import make_rollout
from stream_grpo.sampler.tallies import Tallies
from stream_grpo.sampler.underway import Underway
from stream_grpo.transport.codec import decode_group, encode_group
from stream_grpo.types import (
    Decision,
    EndReason,
    Generation,
    GenerationRequest,
    PolicyVersion,
    RewardResult,
    RolloutGroup,
)
from tests.sampler.acting import END, PROBLEM, WORLDS, Acting, Inside, all_of, around, decode, encode, request

FAIL = RewardResult(decision=Decision.FAIL, reward=0.0, verifier="v", verifier_version="1")


def twice(history: str) -> str:
    """Goes once, then ends."""
    return "end" if "1 of seed" in history else "go"


def only(generations: list[Generation]) -> Generation:
    (generation,) = generations
    return generation


def test_ids_are_those_sampled_and_observed_turn_after_turn() -> None:
    engine = Acting(twice)
    found = only(all_of(around(engine), [request()]))
    said = encode("<begin>"), (*encode("go"), END), encode("<1 of seed 3>"), (*encode("end"), END)
    assert found.token_ids.tolist() == [token for part in said for token in part]
    assert found.end_reason is EndReason.SUCCESS
    assert found.trajectory is not None
    lengths = [len(part) for part in said]
    assert found.trajectory.observed.tolist() == np.repeat([True, False, True, False], lengths).tolist()
    # An observation belongs to the action that it answers, that of the start to the first.
    assert found.trajectory.turn.tolist() == np.repeat([0, 0, 0, 1], lengths).tolist()
    # Logprobs are the engine's (-0.5, -1.5, ... of each request), and 0 of what nobody sampled.
    expected = [0.0] * lengths[0] + [-0.5, -1.5, -2.5] + [0.0] * lengths[2] + [-0.5, -1.5, -2.5, -3.5]
    assert found.logprobs.tolist() == expected
    assert found.num_sampled == 7
    # What the second action is sampled from is the history itself, with the tokens that are left.
    first, second = engine.requests
    history = [*first.prompt_ids, *(token for part in said[1:3] for token in part)]
    assert list(second.prompt_ids) == history
    assert (first.max_new_tokens, second.max_new_tokens) == (100, 97)
    assert first.seed != second.seed


def test_a_rollout_masks_what_was_observed_and_survives_the_wire() -> None:
    asked = request()
    found = only(all_of(around(Acting(twice)), [asked]))
    rollout = make_rollout(asked, found, FAIL)
    assert rollout.environment_snapshot == b"p/3"
    assert rollout.num_sampled_tokens == 7
    masked = ~rollout.loss_mask
    assert (rollout.behavior_logprobs[masked] == 0).all()
    assert (rollout.version_step[masked] == -1).all()
    assert (rollout.version_branch[masked] == -1).all()
    assert rollout.versions() == {PolicyVersion(0, 0)}
    group = RolloutGroup(
        group_id="g",
        owner_epoch=0,
        problem_id="p",
        domain="d",
        sampler_id="s",
        ticket_step=0,
        config_hash="c",
        dispatched_at_s=0.0,
        finished_at_s=1.0,
        rollouts=(rollout,),
    )
    back = decode_group(encode_group(group)).rollouts[0]
    assert (back.turn.tolist(), back.environment_snapshot) == (rollout.turn.tolist(), b"p/3")
    assert back.end_reason is EndReason.SUCCESS


def test_a_trajectory_may_span_versions_token_by_token() -> None:
    engine = Acting(twice)
    made = around(engine)
    made.add(request())
    while len(engine.requests) < 2:
        made.step()
    made.apply_weights({}, PolicyVersion(0, 1), recompute_kv=False)
    found: list[Generation] = []
    while not found:
        found = made.step()
    rollout = make_rollout(request(), only(found), FAIL)
    sampled = rollout.version_step[rollout.loss_mask].tolist()
    assert sampled == [0, 0, 0, 1, 1, 1, 1]
    # The second action was begun with new weights and an empty KV cache.
    assert rollout.mixed_context_from is None


def test_slots_are_counted_while_another_thread_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = around(Acting(twice, num_slots=2))
    late = iter([request("g/1")])

    class Interleaved(Underway):
        """While it is looked at, once, the thread of the engine adds a request."""

        @property
        def snapshot(self) -> bytes | None:
            for one in late:
                made.add(one)
            return None

        @snapshot.setter
        def snapshot(self, value: bytes | None) -> None: ...

    made.add(request("g/0"))
    only_one = next(iter(made._waiting.values()))
    only_one.__class__ = Interleaved
    assert made.num_slots == 2
    assert made.num_unfinished == 2


def test_who_waits_holds_no_slot() -> None:
    engine = Acting(twice, num_slots=2)
    made = around(engine, Inside(holds=lambda call: call.trajectory.startswith("g/0") and bool(call.actions)))
    found = []
    for name in ("g/0", "g/1", "g/2"):
        made.add(request(name))
    for _ in range(30):
        found += made.step()
    assert {generation.request_id for generation in found} == {"g/1", "g/2"}
    assert (engine.num_unfinished, made.num_unfinished, made.num_slots) == (0, 1, 3)
    assert made.only_waits
    assert around(engine, max_waiting=1).num_slots == 2


def test_steps_and_tokens_end_a_trajectory() -> None:
    found = only(all_of(around(Acting(lambda history: "go"), max_steps=3), [request()]))
    assert (found.end_reason, found.trajectory and found.trajectory.num_steps) == (EndReason.MAX_STEPS, 3)
    # "go" and its end are 3 tokens; the second action has 2 of 5 left, which cuts it.
    found = only(all_of(around(Acting(lambda history: "go")), [request(max_new_tokens=5)]))
    assert (found.end_reason, found.num_sampled) == (EndReason.LENGTH, 5)
    found = only(all_of(around(Acting(twice), max_turn_tokens=2), [request()]))
    assert found.num_sampled % 2 == 0


def test_an_error_of_the_environment_is_an_end_without_a_reward() -> None:
    found = only(all_of(around(Acting(lambda history: "raise")), [request()]))
    assert found.end_reason is EndReason.ENV_ERROR
    assert not make_rollout(request(), found, FAIL).valid
    assert found.trajectory is not None
    assert "broken on purpose" in found.trajectory.evidence


def test_an_environment_that_never_begins_leaves_nothing_sampled() -> None:
    found = only(all_of(around(Acting(twice), Inside(f"{WORLDS}.broken")), [request()]))
    assert (found.end_reason, len(found.token_ids), found.versions) == (EndReason.ENV_ERROR, 0, ())


def test_an_abort_tells_who_was_late() -> None:
    made = around(Acting(lambda history: "go" * 20), Inside(holds=lambda call: call.trajectory.startswith("g/1")))
    for name in ("g/0", "g/1"):
        made.add(request(name))
    for _ in range(5):
        made.step()
    ended = {generation.request_id: generation for generation in made.abort(["g/0", "g/1", "nobody"])}
    assert ended["g/0"].end_reason is EndReason.MODEL_TIMEOUT
    assert ended["g/0"].num_sampled == 4
    assert ended["g/1"].end_reason is EndReason.ENV_ERROR
    assert made.num_unfinished == 0
    made.add(request("g/0"))  # the id is free again
    made.step()
    (empty,) = made.abort(["g/0"])  # before its first token: what it observed is not left alone
    assert (empty.end_reason, len(empty.token_ids)) == (EndReason.MODEL_TIMEOUT, 0)


def test_rollouts_of_a_group_begin_in_one_state() -> None:
    class Odd(Inside):
        """Begins elsewhere with every call that names no start."""

        def _answer(self, call: Call) -> Reply:
            state = call.snapshot or f"state of {call.trajectory}".encode()
            return Reply(start=Start(snapshot=state)) if not call.actions else Reply(step=Step(end=End.SUCCESS))

    odd = Odd()
    made = around(Acting(twice), odd)
    found = all_of(made, [request("g/0"), request("g/1"), request("h/0")])
    starts = {generation.request_id: generation.trajectory.snapshot for generation in found if generation.trajectory}
    assert starts["g/0"] == starts["g/1"]
    assert starts["h/0"] is not None
    assert made.status()["num_other_starts"] == 1


def test_an_answer_becomes_a_success_or_a_failure_by_its_verifier() -> None:
    class Answers(Inside):
        def _answer(self, call: Call) -> Reply:
            return Reply(step=Step(end=End.ANSWERED)) if call.actions else Reply(start=Start(snapshot=b""))

    found = only(all_of(around(Acting(lambda history: "#51"), Answers()), [request()]))
    row, text = scored(PROBLEM, found, decode)
    assert text == "#51"
    assert row.extra["trajectory"]["num_steps"] == 1
    passed = RewardResult(decision=Decision.PASS, reward=1.0, verifier="v", verifier_version="1")
    assert judged(found, passed)[0].end_reason is EndReason.SUCCESS
    assert judged(found, FAIL)[0].end_reason is EndReason.POLICY_FAILURE


@pytest.mark.parametrize(
    ("part", "decision", "reward"),
    [
        ("outcome", Decision.PASS, 1.0),
        ("permitted", Decision.PASS, 1.0),
        ("completed", Decision.PASS, 1.0),
        ("errors", Decision.PASS, 0.0),
        ("milestone.counted", Decision.PASS, 2.0),
        ("milestone.other", Decision.FAIL, 0.0),
    ],
)
def test_every_part_of_a_trajectory_can_be_asked_for(part: str, decision: Decision, reward: float) -> None:
    found = only(all_of(around(Acting(twice)), [request()]))
    row, text = scored(PROBLEM, found, decode)
    row.extra["part"] = part  # type: ignore[index]
    result = check_environment(text, row, False)
    assert (result.decision, result.reward) == (decision, reward)


def test_other_requests_pass_through() -> None:
    engine = Acting(lambda history: "text")
    made = around(engine)
    plain = request("eval/0")
    found = only(all_of(made, [type(plain)(request_id="eval/0", prompt_ids=(1000,), seed=1, max_new_tokens=10)]))
    assert found.trajectory is None
    assert decode(found.token_ids.tolist()) == "text"


# -- chance ---------------------------------------------------------------------------------------------------------


def test_replicas_play_the_same_actions_by_other_chance_and_share_it_in_a_group() -> None:
    made = around(Acting(lambda history: "5"), Inside(f"{WORLDS}.Noisy"), replicas=3)
    found = all_of(made, [request("g/0"), request("g/1")])
    scores = [generation.trajectory.scores for generation in found if generation.trajectory]
    assert scores[0] == scores[1]
    assert len(set(scores[0])) == 3
    # 5 plus the first draw of each replica's seed, of which the first is the episode's.
    assert scores[0][0] == 5 + random.Random(3).gauss(0.0, 1.0)
    _, result = judged(found[0], FAIL)
    assert [result.components[f"environment.score.{n}"] for n in range(3)] == list(scores[0])


def test_the_mean_squares_are_those_of_a_slow_loop() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4, 3))
    found = mean_squares(scores)
    mean = sum(sum(row) for row in scores) / 12
    rollout = [sum(row) / 3 for row in scores]
    replica = [sum(scores[g][m] for g in range(4)) / 4 for m in range(3)]
    residual = sum((scores[g][m] - rollout[g] - replica[m] + mean) ** 2 for g in range(4) for m in range(3)) / (3 * 2)
    assert found.residual == pytest.approx(residual, rel=1e-12)
    assert found.rollouts == pytest.approx(3 * sum((r - mean) ** 2 for r in rollout) / 3, rel=1e-12)
    assert noise_share(MeanSquares(4.0, 1.0)) == 0.25
    assert noise_share(MeanSquares(0.0, 0.0)) == 0.0


def test_the_share_of_chance_is_found_where_the_variances_are_known() -> None:
    # Policy deviation 1, own chance of deviation 1 in each of 4 replicas, common chance of deviation 2, which moves
    # nothing: the share is (1/4) / (1 + 1/4) = 0.2. 2,000 groups of 8 leave an error of about 0.005.
    rng, total = np.random.default_rng(1), MeanSquares(0.0, 0.0)
    for _ in range(2000):
        scores = rng.normal(size=(8, 1)) + 2 * rng.normal(size=(1, 4)) + rng.normal(size=(8, 4))
        total = MeanSquares(*(a + b for a, b in zip(total, mean_squares(scores), strict=True)))
    assert noise_share(total) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("shares_seed", [False, True])
def test_common_random_numbers_order_pairs_as_the_formula_says(shares_seed: bool) -> None:
    # Two actions worth 5.0 and 5.5 under noise of deviation 1: wrong in Phi(-0.5 / sqrt 2) = 36.2% of the pairs where
    # each has its own seed, and in none where one seed decides all of it.
    num_pairs, num_wrong = 3000, 0
    environments = Instances(load(f"{WORLDS}.Noisy", {}))
    for pair in range(num_pairs):
        scores = []
        for which, worth in enumerate(("5.0", "5.5")):
            seed = 2 * pair + (0 if shares_seed else which)
            reply = environments.answer(
                Call(trajectory="t", problem=PROBLEM, seed=seed, actions=(worth,), open_loop=True)
            )
            assert reply.step is not None
            assert reply.step.score is not None
            scores.append(reply.step.score)
        num_wrong += scores[0] > scores[1]
    expected = wrong_order_share(0.5, noise_std=1.0, common=float(shares_seed))
    # Three standard errors of a share of 3,000 pairs.
    assert num_wrong / num_pairs == pytest.approx(expected, abs=3 * math.sqrt(0.25 / num_pairs))


def test_tallies_leave_errors_out_of_success() -> None:
    made = around(Acting(lambda history: "raise" if history.startswith("?<begin>") else "end"))
    asked = [request("g/0"), request("g/1")]
    bad = make_rollout(asked[0], only(all_of(made, asked[:1])), FAIL)
    good = make_rollout(*_judged(asked[1], only(all_of(around(Acting(twice)), asked[1:]))))
    tallies = Tallies()
    tallies.add(
        RolloutGroup(
            group_id="g",
            owner_epoch=0,
            problem_id="p",
            domain="d",
            sampler_id="s",
            ticket_step=0,
            config_hash="c",
            dispatched_at_s=0.0,
            finished_at_s=1.0,
            rollouts=(bad, good),
        )
    )
    fields = tallies.as_fields()
    assert (fields["success_share"], fields["consistent_share"], fields["env_error_share"]) == (1.0, 1.0, 0.5)
    assert fields["ends"] == {"env_error": 1, "success": 1}
    # "go" + end and "end" + end: 3 + 4 sampled tokens, one call of the tool "go".
    assert (fields["tokens_per_success"], fields["calls_per_success"]) == (7.0, 1.0)


def _judged(asked: GenerationRequest, generation: Generation) -> tuple[GenerationRequest, Generation, RewardResult]:
    result = RewardResult(decision=Decision.PASS, reward=1.0, verifier="v", verifier_version="1")
    return (asked, *judged(generation, result))


@pytest.mark.parametrize(("waiting_kv", "reads"), [("drop", False), ("keep", True)])
def test_every_action_keeps_to_the_grammar_and_later_ones_read_what_was_kept(waiting_kv: str, reads: bool) -> None:
    acting = Acting(lambda history: "go" if history.count("go") < 2 else "end")
    engine = around(acting, grammar="{}", waiting_kv=waiting_kv)
    only(all_of(engine, [request()]))
    assert [one.grammar for one in acting.requests] == ["{}"] * 3
    # The first action has the prompt of its group, which others may have computed.
    assert [one.reads_cache for one in acting.requests] == [True, reads, reads]
    assert acting.requests[0].episode is None


def test_tokens_of_histories_are_counted_from_the_second_action_on() -> None:
    class Caching(Acting):
        def _generation(self, name: str, reason: EndReason) -> Generation:
            num_prompt = len(self._running[name][0].prompt_ids)
            made = super()._generation(name, reason)
            return replace(made, num_prompt_tokens=num_prompt, num_cached_tokens=num_prompt // 2)

    acting = Caching(lambda history: "go" if history.count("go") < 2 else "end")
    engine = around(acting, waiting_kv="keep")
    only(all_of(engine, [request()]))
    lengths = [len(one.prompt_ids) for one in acting.requests]
    assert len(lengths) == 3
    status = engine.status()
    assert status["num_history_tokens"] == sum(lengths[1:])
    assert status["num_history_cached"] == sum(length // 2 for length in lengths[1:])


# -- scheduling -----------------------------------------------------------------------------------------------------


class LongTail(Inside):
    """Replies after as many polls as a log-normal latency has steps: median 4, one in a hundred above 60."""

    def __init__(self, seed: int, latency: bool) -> None:
        super().__init__()
        self._random, self._latency, self._now = random.Random(seed), latency, 0
        self._due: dict[int, list[Call]] = {}

    def submit(self, call: Call) -> None:
        steps = int(self._random.lognormvariate(math.log(4), 1.2)) if self._latency and call.actions else 0
        self._due.setdefault(self._now + steps, []).append(call)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reply]]:
        due = [call for at in sorted(at for at in self._due if at <= self._now) for call in self._due.pop(at)]
        self._now += 1
        return [(call.trajectory, self._answer(call)) for call in due]

    def _answer(self, call: Call) -> Reply:
        if not call.actions:
            return Reply(start=Start(snapshot=b"same"))
        return Reply(step=Step(end=End.SUCCESS) if len(call.actions) == 3 else Step(observation="."))


def _utilisation(latency: bool, num: int) -> float:
    """Tokens sampled over slots x steps, from the first to the last trajectory that is begun."""
    engine = Acting(lambda history: "abcde", num_slots=64)
    made = around(engine, LongTail(0, latency), max_waiting=4096)
    num_begun = num_steps = 0
    while num_begun < num:
        # As the sampler's loop does: as many as fit, and a few ahead.
        for _ in range(max(0, made.num_slots - made.num_unfinished) + 8):
            made.add(request(f"g{num_begun}/0"))
            num_begun += 1
        made.step()
        num_steps += 1
    return engine.num_busy / (engine.num_slots * num_steps)


def test_the_engine_is_as_busy_with_slow_tools_as_without() -> None:
    without, with_tools = _utilisation(False, 1000), _utilisation(True, 1000)
    assert with_tools > 0.9 * without


@pytest.mark.slow
def test_ten_thousand_trajectories_with_slow_tools_keep_the_engine_busy() -> None:
    assert _utilisation(True, 10_000) > 0.9 * _utilisation(False, 10_000)
