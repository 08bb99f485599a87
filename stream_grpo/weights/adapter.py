"""What a published adapter is added to: W = W0 + (alpha / rank) B A, in float32, one tensor at a time.

Adapters have peft's own names: `base_model.model.<layer>.lora_A.weight` is [rank, in], `.lora_B.weight` [out, rank],
for a base tensor `<layer>.weight` of [out, in].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stream_grpo.errors import WeightsError
from stream_grpo.weights.manifest import Adapter, TensorSpec, model_tensors
from stream_grpo.weights.tensors_file import slices, spec_of

PREFIX = "base_model.model."
"""Of every name of a tensor in peft's files."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """W0 + scaling B A in the dtype of W0, computed in float32.

    W0 [out, in], A [rank, in], B [out, rank]. Hu et al. 2021 (arXiv 2106.09685), section 4.1.
    """
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scaling).to(weight.dtype)


def adapter_tensors(
    names: Iterable[str], base: Mapping[str, TensorSpec], rank: int, source: str
) -> dict[str, TensorSpec]:
    """What an adapter must hold that has tensors of these names: A and B of each layer, in the dtype of its base.

    Raises WeightsError for a name that is none of peft's, or of a layer that the base does not have as a matrix.
    """
    found: dict[str, TensorSpec] = {}
    for name in names:
        layer = name.removeprefix(PREFIX).removesuffix(LORA_A).removesuffix(LORA_B)
        spec = base.get(f"{layer}.weight")
        if name not in (PREFIX + layer + LORA_A, PREFIX + layer + LORA_B) or spec is None or len(spec.shape) != 2:
            raise WeightsError(f"{source}: {name} is no adapter of a linear layer that the base has")
        num_out, num_in = spec.shape
        found[PREFIX + layer + LORA_A] = TensorSpec((rank, num_in), spec.dtype)
        found[PREFIX + layer + LORA_B] = TensorSpec((num_out, rank), spec.dtype)
    return found


class Base:
    """The weights of a model folder, mapped from its files: the machine keeps one copy of them for all that read."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        """`dtype` is the run's, in which they are given out. Nothing is read before it is asked for."""
        self.model_dir, self._dtype = model_dir, dtype

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes of what it gives out. Raises WeightsError where the folder has no safetensors."""
        return model_tensors(self.model_dir, self._dtype)

    @cached_property
    def sha256(self) -> str:
        """Of names, dtypes, shapes and bytes as they lie in the files, however these are cut. Reads all of them."""
        digest = hashlib.sha256()
        for name in sorted(self.specs):
            tensor = self._raw(name)
            digest.update(f"{name} {spec_of(tensor)}\n".encode())
            for part in slices(tensor):
                digest.update(part)
        return digest.hexdigest()

    def tensor(self, name: str) -> Tensor:
        """A weight in the run's dtype; not to be written to."""
        return self._raw(name).to(getattr(torch, self._dtype))

    def merged(self, tensors: Mapping[str, Tensor], scaling: float) -> Mapping[str, Tensor]:
        """The whole model with an adapter's tensors in it; each weight is computed when it is asked for."""
        return _Merged(self, tensors, scaling)

    @cached_property
    def _files(self) -> dict[str, Any]:
        opened: list[Any] = [safe_open(path, "pt") for path in sorted(self.model_dir.glob("*.safetensors"))]
        return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (no mapping)

    def _raw(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class _Merged(Mapping[str, Tensor]):
    def __init__(self, base: Base, tensors: Mapping[str, Tensor], scaling: float) -> None:
        self._base, self._tensors, self._scaling = base, tensors, scaling

    def __getitem__(self, name: str) -> Tensor:
        weight = self._base.tensor(name)
        layer = PREFIX + name.removesuffix(".weight")
        if (lora_a := self._tensors.get(layer + LORA_A)) is None:
            return weight
        return merged(weight, lora_a, self._tensors[layer + LORA_B], self._scaling)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.specs)

    def __len__(self) -> int:
        return len(self._base.specs)


def check_base(adapter: Adapter, base: Base | None, source: str) -> Base:
    """The base that an adapter belongs to. Raises WeightsError where it is another one, or there is none."""
    if base is None:
        raise WeightsError(f"{source}: an adapter of the base {adapter.base_sha256}; no model folder is given for it")
    if base.sha256 != adapter.base_sha256:
        raise WeightsError(
            f"{source}: an adapter of the base {adapter.base_sha256}, but model.path = {base.model_dir} holds "
            f"{base.sha256}: other weights; put the model there that the learner trains from"
        )
    return base
