"""Files are whole or not there."""

import json
import os
from pathlib import Path

import pytest

from stream_grpo.files import read_object, replace_with, sha256, sync, write_json, write_synced


def test_the_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    write_synced(tmp_path / "a", b"abc")
    # FIPS 180-2, appendix B.1.
    assert sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 2}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_crash_before_the_rename_leaves_the_earlier_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_with(tmp_path / "a", b"earlier")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        replace_with(tmp_path / "a", b"later")
    assert (tmp_path / "a").read_bytes() == b"earlier"


def test_what_is_synced_must_be_there(tmp_path: Path) -> None:
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "empty"), (b"{", "not JSON"), (b"\xff\xfe\xfa", "not JSON"), (b"[1]", "a JSON list where an object is")],
)
def test_what_is_no_object_is_refused_with_its_file(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.json: {reason}"):
        read_object(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"none\.json: cannot be read: No such file"):
        read_object(tmp_path / "none.json")
