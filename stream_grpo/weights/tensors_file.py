"""One safetensors file, written tensor by tensor: what is in memory beside the tensor is a slice of it.

The library's own writer wants all tensors at once. A file is 8 bytes of length, a JSON header with dtype, shape and
offsets, and the data without a gap (the format's own description), so that names and shapes, which are known before,
give the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stream_grpo.files import sha256
from stream_grpo.weights.manifest import DTYPES, TensorSpec

_FORMAT_NAMES = {torch_name: name for name, torch_name in DTYPES.items()}
_SLICE_BYTES = 16 << 20


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def num_bytes(spec: TensorSpec) -> int:
    """Of a tensor's data."""
    return math.prod(spec.shape) * _item_bytes(spec)


def in_file_order(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Wide dtypes first, so that every tensor begins at a multiple of its item size; else the order stays."""
    return dict(sorted(specs.items(), key=lambda item: -_item_bytes(item[1])))


def write_tensors(path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write tensors on CPU, which come one by one in the order of `specs`; durable on return. The SHA-256 of the bytes.

    No tensor is held on to while the next is made. Raises ValueError where they are not those of `specs`, or `specs`
    are not `in_file_order`.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = _header(specs)
        file.write(header)
        digest.update(header)
        for _, tensor in _as_announced(path, specs, tensors):
            for part in slices(tensor):
                file.write(part)
                digest.update(part)
                del part
            del tensor
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_changed(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], known: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Write those tensors alone whose `tensor_sha256` is not the `known` one. The SHA-256 of the file, and of each.

    As `write_tensors`, whose bytes these are where nothing is known; else the header stands in the room of one of all.
    """
    found: dict[str, str] = {}
    changed: dict[str, TensorSpec] = {}
    room = len(_header(specs))
    with path.open("wb") as file:
        file.seek(room)
        for name, tensor in _as_announced(path, specs, tensors):
            found[name] = tensor_sha256(tensor)
            if known.get(name) != found[name]:
                changed[name] = specs[name]
                for part in slices(tensor):
                    file.write(part)
                    del part
            del tensor
        file.seek(0)
        file.write(_header(changed, room))
        file.flush()
        os.fsync(file.fileno())
    return sha256(path), found


def tensor_sha256(tensor: Tensor) -> str:
    """Of dtype, shape and bytes of a tensor on CPU."""
    digest = hashlib.sha256(str(spec_of(tensor)).encode())
    for part in slices(tensor):
        digest.update(part)
    return digest.hexdigest()


def _as_announced(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    expected = iter(specs.items())
    for name, tensor in tensors:
        wanted = next(expected, None)
        if wanted != (name, spec_of(tensor)):
            raise ValueError(f"{path}: tensor {name} {spec_of(tensor)} comes where {wanted} is expected")
        yield name, tensor
        del tensor
    if missing := [name for name, _ in expected]:
        raise ValueError(f"{path}: tensors {missing} did not come")


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file as views of it: what is looked at is read. Raises FileNotFoundError, SafetensorError."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def slices(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, 16 MiB each at most; without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (part.numpy().data for part in torch.split(flat, _SLICE_BYTES))


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is, looked at in slices: the check itself takes as much memory as what it looks at."""
    parts = torch.split(tensor.detach().reshape(-1), _SLICE_BYTES // 8)
    return all(bool(torch.isfinite(part).all()) for part in parts)


def _item_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype.itemsize


def _header(specs: Mapping[str, TensorSpec], room: int = 0) -> bytes:
    """At least `room` bytes: spaces at its end are part of the format."""
    # transformers loads a file only where it says so.
    plain: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        if offset % _item_bytes(spec):
            raise ValueError(f"{name} of {spec.dtype} would begin at byte {offset}; wide dtypes come first")
        end = offset + num_bytes(spec)
        plain[name] = {"dtype": _FORMAT_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(plain, separators=(",", ":")).encode()
    text = text.ljust(max(len(text) + -len(text) % 8, room - 8))
    return struct.pack("<Q", len(text)) + text
