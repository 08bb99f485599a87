"""The settings of a low-rank adapter that is trained in place of all weights. Loads no torch.

Part of the tree of `config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from stream_grpo.config_section import Section

NOT_TARGETS = ("lm_head", "embed_tokens")
"""The head may be one tensor with the embedding, which is no linear layer."""


def layer_of(tensor: str, shape: Sequence[int]) -> str | None:
    """The last name of the linear layer that a tensor is the weight of; None where it can get no adapter."""
    layer = tensor.removesuffix(".weight").rpartition(".")[2]
    is_target = tensor.endswith(".weight") and len(shape) == 2 and layer not in NOT_TARGETS
    return layer if is_target else None


class Lora(Section):
    """An adapter beside frozen weights: W0 + (alpha / rank) B A (Hu et al. 2021, arXiv 2106.09685); see docs/lora.md.

    There is no dropout: the learner's logprobs are held against the sampler's, and must come out alike every time.
    """

    rank: int = Field(0, ge=0, le=4096)
    """Of the adapter of a linear layer: A is [rank, in], B is [out, rank]. 0: no adapter, all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """B A is taken times alpha / rank."""
    target_modules: tuple[Annotated[str, Field(pattern=r"^\w+$")], ...] = ()
    """Last names of the layers that get one, as ["q_proj", "v_proj"]. Empty: all linear layers but the output head."""


def lora_complaints(lora: Lora, *, kl_reference: str | None, has_critic: bool) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    if not lora.rank:
        if lora.target_modules:
            yield (
                f"learner.lora.target_modules = {list(lora.target_modules)} with learner.lora.rank = 0: without a rank "
                f"there is no adapter; use for example rank = 16, or leave target_modules out"
            )
        return
    if barred := sorted(set(lora.target_modules) & set(NOT_TARGETS)):
        yield (
            f"learner.lora.target_modules: {barred[0]!r} gets no adapter, as head and embedding may be one tensor; "
            f"name linear layers within the blocks, as 'q_proj', or none for all of them"
        )
    if kl_reference in ("refreshed", "ema"):
        yield (
            f"algo.kl_reference = {kl_reference} with learner.lora.rank = {lora.rank}: the reference is the model "
            f"without its adapter, which stays as it is; use kl_reference = fixed or behavior"
        )
    if has_critic:
        yield (
            f"learner.lora.rank = {lora.rank} with algo.advantage = gae: the critic trains a copy of all weights, "
            f"which is what an adapter is to spare; use rank = 0, or a recipe without a critic"
        )
