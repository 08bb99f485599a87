"""A checkpoint says which adapter it holds, and fits no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_grpo.config_lora import Lora
from stream_grpo.errors import CheckpointError
from stream_grpo.learner.adapter_note import FILE, check_note, write_note


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint-0.7" / "engine"
    path.mkdir(parents=True)
    return path


def test_a_checkpoint_of_all_weights_has_no_note(folder: Path) -> None:
    write_note(folder, Lora())
    assert not (folder / FILE).exists()
    check_note(folder, Lora())
    # Without a rank nothing reads alpha.
    check_note(folder, Lora(alpha=1.0))
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-0.7: holds all weights .*, and an adapter of learner.lora.rank = 4, alpha = 32 of all",
    ):
        check_note(folder, Lora(rank=4))


@pytest.mark.parametrize("other", [Lora(), Lora(rank=8), Lora(rank=4, alpha=1.0), Lora(rank=4, target_modules=("k",))])
def test_a_checkpoint_of_an_adapter_fits_that_one_alone(folder: Path, other: Lora) -> None:
    write_note(folder, Lora(rank=4))
    check_note(folder, Lora(rank=4))
    with pytest.raises(CheckpointError, match=r"checkpoint-0.7: holds an adapter of learner.lora.rank = 4, alpha = 32"):
        check_note(folder, other)


def test_a_damaged_note_is_refused(folder: Path) -> None:
    (folder / FILE).write_text('{"rank": "x"}')
    with pytest.raises(CheckpointError, match="not what a checkpoint says"):
        check_note(folder, Lora(rank=4))
