"""The reference policy: where it starts, how it follows, and that it survives a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_grpo.errors import CheckpointError
from stream_grpo.learner.forward import Distribution, Targets
from stream_grpo.learner.head import with_fp32_head
from stream_grpo.learner.reference import FILE, Reference

IDS = torch.tensor([[1, 0, 2]])
DISTRIBUTION = Distribution(temperature=0.5)


class Table(torch.nn.Module):
    """Logits of the next token by the token, with the interface of a Hugging Face model."""

    def __init__(self, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.diag(torch.full((3,), fill, dtype=dtype)))

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


def weights(reference: Reference) -> list[float]:
    """The diagonal, seen through the logprobs: log p(i | i) of a row (x, 0, 0) at T = 0.5 is 2x - log(e^2x + 2)."""
    ids = torch.tensor([[0, 0], [1, 1], [2, 2]])
    p = reference.logprobs(DISTRIBUTION, Targets(ids, 2))[:, 1].exp()
    diagonal: list[float] = ((2 * p / (1 - p)).log() / 2).tolist()
    return diagonal


def moved(model: Table, fill: float) -> Table:
    with torch.no_grad():
        model.table.copy_(torch.diag(torch.full((3,), fill)))
    return model


def test_it_starts_as_the_policy_under_the_samplers_distribution() -> None:
    model = Table(1.0)
    got = Reference(model, "fixed").logprobs(DISTRIBUTION, Targets(IDS, 2))
    expected = DISTRIBUTION.logprobs(model.table[IDS][:, -2:], IDS[:, -2:])
    assert torch.equal(got, expected.detach())
    assert not got.requires_grad


def test_a_fixed_one_stays() -> None:
    model = Table(1.0)
    reference = Reference(model, "fixed")
    for step in (1, 2, 3):
        reference.follow(moved(model, 2.0), step)
    assert weights(reference) == pytest.approx([1.0] * 3, abs=1e-5)
    assert model.table.requires_grad


def test_a_refreshed_one_is_copied_every_so_many_steps() -> None:
    model = Table(1.0)
    reference = Reference(model, "refreshed", refresh_interval=2)
    seen = []
    for step in (1, 2, 3, 4):
        reference.follow(moved(model, 1 + step / 4), step)
        seen.append(weights(reference)[0])
    assert seen == pytest.approx([1, 1.5, 1.5, 2], abs=1e-4)


def test_a_moving_average_is_kept_in_float32() -> None:
    # 0.75 x 1 + 0.25 x 2 = 1.25, then 0.75 x 1.25 + 0.25 x 2 = 1.4375.
    model = Table(1.0, torch.bfloat16)
    reference = Reference(model, "ema", ema_decay=0.75)
    reference.follow(moved(model, 2.0), 1)
    assert weights(reference) == pytest.approx([1.25] * 3, abs=1e-5)
    reference.follow(model, 2)
    assert weights(reference) == pytest.approx([1.4375] * 3, abs=1e-5)
    # A step of 1/1000 is below what bfloat16 can tell.
    slow = Reference(Table(1.0, torch.bfloat16), "ema", ema_decay=0.999)
    slow.follow(model, 1)
    assert weights(slow) == pytest.approx([1.001] * 3, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"), [("fixed", {}), ("refreshed", {"refresh_interval": 1}), ("ema", {"ema_decay": 0.5})]
)
def test_what_follows_survives_a_checkpoint(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    model = Table(1.0)
    reference = Reference(model, kind, **settings)
    reference.follow(moved(model, 2.0), 1)
    reference.save(tmp_path)
    # A fixed one is the start weights, which are there anyway.
    assert (tmp_path / FILE).exists() == (kind != "fixed")
    again = Reference(Table(1.0), kind, **settings)
    again.load(tmp_path)
    assert weights(again) == pytest.approx(weights(reference), abs=1e-6)
    for each in (reference, again):
        each.follow(moved(model, 3.0), 2)
    assert weights(again) == pytest.approx(weights(reference), abs=1e-6)


def test_a_copy_of_a_model_with_an_fp32_head_has_a_head_of_its_own() -> None:
    class WithHead(Table):
        """Its logits come out of a linear head."""

        def __init__(self) -> None:
            super().__init__(1.0, torch.bfloat16)
            self.head = torch.nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
            torch.nn.init.eye_(self.head.weight)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

        def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int) -> Any:
            return SimpleNamespace(logits=self.head(self.table[input_ids])[:, -logits_to_keep:])

    model = WithHead()
    with_fp32_head(model)
    reference = Reference(model, "fixed")
    before = reference.logprobs(DISTRIBUTION, Targets(IDS, 2))
    with torch.no_grad():
        model.head.weight.mul_(5)
    assert before.dtype == torch.float32
    assert torch.equal(reference.logprobs(DISTRIBUTION, Targets(IDS, 2)), before)


def test_a_checkpoint_without_reference_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="kl_reference = ema can only be set when a run begins"):
        Reference(Table(1.0), "ema", ema_decay=0.9).load(tmp_path)
