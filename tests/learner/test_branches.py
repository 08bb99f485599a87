"""A version is never given out twice, whatever is restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_grpo.errors import CheckpointError
from stream_grpo.learner.branches import Branches
from stream_grpo.types import PolicyVersion


def test_every_restore_opens_a_branch_above_all_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "branches.json"
    assert Branches.load(path).open(PolicyVersion(0, 0)) == PolicyVersion(0, 0)
    assert Branches.load(path).open(PolicyVersion(0, 10)) == PolicyVersion(1, 10)
    branches = Branches.load(path)
    assert branches.open(PolicyVersion(0, 10)) == PolicyVersion(2, 10)
    assert branches.forks == Branches.load(path).forks == {1: PolicyVersion(0, 10), 2: PolicyVersion(0, 10)}


@pytest.mark.parametrize("text", ["", '{"num_bra', "[]", "{}", '{"num_branches": 1, "forks": 3}', "\x00\x00"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "branches.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"branches\.json: .*; put back a copy of the file, or write it anew"):
        Branches.load(path)
