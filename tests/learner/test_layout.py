"""A checkpoint that is cut for other ranks is refused with what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_grpo.errors import CheckpointError
from stream_grpo.learner.layout import FILE, Layout, check_layout, write_layout


def test_a_checkpoint_of_the_same_layout_is_taken(tmp_path: Path) -> None:
    write_layout(tmp_path, Layout(2, 3))
    check_layout(tmp_path, Layout(2, 3))


@pytest.mark.parametrize("wanted", [Layout(1, 3), Layout(2, 1)])
def test_another_number_of_ranks_or_another_stage_is_refused(tmp_path: Path, wanted: Layout) -> None:
    folder = tmp_path / "checkpoint-0.7" / "engine"
    folder.mkdir(parents=True)
    write_layout(folder, Layout(2, 3))
    with pytest.raises(
        CheckpointError,
        match=rf"checkpoint-0.7: .* learner.num_ranks = 2 with learner.zero_stage = 3, and fit no other; "
        rf"num_ranks = {wanted.num_ranks} and zero_stage = {wanted.zero_stage} are set",
    ):
        check_layout(folder, wanted)


def test_a_damaged_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(CheckpointError, match=FILE):
        check_layout(tmp_path, Layout(1, 1))
