"""Checkpoints: complete or invisible, found by their manifest, loaded only when every file has its hash.

A checkpoint is a folder `checkpoint-<branch>.<step>`. It is written beside its place under a hidden name, every file
is synced and hashed, and one rename makes it visible. `index.json` beside the checkpoints holds the hash of every
manifest that this run wrote. DeepSpeed's files are pickles: `verify` comes before any load, and refuses what another
run wrote. A folder `converted-<branch>.<step>` is a checkpoint made anew for other ranks, written in the same way; it
is gone after the next checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stream_grpo.errors import CheckpointError
from stream_grpo.failpoints import failpoint
from stream_grpo.files import read_object, sha256, sync, write_json, write_synced
from stream_grpo.types import PolicyVersion

MANIFEST = "manifest.json"
INDEX = "index.json"
SCHEMA = 1
_NAME = re.compile(r"checkpoint-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint as its manifest describes it."""

    path: Path
    version: PolicyVersion
    files: Mapping[str, tuple[int, str]]
    """Path within the folder -> (size in bytes, sha256)."""


def write_checkpoint(root: Path, version: PolicyVersion, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint of `version` under `root` and return its folder.

    `write` fills an empty folder. After a crash at any moment the checkpoint is complete or not visible. Raises
    CheckpointError if there is one of this version already.
    """
    place = root / f"checkpoint-{version}"
    if place.exists():
        raise CheckpointError(f"{place.name}: there is a checkpoint of this version already")
    root.mkdir(parents=True, exist_ok=True)
    return _write(place, version, write)


def write_converted(checkpoint: Path, write: Callable[[Path], None]) -> Path:
    """What `write` makes of a verified checkpoint, as a folder beside it; one that was made before is verified."""
    version = _version_of(checkpoint)
    place = checkpoint.with_name(f"converted-{version}")
    with suppress(CheckpointError):
        return verify(place).path
    shutil.rmtree(place, ignore_errors=True)
    return _write(place, version, write)


def _write(place: Path, version: PolicyVersion, write: Callable[[Path], None]) -> Path:
    root, hidden = place.parent, place.with_name(f".{place.name}.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    write(hidden)
    failpoint("checkpoint.writing")
    manifest = {
        "schema": SCHEMA,
        "branch": version.branch,
        "step": version.step,
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in _sync_and_hash(hidden).items()},
    }
    write_synced(hidden / MANIFEST, json.dumps(manifest, indent=1).encode())
    for folder in [*(path for path in hidden.rglob("*") if path.is_dir()), hidden]:
        sync(folder)
    # Before the rename: what is visible is always in the index.
    write_json(root / INDEX, read_index(root) | {place.name: sha256(hidden / MANIFEST)})
    failpoint("checkpoint.renaming")
    hidden.rename(place)
    sync(root)
    failpoint("checkpoint.renamed")
    return place


def newest_complete(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint under `root` whose files all have their hashes; a warning for every newer one passed over.

    Nothing is removed: a damaged checkpoint is set aside under another name, for whoever wants to look at it. Raises
    CheckpointError for a damaged index: the checkpoints may be sound, and none is set aside for it.
    """
    read_index(root)
    warnings = [
        f"{path.name}: writing was interrupted; not used, removed after the next checkpoint"
        for path in sorted(root.glob(".*.partial"))
    ]
    for path in _newest_first(root):
        try:
            verify(path)
        except CheckpointError as error:
            aside = path.with_name(f"damaged-{path.name}")
            path.rename(aside)
            warnings.append(f"{error}; not used, kept as {aside.name}")
        else:
            return path, warnings
    return None, warnings


def verify(path: Path) -> Checkpoint:
    """Read the manifest and compare every file with it. Raises CheckpointError naming the first file that differs.

    A file that the manifest does not know is refused too: it would be loaded without ever having been hashed.
    """
    checkpoint = _read(path)
    if read_index(path.parent).get(path.name) != sha256(path / MANIFEST):
        raise CheckpointError(f"{path.name}: its manifest is not one that this run wrote")
    for name, (_, digest) in checkpoint.files.items():
        if sha256(path / name) != digest:
            raise CheckpointError(f"{path.name}: {name} differs from its sha256 in the manifest")
    return checkpoint


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints, and return these; and what a kill left half written.

    What was converted for other ranks goes too: the newest is of the ranks that are here.

    Only for the writer, between two checkpoints: whatever is hidden then is nobody's. Complete means here: every file
    present with its size; hashes are left to `verify`, since they would cost a read of everything kept. Damaged
    checkpoints neither count nor go.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: expected 1 or more")
    removed = [path for path in _newest_first(root) if _is_complete(path)][keep:]
    for path in removed:
        # Hidden first: a removal cut short must not look like a damaged checkpoint.
        path.rename(path.with_name(f".{path.name}.removed"))
    for hidden in root.glob(".checkpoint-*"):
        shutil.rmtree(hidden)
    gone = {path.name for path in removed}
    for converted in [*root.glob(".converted-*"), *root.glob("converted-*")]:
        shutil.rmtree(converted)
        gone.add(converted.name)
    write_json(root / INDEX, {name: digest for name, digest in read_index(root).items() if name not in gone})
    return removed


def read_index(root: Path) -> dict[str, str]:
    """Folder name -> sha256 of its manifest, of every checkpoint that this run wrote. Raises CheckpointError."""
    path = root / INDEX
    try:
        return read_object(path) if path.exists() else {}
    except ValueError as error:
        raise CheckpointError(
            f"{error}: no checkpoint can be proved to be of this run; put back a copy of the file, or, if you trust "
            f"every checkpoint beside it, write it anew as {{folder: sha256 of its {MANIFEST}}}"
        ) from error


def newest_version(root: Path) -> PolicyVersion | None:
    """The version of the newest checkpoint by its name; what is in it is not looked at."""
    found = _newest_first(root)
    return _version_of(found[0]) if found else None


def oldest_kept(root: Path) -> PolicyVersion | None:
    """The version of the oldest complete checkpoint: whatever happens, no restore goes back beyond it."""
    complete = [path for path in _newest_first(root) if _is_complete(path)]
    return _read(complete[-1]).version if complete else None


def _read(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        checkpoint = Checkpoint(
            path=path,
            version=PolicyVersion(int(manifest["branch"]), int(manifest["step"])),
            files={name: (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()},
        )
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name}: no readable {MANIFEST}: {error}") from error
    if schema != SCHEMA:
        raise CheckpointError(f"{path.name}: manifest of schema {schema}; this program reads {SCHEMA}")
    if path.name not in (f"checkpoint-{checkpoint.version}", f"converted-{checkpoint.version}"):
        raise CheckpointError(f"{path.name}: its manifest is that of version {checkpoint.version}")
    found = {name: (path / name).stat().st_size for name in _files(path) if name != MANIFEST}
    for name, (size, _) in checkpoint.files.items():
        if found.get(name) != size:
            there = "missing" if name not in found else f"{found[name]} bytes"
            raise CheckpointError(f"{path.name}: {name} is {there}; the manifest says {size} bytes")
    if unknown := sorted(found.keys() - checkpoint.files.keys()):
        raise CheckpointError(f"{path.name}: {unknown[0]} is not in the manifest")
    return checkpoint


def _is_complete(path: Path) -> bool:
    try:
        _read(path)
    except CheckpointError:
        return False
    return True


def _newest_first(root: Path) -> list[Path]:
    found = [path for path in root.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_version_of, reverse=True)


def _version_of(path: Path) -> PolicyVersion:
    match = _NAME.fullmatch(path.name)
    assert match
    return PolicyVersion(int(match[1]), int(match[2]))


def _files(folder: Path) -> list[str]:
    """Files below a folder, by relative name. Links are refused: what they point at can change."""
    names: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{folder.name}: {path.relative_to(folder)} is a link")
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return names


def _sync_and_hash(folder: Path) -> dict[str, tuple[int, str]]:
    result: dict[str, tuple[int, str]] = {}
    for name in _files(folder):
        sync(folder / name)
        result[name] = ((folder / name).stat().st_size, sha256(folder / name))
    return result
