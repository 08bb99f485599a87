"""A file of tensors that is written as they come: the library reads it, and no two of them are alive at once."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from stream_grpo.weights.manifest import TensorSpec
from stream_grpo.weights.tensors_file import in_file_order, is_finite, spec_of, write_tensors

MIXED = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.tensor([[0.1, 3.0]], dtype=torch.bfloat16),
    "single": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(7.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
}


def _num_alive_bytes(ref: weakref.ref[Tensor]) -> int:
    return 0 if (tensor := ref()) is None else tensor.nbytes


class Watched:
    """Gives out tensors one by one, and counts the bytes of those that are alive as it makes the next."""

    def __init__(self, num_tensors: int, num_elements: int) -> None:
        self.specs = {f"w{i}": TensorSpec((num_elements,), "float32") for i in range(num_tensors)}
        self.alive: list[weakref.ref[Tensor]] = []
        self.most_bytes = self.num_made = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, spec) in enumerate(self.specs.items()):
            made = [torch.full(spec.shape, float(i))]
            self.num_made += 1
            self.alive.append(weakref.ref(made[0]))
            self.most_bytes = max(self.most_bytes, sum(map(_num_alive_bytes, self.alive)))
            yield name, made.pop()


def test_the_library_reads_what_was_written_and_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    specs = in_file_order({name: spec_of(tensor) for name, tensor in MIXED.items()})
    # 8 bytes an element, 4 (two of them), 2, 1; what is alike stays in its order.
    assert list(specs) == ["scalar", "single", "none", "half", "flags"]
    digest = write_tensors(tmp_path / "f", specs, ((name, MIXED[name]) for name in specs))
    assert digest == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()
    read = load_file(tmp_path / "f")
    assert read.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("flags"), MIXED["flags"])


def test_one_tensor_is_alive_at_a_time(tmp_path: Path) -> None:
    gc.collect()
    watched = Watched(8, 1000)
    write_tensors(tmp_path / "f", watched.specs, watched)
    assert watched.num_made == 8
    assert watched.most_bytes == 4000
    assert {name: float(t[0]) for name, t in load_file(tmp_path / "f").items()} == {f"w{i}": float(i) for i in range(8)}


def test_a_tensor_larger_than_a_slice_is_whole_in_the_file(tmp_path: Path) -> None:
    # 5 x 2^20 numbers of 8 bytes are two and a half slices of 16 MiB.
    large = torch.arange(5 << 20, dtype=torch.float64)
    write_tensors(tmp_path / "f", {"w": spec_of(large)}, [("w", large)])
    assert torch.equal(load_file(tmp_path / "f")["w"], large)
    assert is_finite(large)
    large[-1] = torch.inf
    assert not is_finite(large)


def test_other_tensors_than_announced_are_an_error(tmp_path: Path) -> None:
    specs = {"a": TensorSpec((2,), "float32"), "b": TensorSpec((3,), "float32")}
    a, b = torch.zeros(2), torch.zeros(3)
    for sent, complaint in [
        ([("a", a)], r"tensors \['b'\] did not come"),
        ([("b", b), ("a", a)], "tensor b .* where .*'a'"),
        ([("a", b), ("b", b)], r"tensor a TensorSpec\(shape=\(3,\)"),
        ([("a", a), ("b", b), ("c", b)], "tensor c .* where None"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            write_tensors(tmp_path / "f", specs, sent)
    flags_first = {"flags": TensorSpec((3,), "bool"), "w": TensorSpec((2,), "float32")}
    with pytest.raises(ValueError, match="w of float32 would begin at byte 3"):
        write_tensors(tmp_path / "f", flags_first, [])
