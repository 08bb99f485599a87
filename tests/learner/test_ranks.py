"""Ranks as real processes over gloo: one loss however many there are, and nobody is lost in silence."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.errors import RankError
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import Sampled, make_train_batch
from stream_grpo.learner.crew import Crew
from stream_grpo.learner.meeting import interface_of
from stream_grpo.learner.ranks import ALONE, Ranks
from stream_grpo.learner.shares import shares
from stream_grpo.learner.train_step import TrainStep
from tests.learner.conftest import make_random_groups
from tests.learner.table_model import TableModel
from tests.learner.world import run_world

VOCAB = 12
pytestmark = pytest.mark.slow
RECIPES = {
    f"{preset}, {aggregation}": (preset, {"aggregation": aggregation})
    for preset in ("grpo", "decoupled", "m2po", "vespo", "vcpo", "scalerl")
    for aggregation in ("tokens", "sequences", "problems", "constant")
} | {
    "kl in the reward": (
        "rloo",
        {
            "kl": "k1",
            "kl_place": "reward",
            "kl_weight": 0.1,
            "kl_reference": "fixed",
            "regularize_without_signal": True,
        },
    ),
}
Result = tuple[dict[str, Any], list[Tensor]]


class RankedTable(TableModel):
    """A table model of one rank: gradients are summed over all of them before each update."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(VOCAB)
        self._ranks = ranks

    def update(self, learning_rate: float) -> float:
        assert self.weights.grad is not None
        self.weights.grad = self._ranks.summed(self.weights.grad)
        return super().update(learning_rate)


def losses_of(ranks: Ranks, rank: int) -> dict[str, Result]:
    """Two learner steps of every recipe: metrics of the second, and all gradients."""
    return {name: _trained(ranks, rank, preset, changes) for name, (preset, changes) in RECIPES.items()}


def _trained(ranks: Ranks, rank: int, preset: str, changes: dict[str, Any]) -> Result:
    recipe = Recipe.model_validate(PRESETS[preset].recipe.model_dump() | changes)
    model = RankedTable(ranks)
    learner = Learner(learning_rate=0.1, num_minibatches=2, num_epochs=2)
    step = TrainStep(model, recipe, learner, max_new_tokens=9, ranks=ranks)
    metrics: dict[str, Any] = {}
    for seed in (1, 2):
        groups = step.rewarded(
            make_random_groups(4, 5, VOCAB, seed), vocab_size=VOCAB, microbatch_tokens=40,
            share_of=lambda batch: shares(batch, ranks.num_ranks)[rank],
        )  # fmt: skip
        batch = make_train_batch(
            groups, AdvantageMaker(recipe), vocab_size=VOCAB, microbatch_tokens=40, num_minibatches=2,
            num_ranks=ranks.num_ranks, sampled_by=lambda version: Sampled(1),
        )  # fmt: skip
        metrics = step.run(shares(batch, ranks.num_ranks)[rank])
    return metrics, model.gradients


def losses_in_world(crew: Crew) -> dict[str, Result]:
    return losses_of(crew, crew.rank)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_loss_gradient_and_metrics_do_not_depend_on_the_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    expected = losses_of(ALONE, 0)
    found = run_world(num_ranks, losses_in_world, tmp_path)
    for results in found:
        for name, (metrics, gradients) in expected.items():
            got, got_gradients = results[name]
            assert got["loss"] == pytest.approx(metrics["loss"], rel=1e-12, abs=1e-15), name
            for mine, one in zip(got_gradients, gradients, strict=True):
                assert torch.allclose(mine, one, rtol=1e-12, atol=1e-12 * float(one.abs().max())), name
            assert got.keys() == metrics.keys()
            for key in metrics.keys() - {"seconds", "by_age", "by_length"}:
                assert got[key] == pytest.approx(metrics[key], rel=1e-10, abs=1e-12), (name, key)
    # What ranks decide by is the same on all of them, to the last bit.
    for name in expected:
        assert len({(r[name][0]["loss"], r[name][0]["learning_rate"], r[name][0]["k3"]) for r in found}) == 1


def numbers_of_all(crew: Crew) -> tuple[list[float], list[float], list[float], list[str]]:
    heard: list[str] = []
    if crew.rank == 0:
        with crew.call("first"):
            crew.order("first", step=3)
            crew.hand_out([b"for one", b"for two"])
        crew.dismiss()
    else:
        command = crew.hear()
        with crew.call(command.name):
            heard = [command.name, str(command.fields), crew.take().decode()]
        heard.append(crew.hear().name)
        crew.meet()
    joined = crew.joined(torch.arange(crew.rank, dtype=torch.float64))
    return (
        crew.summed(torch.tensor([1.0, crew.rank])).tolist(),
        crew.largest(torch.tensor([-1.0, crew.rank])).tolist(),
        joined.tolist(),
        heard,
    )


@pytest.fixture(params=["file", "port"])
def address(request: pytest.FixtureRequest) -> str | None:
    """Where ranks meet: at a file, or as on several nodes at a port of rank 0."""
    if request.param == "file":
        return None
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_every_rank_has_the_same_numbers_and_hears_what_is_for_it(tmp_path: Path, address: str | None) -> None:
    # 0 + 1 + 2 = 3; rank r gives r values: none, 0, and 0, 1.
    numbers = ([3.0, 3.0], [-1.0, 2.0], [0.0, 0.0, 1.0])
    assert run_world(3, numbers_of_all, tmp_path, address=address) == [
        (*numbers, []),
        (*numbers, ["first", "{'step': 3}", "for one", "dismiss"]),
        (*numbers, ["first", "{'step': 3}", "for two", "dismiss"]),
    ]


def last_rank_goes(crew: Crew, how: str) -> None:
    with crew.call("train"):
        if crew.rank == crew.num_ranks - 1:
            if how == "error":
                raise ValueError("a bad group")
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        crew.meet()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("error", "rank 1 failed with ValueError: a bad group"),
        ("killed", "rank 1 died, or did not answer within 5 s"),
        ("stopped", "rank 1 died, or did not answer within 5 s"),
    ],
)
def test_whoever_goes_is_named_by_the_others(how: str, reason: str, tmp_path: Path, address: str | None) -> None:
    other, last = run_world(2, partial(last_rank_goes, how=how), tmp_path, timeout_s=5.0, address=address)
    assert isinstance(other, RankError)
    assert str(other) == f"rank 0 of 2 in 'train': {reason}"
    assert str(last) == ("a bad group" if how == "error" else "None")


def first_rank_goes(crew: Crew) -> None:
    with crew.call("train"):
        if crew.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        crew.meet()


def test_the_first_rank_is_named_also_where_the_store_goes_with_it(tmp_path: Path, address: str | None) -> None:
    _, *others = run_world(3, first_rank_goes, tmp_path, timeout_s=5.0, address=address)
    for rank, error in enumerate(others, start=1):
        assert str(error) == f"rank {rank} of 3 in 'train': rank 0 died, or did not answer within 5 s"


def test_ranks_that_meet_at_a_port_speak_by_the_interface_of_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"192\.0\.2\.1: no network interface of this machine"):
        interface_of("192.0.2.1")  # an address kept for documents
