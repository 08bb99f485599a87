"""The parts of scripts/check_peers that need no peer: our side, the slow oracle, its flags, and the verdicts."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from check_peers import difference, judge
from peers import causes, oracle, oracle_advantage, ours
from peers.batch import Batch, Result, draw
from peers.cell import Cause, Cell, locate
from peers.oracle import Flags

pytestmark = pytest.mark.slow

GEOMETRIC = {"weight": "geometric", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequences"}
GAMMA = {"weight": "gamma", "ratio_level": "sequence_sum", "gamma_positive": (2, 3), "gamma_negative": (3, 2)}
TRUNCATED = {"correction": "truncated", "correction_level": "token", "correction_high": 2.0}
MASKED = {"correction": "masked", "correction_level": "sequence_sum", "correction_low": 0.5, "correction_high": 2.0}
NONE: Flags = frozenset()


@pytest.mark.parametrize(
    "choices",
    [
        {"aggregation": "tokens"},
        {"aggregation": "sequences", "clip_high": 0.28, "dual_clip": 3.0},
        {"aggregation": "constant", "ratio_level": "sequence_mean"},
        {"weight": "cispo", "cap": 1.5, **TRUNCATED},
        {"weight": "soft", "soft_positive": 1.0, "soft_negative": 1.05},
        {"weight": "reinforce", **MASKED},
        GAMMA,
        {**GAMMA, "ratio_to": "behavior"},
        GEOMETRIC,
        {"mask_ratio": (0.8, 1.2), "mask_negative_kl": 0.05},
        {"mask_sequence": (0.95, 1.1), "mask_veto": (0.5, 2.0)},
        {"mask_sequence_k3": 0.03, "mask_tv": 0.1},
        {"mask_binary_kl": 0.05, "ratio_to": "behavior", "proximal": "behavior"},
    ],
)
def test_our_loss_is_that_of_the_slow_oracle(choices: dict[str, object]) -> None:
    recipe = ours.recipe(**choices)
    for kind in ("mixed", "trained", "beyond"):
        for batch in draw(kind, 12, seed=1):
            assert difference(ours.loss(recipe, batch), oracle.loss(recipe, batch)) < 1e-9


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std", "batch_reward_std"])
def test_our_advantage_is_that_of_the_slow_oracle(baseline: str, scale: str) -> None:
    choices = {"baseline": baseline, "scale": scale, "only_valid": scale != "batch_std"}
    for batch in draw("mixed", 40, seed=2):
        assert (
            difference(ours.advantage(batch, **choices), oracle_advantage.advantage(batch, **choices, flags=NONE))
            < 1e-9
        )


LOSS_FLAGS = {
    "counts_masked_rollouts": {"aggregation": "sequences"},
    "microbatch_denominator": {},
    "spreads_correction": TRUNCATED,
    "floors_small_weights": TRUNCATED,
    "truncates_inside_product": {**GAMMA, "ratio_to": "behavior"},
    "mask_collapses_product": {**GAMMA, "ratio_to": "behavior"},
    "padded_width": {"aggregation": "constant"},
    "cispo_floor": {"weight": "cispo", "cap": 5.0},
    "geometric_mean_correction": {**GEOMETRIC, **TRUNCATED},
    "ignores_aggregation": {"weight": "soft", "soft_positive": 1.0, "soft_negative": 1.05},
    "batch_normalized": TRUNCATED,
    "survivor_denominator": {"mask_ratio": (0.8, 1.25)},
    "inverted_band": {"mask_ratio": (0.5, 1.1)},
    "unbounded": {},
    "sequence_bound_10": {"ratio_level": "sequence_mean"},
}
ADVANTAGE_FLAGS = {
    "std_plus_1e_4": {"scale": "group_std"},
    "std_plus_1e_6": {"scale": "group_std"},
    "lone_rollout_keeps_reward": {},
    "token_whitening": {"scale": "batch_std"},
}


@pytest.mark.parametrize("flag", LOSS_FLAGS)
def test_a_flag_of_the_loss_changes_some_batch(flag: str) -> None:
    recipe = ours.recipe(**LOSS_FLAGS[flag])
    batches = draw("beyond" if flag in ("unbounded", "sequence_bound_10") else "mixed", 60, seed=3)
    assert any(difference(oracle.loss(recipe, b), oracle.loss(recipe, b, frozenset({flag}))) > 1e-6 for b in batches)


@pytest.mark.parametrize("flag", ADVANTAGE_FLAGS)
def test_a_flag_of_the_advantage_changes_some_batch(flag: str) -> None:
    choices = {"baseline": "group_mean", "only_valid": False} | ADVANTAGE_FLAGS[flag]

    def changes(batch: Batch) -> bool:
        plain = oracle_advantage.advantage(batch, **choices, flags=NONE)
        return difference(plain, oracle_advantage.advantage(batch, **choices, flags=frozenset({flag}))) > 1e-6

    assert any(changes(batch) for batch in draw("mixed", 60, seed=4))


def test_every_cause_has_a_flag_of_the_oracle() -> None:
    flags = {cause.flag for cause in vars(causes).values() if isinstance(cause, Cause)}
    # The step that is one of several per generation is a cell's own doing: its flag is read there.
    assert flags == LOSS_FLAGS.keys() | ADVANTAGE_FLAGS.keys() | {"generation_denominator"}


def test_draws_repeat_and_hold_what_their_kind_says() -> None:
    mixed, again = draw("mixed", 20, seed=5), draw("mixed", 20, seed=5)
    assert all(torch.equal(a.policy_BT, b.policy_BT) for a, b in zip(mixed, again, strict=True))
    trained = [bool(batch.mask_BT.any(dim=1).all()) for batch in mixed]
    assert trained == [i % 2 == 0 for i in range(20)]
    assert all(batch.mask_BT.any() for batch in mixed)
    beyond = [
        (batch.policy_BT - batch.proximal_BT)[batch.mask_BT].abs().max() > 20 for batch in draw("beyond", 20, seed=5)
    ]
    assert sum(beyond) >= 15


def _cell(peer: Result, mine: Result, told: dict[Flags, Result], cause: Cause | None = None) -> Cell:
    return Cell(
        peer="peer",
        loss="loss",
        options="",
        cause=cause,
        run_peer=lambda _: peer,
        run_ours=lambda _: mine,
        run_oracle=lambda _, flags: told[flags],
    )


# A line of this very project stands in for a peer's.
CAUSE = Cause(
    flag="flag",
    file="stream_grpo/algo/shapes.py",
    anchor="def require_rank(",
    line="if tensor.ndim != rank:",
    what="",
    right="",
)
ONE, TWO = Result(1.0, torch.ones(1, 1)), Result(1.0, torch.full((1, 1), 2.0))
BATCHES = draw("trained", 1, seed=0)
FLAGGED = frozenset({"flag"})


def test_verdicts() -> None:
    assert judge(_cell(ONE, ONE, {NONE: ONE}), BATCHES).word == "equal"
    assert judge(_cell(TWO, ONE, {NONE: ONE}), BATCHES).word == "unexplained"
    explained = judge(_cell(TWO, ONE, {NONE: ONE, FLAGGED: TWO}, CAUSE), BATCHES)
    # |2 - 1| of the largest, 2.
    assert (explained.word, explained.num_differing, explained.largest) == ("explained", 1, 0.5)
    assert explained.note == locate(CAUSE)
    # The flag must make the oracle the peer, and without it the oracle must be ours.
    assert judge(_cell(TWO, ONE, {NONE: ONE, FLAGGED: ONE}, CAUSE), BATCHES).word == "unexplained"
    assert judge(_cell(TWO, ONE, {NONE: TWO, FLAGGED: TWO}, CAUSE), BATCHES).word == "unexplained"


def test_a_peer_that_gives_nan_is_not_equal() -> None:
    nothing = Result(1.0, torch.full((1, 1), torch.nan))
    assert judge(_cell(nothing, ONE, {NONE: ONE}), BATCHES).word == "unexplained"


def test_a_cause_whose_line_is_gone_explains_nothing() -> None:
    gone = Cause(flag="flag", file=CAUSE.file, anchor=CAUSE.anchor, line="no such line", what="", right="")
    verdict = judge(_cell(TWO, ONE, {NONE: ONE, FLAGGED: TWO}, gone), BATCHES)
    assert verdict.word == "unexplained"
    assert "no line 'no such line'" in verdict.note
