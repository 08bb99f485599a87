"""The learner's weights as others know them: by the names of Hugging Face or peft, whole, in the order of a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from stream_grpo.config_learner import Learner
from stream_grpo.learner.zero import whole
from stream_grpo.weights.adapter import Base
from stream_grpo.weights.manifest import Adapter, TensorSpec
from stream_grpo.weights.tensors_file import in_file_order, spec_of, write_tensors

if TYPE_CHECKING:  # peft is not loaded where it is not used
    from stream_grpo.learner.lora import LoraModel

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


class WeightsOut:
    """What one rank gives out of a model that DeepSpeed may have cut up among all."""

    def __init__(
        self,
        module: torch.nn.Module,
        lora: LoraModel | None,
        *,
        learner: Learner,
        model_dir: Path,
        dtype: Literal["float32", "bfloat16"],
        is_first: bool,
    ) -> None:
        """`model_dir`: the folder trained from; `is_first`: whether this is the rank that is given the copies."""
        self._module, self._lora, self._learner = module, lora, learner
        self._model_dir, self._dtype, self._is_first = model_dir, dtype, is_first
        self._base = Base(model_dir, dtype)

    @property
    def adapter(self) -> Adapter | None:
        """Of the weights given out, where these are an adapter. The first rank's: it reads all of the model folder."""
        lora = self._learner.lora
        return Adapter(base_sha256=self._base.sha256, rank=lora.rank, alpha=lora.alpha) if lora.rank else None

    def specs(self) -> dict[str, TensorSpec]:
        """What `named` gives out, in its order; costs nothing, and no rank needs another for it."""
        return {name: spec for name, (_, spec) in self._weights().items()}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name as in the Hugging Face file, a contiguous copy on CPU) of every weight; tied ones once.

        With `learner.lora` the adapter's alone, under peft's names. Under ZeRO 3 one parameter is whole at a time, on
        all ranks, and rank 0 alone is given the copies, of which it holds on to none.
        """
        partitioned = self._learner.zero_stage == 3
        for name, (weight, _) in self._weights().items():
            with whole(weight, is_cut=partitioned and isinstance(weight, torch.nn.Parameter)):
                copied = [weight.detach().to("cpu", copy=True).contiguous()] if self._is_first else []
            if copied:
                yield name, copied.pop()

    def _weights(self) -> dict[str, tuple[Tensor, TensorSpec]]:
        """What is given out, by its name, in the order of a file. Shapes are those of whole parameters."""
        if self._lora is not None:
            found: dict[str, Tensor] = {**self._lora.parameters()}
        else:
            persistent = self._module.state_dict().keys()
            buffers = {name: buffer for name, buffer in self._module.named_buffers() if name in persistent}
            found = {**dict(self._module.named_parameters()), **buffers}
        specs = {n: spec_of(w)._replace(shape=tuple(getattr(w, "ds_shape", w.shape))) for n, w in found.items()}
        return {name: (found[name], spec) for name, spec in in_file_order(specs).items()}

    def export(self, directory: Path) -> None:
        """Write a plain Hugging Face folder: current weights, everything else as in the folder trained from.

        An adapter is merged into it, and stands beside it in `<name>-adapter`, in peft's own format.
        """
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copytree(
            self._model_dir, directory, ignore=shutil.ignore_patterns(*_WEIGHT_FILES, ".*"), dirs_exist_ok=True
        )
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        (directory / "config.json").write_text(json.dumps(config | {"dtype": self._dtype}, indent=2), encoding="utf-8")
        weights, specs = self.named(), self.specs()
        if self._lora is not None and (adapter := self.adapter) is not None:
            tensors = dict(weights)
            self._lora.write(directory.with_name(f"{directory.name}-adapter"), specs, tensors)
            merged = self._base.merged(tensors, adapter.scaling)
            specs = in_file_order(self._base.specs)
            weights = ((name, merged[name]) for name in specs)
        write_tensors(directory / "model.safetensors", specs, weights)
