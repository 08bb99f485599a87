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
from torch import Tensor

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
    expected = iter(specs.items())
    with path.open("wb") as file:
        header = _header(specs)
        file.write(header)
        digest.update(header)
        for name, tensor in tensors:
            wanted = next(expected, None)
            if wanted != (name, spec_of(tensor)):
                raise ValueError(f"{path}: tensor {name} {spec_of(tensor)} comes where {wanted} is expected")
            for part in slices(tensor):
                file.write(part.numpy())
                digest.update(part.numpy())
                del part
            del tensor
        if missing := [name for name, _ in expected]:
            raise ValueError(f"{path}: tensors {missing} did not come")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def slices(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor as views of it, 16 MiB each at most; without a copy where it is contiguous."""
    return iter(tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(_SLICE_BYTES))


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is, looked at in slices: the check itself takes as much memory as what it looks at."""
    parts = tensor.detach().reshape(-1).split(_SLICE_BYTES // 8)
    return all(bool(torch.isfinite(part).all()) for part in parts)


def _item_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype.itemsize


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
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
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
