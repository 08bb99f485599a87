"""Layers that keep their input for the backward pass and compute the rest of it again there.

Korthikanti et al. 2022 (arXiv 2205.05198, section 5): a token keeps h numbers a layer in place of 17 h and its
attention scores, for one more forward pass of the layers. By transformers' own checkpointing, in torch's way that is
not reentrant.
"""

from __future__ import annotations

from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from stream_grpo.errors import ConfigError


def recompute_activations(model: Any) -> None:
    """Have each layer of a Hugging Face model computed again in the backward pass, still without dropout.

    Raises ConfigError for a model whose layers do not know how.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"learner.activation_checkpointing = true: the layers of {type(model).__name__} cannot be computed again "
            "in the backward pass; use false"
        )
    # Nothing is drawn in a layer, so that there is no random state to be kept.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in layers:
        # A layer computes again only in training mode, in which it would drop out; what it is made of stays out of it.
        layer.training = True
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
