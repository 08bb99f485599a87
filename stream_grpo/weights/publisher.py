"""Publishes weights as versioned folders that are complete or invisible."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from stream_grpo.errors import WeightsError
from stream_grpo.failpoints import failpoint
from stream_grpo.files import replace_with, sync, write_synced
from stream_grpo.types import Forks, PolicyVersion
from stream_grpo.weights.manifest import (
    LATEST_FILE,
    MANIFEST_FILE,
    TENSORS_FILE,
    Adapter,
    Manifest,
    Probe,
    TensorSpec,
    folder_name,
    from_json,
    parse_folder_name,
    to_json,
)
from stream_grpo.weights.tensors_file import (
    in_file_order,
    is_finite,
    mapped,
    spec_of,
    tensor_sha256,
    write_changed,
    write_tensors,
)

_log = logging.getLogger(__name__)


class Publisher:
    """The learner's side. One publisher per folder."""

    def __init__(
        self,
        directory: Path,
        keep_versions: int,
        clock: Callable[[], float] = time.time,
        *,
        changed_alone: bool = False,
    ) -> None:
        """Make the folder and remove what a killed publisher left half written.

        With `changed_alone` a version leaves out the tensors that are as the version before has them.
        """
        self._directory, self._keep_versions, self._clock = directory, keep_versions, clock
        self._changed_alone = changed_alone
        self._held: dict[PolicyVersion, frozenset[PolicyVersion]] = {}
        """By version: in whose files there is what it leaves out."""
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(".*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def publish(
        self,
        version: PolicyVersion,
        forks: Forks,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
        *,
        specs: Mapping[str, TensorSpec] | None = None,
        adapter: Adapter | None = None,
    ) -> Manifest:
        """Write a version, point `latest` at it, remove the oldest beyond `keep_versions`.

        With `specs`, which are `in_file_order` and say what comes, tensors are written as they come, and one is in
        memory at a time; without them all are. `adapter` says that they are one, and of what. Publishing the very same
        bytes again does nothing. Raises WeightsError for other bytes under a published version, for a version older
        than the newest, and for a tensor without elements or with values that are not finite: a shard that was not
        gathered, or weights that no sampler would take.
        """
        published = self._published()
        if published and version < published[-1]:
            raise WeightsError(f"weights {version} are older than the published {published[-1]}")
        specs, tensors = _announced(named_tensors, specs)
        created_at_s = self._clock()
        unfinished = self._directory / f".writing-{folder_name(version)}"
        unfinished.mkdir()
        try:
            has_earlier = self._changed_alone and published and version != published[-1]
            earlier = self._manifest(published[-1]) if has_earlier else None
            sha256, hashes = self._write(unfinished / TENSORS_FILE, specs, _whole(version, tensors), earlier)
            manifest = Manifest(
                version=version,
                forks=dict(forks),
                tensors=specs,
                sha256=sha256,
                probe=probe,
                created_at_s=created_at_s,
                adapter=adapter,
                tensor_sha256=hashes,
                held_in=_held_in(hashes, earlier),
            )
            if version in published:
                self._check_same(manifest, unfinished)
            else:
                self._make_visible(manifest, unfinished)
        finally:
            # Ranks that give out their parts of what is left are waited for, also where nobody wants it any more.
            for _ in tensors:
                pass
            shutil.rmtree(unfinished, ignore_errors=True)
        self._point_to(version)
        self._prune()
        return manifest

    def _write(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        tensors: Iterable[tuple[str, torch.Tensor]],
        earlier: Manifest | None,
    ) -> tuple[str, Mapping[str, str]]:
        if not self._changed_alone:
            return write_tensors(path, specs, tensors), {}
        return write_changed(path, specs, tensors, earlier.tensor_sha256 if earlier else {})

    def _published(self) -> list[PolicyVersion]:
        names = [p.name for p in self._directory.iterdir() if p.is_dir() and not p.name.startswith(".")]
        return sorted(parse_folder_name(name) for name in names)

    def _manifest(self, version: PolicyVersion) -> Manifest:
        return from_json((self._directory / folder_name(version) / MANIFEST_FILE).read_text())

    def _check_same(self, manifest: Manifest, unfinished: Path) -> None:
        """`unfinished` holds all tensors, whatever the version that is published leaves out."""
        there = self._manifest(manifest.version)
        if there.tensor_sha256:
            mine = manifest.tensor_sha256 or {n: tensor_sha256(t) for n, t in mapped(unfinished / TENSORS_FILE).items()}
            is_same = there.tensor_sha256 == mine
        else:
            is_same = there.sha256 == manifest.sha256
        if not is_same:
            folder = self._directory / folder_name(manifest.version)
            raise WeightsError(f"{folder}: version {manifest.version} is published with other weights")

    def _make_visible(self, manifest: Manifest, unfinished: Path) -> None:
        write_synced(unfinished / MANIFEST_FILE, to_json(manifest).encode())
        sync(unfinished)
        failpoint("publish.renaming")
        unfinished.rename(self._directory / folder_name(manifest.version))
        sync(self._directory)

    def _point_to(self, version: PolicyVersion) -> None:
        failpoint("publish.pointing")
        replace_with(self._directory / LATEST_FILE, folder_name(version).encode())

    def _prune(self) -> None:
        """What the newest versions leave out stays too, as long as they do."""
        published = self._published()
        kept = set(published[-self._keep_versions :])
        for version in tuple(kept):
            if version not in self._held:
                self._held[version] = self._needed_by(version)
            kept |= self._held[version]
        for version in published:
            if version in kept:
                continue
            self._held.pop(version, None)
            # Renamed first, so that a reader finds a version whole or not at all.
            doomed = self._directory / f".removing-{folder_name(version)}"
            (self._directory / folder_name(version)).rename(doomed)
            shutil.rmtree(doomed)

    def _needed_by(self, version: PolicyVersion) -> frozenset[PolicyVersion]:
        try:
            return frozenset(self._manifest(version).held_in.values())
        except (OSError, ValueError, WeightsError) as error:
            # Nobody can read that version, so that it needs nothing; this one is published all the same.
            _log.warning("weights %s cannot be read: %s", version, error)
            return frozenset()


def _announced(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    specs: Mapping[str, TensorSpec] | None,
) -> tuple[Mapping[str, TensorSpec], Iterator[tuple[str, torch.Tensor]]]:
    """What will come, and what comes."""
    if specs is not None:
        return specs, iter(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in dict(named_tensors).items()}
    specs = in_file_order({name: spec_of(tensor) for name, tensor in whole.items()})
    return specs, iter([(name, whole[name]) for name in specs])


def _held_in(hashes: Mapping[str, str], earlier: Manifest | None) -> dict[str, PolicyVersion]:
    """Where the tensors are that stayed as they were: always where they were written, never where that was said."""
    if earlier is None:
        return {}
    same = (name for name, digest in hashes.items() if earlier.tensor_sha256.get(name) == digest)
    return {name: earlier.held_in.get(name, earlier.version) for name in same}


def _whole(version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        _check_whole(version, {name: tensor})
        yield name, tensor
        del tensor


def _check_whole(version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise WeightsError(f"weights {version}: {name} has no elements; a sharded tensor is gathered before")
        if not is_finite(tensor):
            raise WeightsError(f"weights {version}: {name} is not finite; restart from a checkpoint")
