"""Whether a model can do what `[learner]` asks of it: found out on one without weights, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stream_grpo.config_learner import Learner
from stream_grpo.errors import ConfigError
from stream_grpo.learner.recompute import recompute_activations


def check_fit(model_dir: Path, learner: Learner) -> None:
    """Do to the model of a Hugging Face folder what the learner's engine does to it once its weights are loaded.

    On the meta device, where transformers makes a model before it loads one: modules without data, of `config.json`
    alone, in a second at most. Raises ConfigError as the engine would, and where no model can be made.
    """
    model = _without_weights(model_dir)
    if learner.lora.rank:
        from stream_grpo.learner.lora import LoraModel  # peft is not loaded where it is not used

        with torch.device("meta"):
            LoraModel(model, learner.lora, model_dir)
    if learner.activation_checkpointing:
        recompute_activations(model)


def _without_weights(model_dir: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.path = {model_dir}: transformers makes no causal language model of its config.json: "
            f"{type(error).__name__}: {error}; use a folder that AutoModelForCausalLM loads"
        ) from error
