"""A checkpoint that is cut for other ranks is cut anew, or refused with what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_grpo.errors import CheckpointError
from stream_grpo.learner.critic import FOLDER
from stream_grpo.learner.layout import FILE, STATE, Layout, await_parts, needs_conversion, write_layout


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (Layout(2, 3), Layout(2, 3), False),
        (Layout(1, 1), Layout(2, 1), True),
        (Layout(2, 2), Layout(4, 1), True),
        (Layout(2, 1), Layout(2, 2), True),
        (Layout(2, 3), Layout(1, 3), True),
        # Stage 0 cuts nothing up: the files of the first rank are all there is.
        (Layout(2, 0), Layout(1, 0), False),
    ],
)
def test_other_ranks_need_a_conversion(tmp_path: Path, found: Layout, wanted: Layout, expected: bool) -> None:
    write_layout(tmp_path, found)
    assert needs_conversion(tmp_path, wanted) is expected


def test_files_without_a_layout_are_left_to_deepspeed(tmp_path: Path) -> None:
    assert not needs_conversion(tmp_path, Layout(2, 1))


@pytest.mark.parametrize(("found", "wanted"), [((2, 3), (2, 1)), ((1, 1), (1, 0)), ((2, 0), (1, 3)), ((1, 2), (1, 3))])
def test_another_kind_of_stage_is_refused(tmp_path: Path, found: tuple[int, int], wanted: tuple[int, int]) -> None:
    folder = tmp_path / "checkpoint-0.7" / "engine"
    folder.mkdir(parents=True)
    write_layout(folder, Layout(*found))
    with pytest.raises(
        CheckpointError,
        match=rf"checkpoint-0.7: .* learner.num_ranks = {found[0]} with learner.zero_stage = {found[1]}, and can be "
        rf"cut anew .* only from ZeRO 1 or 2 to 1 or 2, and from 3 to 3; num_ranks = {wanted[0]} and zero_stage = "
        rf"{wanted[1]} are set",
    ):
        needs_conversion(folder, Layout(*wanted))


def test_a_critic_is_not_cut_anew(tmp_path: Path) -> None:
    write_layout(tmp_path, Layout(1, 1))
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(CheckpointError, match="with a critic, whose files are not cut anew"):
        needs_conversion(tmp_path, Layout(1, 2))


def test_a_damaged_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(CheckpointError, match=FILE):
        needs_conversion(tmp_path, Layout(1, 1))


def test_a_part_that_a_shared_folder_does_not_show_is_missed(tmp_path: Path) -> None:
    (tmp_path / STATE).mkdir()
    write_layout(tmp_path, Layout(2, 2))
    (tmp_path / STATE / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"the parts of ranks \[1\] are not to be seen .* run.root has to be one"):
        await_parts(tmp_path, timeout_s=0)
    (tmp_path / STATE / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").touch()
    await_parts(tmp_path, timeout_s=0)
    # With stage 3 each rank has written weights too, with stage 0 the first alone.
    write_layout(tmp_path, Layout(2, 3))
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1\]"):
        await_parts(tmp_path, timeout_s=0)
    write_layout(tmp_path, Layout(2, 0))
    await_parts(tmp_path, timeout_s=0)
