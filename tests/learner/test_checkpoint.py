"""Checkpoints are complete or invisible, and a damaged one is passed over, named and kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stream_grpo.errors import CheckpointError
from stream_grpo.learner.checkpoint import (
    newest_complete,
    newest_version,
    oldest_kept,
    prune,
    verify,
    write_checkpoint,
    write_converted,
)
from stream_grpo.types import PolicyVersion


def write_weights(folder: Path) -> None:
    (folder / "engine").mkdir()
    (folder / "engine" / "weights.pt").write_bytes(b"w" * 1000)
    (folder / "latest").write_text("engine")


def checkpoint(root: Path, step: int, branch: int = 0) -> Path:
    return write_checkpoint(root, PolicyVersion(branch, step), write_weights)


def test_a_written_checkpoint_is_found(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 10)
    assert newest_complete(tmp_path / "checkpoints") == (path, [])
    found = verify(path)
    assert found.version == PolicyVersion(0, 10)
    assert sorted(found.files) == ["engine/weights.pt", "latest"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-0.10", "index.json"]


def test_newest_is_by_number_and_branch_comes_first(tmp_path: Path) -> None:
    for branch, step in ((0, 9), (0, 10), (1, 2)):
        checkpoint(tmp_path, step, branch)
    path, _ = newest_complete(tmp_path)
    assert path is not None
    assert path.name == "checkpoint-1.2"
    assert [p.name for p in prune(tmp_path, 1)] == ["checkpoint-0.10", "checkpoint-0.9"]


def test_nothing_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) == (None, [])
    assert newest_complete(tmp_path / "missing") == (None, [])


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "extra", "manifest", "no manifest", "renamed"])
def test_a_damaged_newest_is_passed_over_named_and_kept(tmp_path: Path, damage: str) -> None:
    """Report C35: checkpoint 10 is taken, with a warning that names 20, which is set aside and not deleted."""
    sound, broken = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    weights, manifest = broken / "engine" / "weights.pt", broken / "manifest.json"
    if damage == "truncated":
        weights.write_bytes(b"w" * 500)
    elif damage == "flipped":
        weights.write_bytes(b"w" * 999 + b"x")
    elif damage == "missing":
        weights.unlink()
    elif damage == "extra":
        (broken / "engine" / "more.pt").write_bytes(b"pickle")
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:50])
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 21}))
    path, warnings = newest_complete(tmp_path)
    assert path == sound
    assert len(warnings) == 1
    assert "checkpoint-0.20" in warnings[0]
    assert not broken.exists()
    assert (tmp_path / "damaged-checkpoint-0.20" / "engine").exists()
    # What was passed over neither counts as kept nor is in the way of what comes.
    assert [p.name for p in prune(tmp_path, 1)] == []
    assert oldest_kept(tmp_path) == PolicyVersion(0, 10)


def test_a_writer_that_dies_leaves_the_older_one_and_is_named(tmp_path: Path) -> None:
    """Report C35: writing is atomic, and may be done again."""
    sound = checkpoint(tmp_path, 10)

    def die(folder: Path) -> None:
        write_weights(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, PolicyVersion(0, 20), die)
    path, warnings = newest_complete(tmp_path)
    assert path == sound
    assert len(warnings) == 1
    assert "checkpoint-0.20" in warnings[0]
    assert "interrupted" in warnings[0]
    checkpoint(tmp_path, 20)
    path, warnings = newest_complete(tmp_path)
    assert path is not None
    assert path.name == "checkpoint-0.20"
    assert warnings == []


def test_a_version_is_written_once(tmp_path: Path) -> None:
    checkpoint(tmp_path, 20)
    with pytest.raises(CheckpointError, match="a checkpoint of this version already"):
        checkpoint(tmp_path, 20)


def test_what_another_run_wrote_is_never_loaded(tmp_path: Path) -> None:
    sound, foreign = checkpoint(tmp_path / "ours", 10), checkpoint(tmp_path / "theirs", 20)
    shutil.copytree(foreign, tmp_path / "ours" / foreign.name)
    path, warnings = newest_complete(tmp_path / "ours")
    assert path == sound
    assert warnings == [
        "checkpoint-0.20: its manifest is not one that this run wrote; not used, kept as damaged-checkpoint-0.20"
    ]


def test_prune_keeps_the_newest_complete_and_every_damaged_one(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-0.40" / "latest").unlink()
    assert [p.name for p in prune(tmp_path, 2)] == ["checkpoint-0.10"]
    assert sorted(p.name for p in tmp_path.glob("check*")) == ["checkpoint-0.20", "checkpoint-0.30", "checkpoint-0.40"]
    with pytest.raises(ValueError, match="expected 1 or more"):
        prune(tmp_path, 0)


def test_what_kills_leave_half_written_does_not_fill_the_disk(tmp_path: Path) -> None:
    for name in (".checkpoint-0.10.partial", ".checkpoint-1.10.partial", ".checkpoint-0.5.removed"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name)
    checkpoint(tmp_path, 20)
    assert prune(tmp_path, 1) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-0.20", "index.json"]


@pytest.mark.parametrize("text", ["", '{"checkpoint-0.10": "', "[]"])
def test_a_damaged_index_is_named_and_no_checkpoint_is_set_aside_for_it(tmp_path: Path, text: str) -> None:
    path = checkpoint(tmp_path, 10)
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: .*put back a copy of the file"):
        newest_complete(tmp_path)
    assert path.exists()


def test_the_newest_version_is_known_by_name(tmp_path: Path) -> None:
    assert newest_version(tmp_path) is None
    for branch, step in ((0, 20), (1, 10)):
        checkpoint(tmp_path, step, branch)
    assert newest_version(tmp_path) == PolicyVersion(1, 10)


def test_a_link_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 10)
    (path / "latest").unlink()
    (path / "latest").symlink_to(path / "engine" / "weights.pt")
    with pytest.raises(CheckpointError, match="latest is a link"):
        verify(path)


def test_what_is_converted_is_made_once_verified_and_gone_after_the_next_checkpoint(tmp_path: Path) -> None:
    made: list[Path] = []

    def convert(folder: Path) -> None:
        made.append(folder)
        write_weights(folder)

    path = checkpoint(tmp_path, 10)
    converted = write_converted(path, convert)
    assert converted.name == "converted-0.10"
    assert sorted(verify(converted).files) == ["engine/weights.pt", "latest"]
    assert write_converted(path, convert) == converted
    assert len(made) == 1
    # It is no checkpoint of its own.
    assert newest_complete(tmp_path) == (path, [])
    # Bytes that changed since are never loaded, but made anew.
    (converted / "engine" / "weights.pt").write_bytes(b"x" * 1000)
    assert (write_converted(path, convert) / "engine" / "weights.pt").read_bytes() == b"w" * 1000
    assert len(made) == 2
    checkpoint(tmp_path, 20)
    assert [folder.name for folder in prune(tmp_path, 2)] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-0.10", "checkpoint-0.20", "index.json"]
    assert json.loads((tmp_path / "index.json").read_text()).keys() == {"checkpoint-0.10", "checkpoint-0.20"}
