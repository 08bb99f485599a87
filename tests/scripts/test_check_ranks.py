"""`scripts/check_ranks` in short: ZeRO on two ranks is what one rank makes of the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_ranks
from stream_grpo.config import Config
from stream_grpo.learner.layout import Layout


@pytest.mark.engine
@pytest.mark.slow
def test_two_ranks_make_of_recorded_batches_what_one_makes(tmp_path: Path) -> None:
    config = check_ranks.small_config(tmp_path)
    assert check_ranks.record(tmp_path / "batches", check_ranks.drawn(4), 4) == 4
    for found in check_ranks.compare(tmp_path, config, [1, 3], 2).values():
        assert found.loss_gap <= check_ranks.MAX_LOSS_GAP
        assert found.weight_gap <= check_ranks.MAX_WEIGHT_GAP
        assert found.is_resumed_exactly


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four batches."""
    root = tmp_path_factory.mktemp("relay")
    check_ranks.record(root / "batches", check_ranks.drawn(4), 4)
    return root


@pytest.fixture(scope="module")
def config(root: Path) -> Config:
    return check_ranks.small_config(root)


@pytest.fixture(scope="module")
def one(root: Path, config: Config) -> check_ranks.Trained:
    """What one rank makes of all of them."""
    return check_ranks.trained(root, config, Layout(1, 1))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        # To fewer ranks and to more, with both forms of a checkpoint; the ways there and back are for the night.
        [Layout(2, 2), Layout(1, 1)],
        [Layout(1, 3), Layout(2, 3)],
        pytest.param([Layout(1, 1), Layout(2, 1), Layout(1, 1)], marks=pytest.mark.nightly),
        pytest.param([Layout(2, 2), Layout(1, 1), Layout(2, 2)], marks=pytest.mark.nightly),
        pytest.param([Layout(2, 3), Layout(1, 3), Layout(2, 3)], marks=pytest.mark.nightly),
        pytest.param([Layout(1, 0), Layout(2, 0), Layout(1, 0)], marks=pytest.mark.nightly),
    ],
)
def test_a_run_goes_on_on_other_ranks_as_if_it_had_not_ended(
    root: Path, config: Config, one: check_ranks.Trained, layouts: list[Layout]
) -> None:
    found = check_ranks.compared(one, check_ranks.relayed(root, config, layouts))
    assert found.loss_gap <= check_ranks.MAX_LOSS_GAP
    assert found.weight_gap <= check_ranks.MAX_WEIGHT_GAP


def test_what_is_recorded_is_read_back_step_by_step(tmp_path: Path) -> None:
    groups = [group for step in check_ranks.drawn(2) for group in step]
    check_ranks.record(tmp_path, check_ranks.drawn(2), 2)
    assert [path.parent.name for path in sorted(tmp_path.rglob("*")) if path.is_file()] == ["0000"] * 4 + ["0001"] * 4
    assert len({group.group_id for group in groups}) == 8
