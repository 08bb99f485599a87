"""A low-rank adapter in a Hugging Face model, by peft. The one file that imports peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

from stream_grpo.config_lora import Lora
from stream_grpo.errors import ConfigError
from stream_grpo.learner.forward import Distribution, LanguageModel, Support, Targets
from stream_grpo.weights.adapter import PREFIX
from stream_grpo.weights.manifest import TensorSpec
from stream_grpo.weights.tensors_file import write_tensors

TENSORS_FILE = "adapter_model.safetensors"
"""Of a folder in peft's own format."""
_NAME = "default"
"""What peft calls an adapter that nobody named."""


class LoraModel:
    """A model with an adapter in its linear layers. The adapter alone has a gradient; at first it changes nothing."""

    def __init__(self, model: Any, lora: Lora, model_dir: Path) -> None:
        """Changes the model in place: modules keep their names, and calls of it stay as they are.

        A is drawn from torch's generator, B is 0 (Hu et al. 2021, section 4.1). Raises ConfigError where a target is no
        linear layer of the model.
        """
        self._config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            # A ratio compares two passes, and the sampler's too: what is dropped would differ between them.
            lora_dropout=0.0,
            target_modules=list(lora.target_modules) or "all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(model_dir),
            inference_mode=False,
        )
        try:
            inject_adapter_in_model(self._config, model)
        except ValueError as error:
            raise ConfigError(f"learner.lora.target_modules = {list(lora.target_modules)}: {error}") from error
        self._model = model
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        head = model.get_output_embeddings()
        for name, layer in self._layers.items():
            if layer is head or type(layer.get_base_layer()) is not torch.nn.Linear:
                raise ConfigError(
                    f"learner.lora.target_modules: {name} is a {type(layer.get_base_layer()).__name__}, the head or no "
                    f"linear layer; name linear layers within the blocks, or none for all of them"
                )
        model.eval()
        # DeepSpeed leaves frozen weights out of checkpoints, but not a head that is the embedding under another name.
        model.register_state_dict_post_hook(_without_frozen)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Meanwhile the model is its base, bit for bit."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's, by the names that they have in peft's files."""
        named = self._model.named_parameters()
        return {PREFIX + name.replace(f".{_NAME}.", "."): p for name, p in named if p.requires_grad}

    def reference(self, policy: LanguageModel) -> BaseReference:
        """The policy without the adapter, called as the policy is, so that cut-up weights are gathered."""
        return BaseReference(policy, self)

    def write(self, directory: Path, specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
        """A folder in peft's own format, of tensors with the names of `parameters`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._config.save_pretrained(str(directory))
        write_tensors(directory / TENSORS_FILE, specs, ((name, tensors[name]) for name in specs))


def _without_frozen(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)


class BaseReference:
    """The reference policy that a model with an adapter has within itself: the same weights, the adapter off."""

    def __init__(self, policy: LanguageModel, lora: LoraModel) -> None:
        self._policy, self._lora = policy, lora

    @torch.no_grad()
    def logprobs(self, distribution: Distribution, targets: Targets, support: Support | None = None) -> Tensor:
        """Of the targets, [B, K]; those that are not wanted may be 0."""
        with self._lora.disabled():
            found_BK, _ = self._policy.logprobs(distribution, targets, support)
        return found_BK

    def follow(self, model: torch.nn.Module, step: int) -> None:
        """Nothing: it stays."""

    def save(self, directory: Path) -> None:
        """Nothing: the base is the model folder."""

    def load(self, directory: Path) -> None:
        """Nothing: see `save`."""
