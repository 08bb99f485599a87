"""Reads published weights and checks every byte, name, shape and value before anyone uses them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.adapter import Base, adapter_tensors, check_base
from stream_grpo.weights.manifest import (
    LATEST_FILE,
    MANIFEST_FILE,
    TENSORS_FILE,
    Manifest,
    TensorSpec,
    folder_name,
    from_json,
    parse_folder_name,
)
from stream_grpo.weights.tensors_file import is_finite, mapped, spec_of, tensor_sha256

_MAX_RETRIES = 5
_NUM_READS = 2


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that were read and checked."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    """Of the whole model. Where an adapter was published each is merged when it is asked for, and not kept."""


class Subscriber:
    """A sampler's side. The versions it gives never go back."""

    def __init__(self, directory: Path, base: Base | None = None, *, is_sent: bool = False) -> None:
        """`base` is what published adapters are added to; read only where one is published.

        `is_sent` says that tensors go over NCCL. What was published the other way, before a resume that changed it,
        counts as nothing published yet.
        """
        self._directory, self._base, self._is_sent = directory, base, is_sent
        self._seen_pointer: tuple[int, int, int] | None = None
        self._newest: PolicyVersion | None = None

    def newest(self) -> PolicyVersion | None:
        """The newest complete version, or None while nothing is published. Costs one stat where nothing changed.

        Raises WeightsError where the pointer goes back to an older version.
        """
        pointer = self._directory / LATEST_FILE
        try:
            stat = pointer.stat()
            identity = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if identity != self._seen_pointer:
                found = parse_folder_name(pointer.read_text().strip())
                if self._newest is not None and found < self._newest:
                    raise WeightsError(f"{pointer} goes back from {self._newest} to {found}")
                if not self._is_of_other_way(found):
                    self._newest = found
                self._seen_pointer = identity
        except FileNotFoundError:
            pass
        return self._newest

    def _is_of_other_way(self, version: PolicyVersion) -> bool:
        """Looked at in the first version alone: no learner of this start publishes it so again."""
        if self._newest is not None:
            return False
        manifest = from_json((self._directory / folder_name(version) / MANIFEST_FILE).read_text())
        return manifest.is_sent != self._is_sent

    def read(self, version: PolicyVersion, expected: Mapping[str, TensorSpec]) -> Published:
        """Read and check a version; where it is pruned meanwhile, the newest one instead (see the manifest).

        Raises WeightsError for a damaged, incomplete or foreign set of weights, for an adapter of another base, and
        where nothing is left to read.
        """
        for _ in range(_MAX_RETRIES):
            try:
                return self._read(version, expected)
            except FileNotFoundError:
                newest = self.newest()
                if newest is None or newest == version:
                    break
                version = newest
        raise WeightsError(f"{self._directory / folder_name(version)}: weights are not there to read")

    def _read(self, version: PolicyVersion, expected: Mapping[str, TensorSpec]) -> Published:
        folder = self._directory / folder_name(version)
        manifest = from_json((folder / MANIFEST_FILE).read_text())
        if manifest.version != version:
            raise WeightsError(f"{folder}: holds version {manifest.version}")
        data = _read_whole(folder, manifest.sha256)
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise WeightsError(f"{folder}: not safetensors: {error}") from error
        tensors |= self._held_elsewhere(manifest)
        if manifest.adapter is None:
            check_tensors(tensors, expected, source=str(folder))
            return Published(manifest, tensors)
        base = check_base(manifest.adapter, self._base, source=str(folder))
        of_adapter = adapter_tensors(tensors, expected, manifest.adapter.rank, source=str(folder))
        check_tensors(tensors, of_adapter, source=str(folder))
        return Published(manifest, base.merged(tensors, manifest.adapter.scaling))

    def _held_elsewhere(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """What a version leaves out, from the files of those before, which stay as long as it does."""
        found: dict[str, torch.Tensor] = {}
        for version in sorted(set(manifest.held_in.values())):
            folder = self._directory / folder_name(version)
            try:
                tensors = mapped(folder / TENSORS_FILE)
            except SafetensorError as error:
                raise WeightsError(f"{folder}: not safetensors: {error}") from error
            for name in (name for name, holder in manifest.held_in.items() if holder == version):
                # Copied, and then hashed: a map of a file that another machine deletes ends the process that reads it.
                if name in tensors:
                    found[name] = tensors[name].clone()
                if name not in found or tensor_sha256(found[name]) != manifest.tensor_sha256[name]:
                    raise WeightsError(f"{folder}: {name} is not what version {manifest.version} says that it holds")
        return found


def _read_whole(folder: Path, sha256: str) -> bytes:
    """The published bytes; read a second time where they are damaged, as what was read may be and not what is there.

    A file that is open is read to its end, also where its version is pruned meanwhile.
    """
    received = ""
    for _ in range(_NUM_READS):
        data = (folder / TENSORS_FILE).read_bytes()
        received = hashlib.sha256(data).hexdigest()
        if received == sha256:
            return data
    raise WeightsError(f"{folder}: sha256 of the received bytes is {received}, published {sha256}")


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, TensorSpec], source: str) -> None:
    """Compare tensors with what the model has. Raises WeightsError naming the tensors that do not fit.

    Names are the same, shapes and dtypes are the same, no tensor is without elements, every element is finite.
    """
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        raise WeightsError(f"{source}: missing tensors {missing}, unexpected tensors {extra}")
    for name, tensor in tensors.items():
        spec = spec_of(tensor)
        if spec != expected[name]:
            raise WeightsError(f"{source}: {name} is {spec}, the model has {expected[name]}")
        if tensor.numel() == 0:
            raise WeightsError(f"{source}: {name} has no elements")
        if not is_finite(tensor):
            raise WeightsError(f"{source}: {name} is not finite")
