"""Fingerprints of what a model's modules give out on a probe: kilobytes that name the first module that departs.

The fingerprint of a vector x of H numbers is its norm |x| and K projections p_k = sum_h s_kh x_h on directions of
random signs s. As E p_k^2 = |x|^2 (Achlioptas 2003, Database-friendly random projections), the root mean square over k
of p_k - p'_k, divided by |x|, estimates |x - x'| / |x|: the relative gap of two engines.

B sequences, T tokens, H numbers of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_grpo.weights.manifest import Fingerprint

NUM_SEQUENCES, NUM_TOKENS = 4, 32
"""So much of a probe has fingerprints: the starts of its first sequences."""
_NUM_DIRECTIONS = 3
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
"""Relative gaps that rounding alone does not come to: it came to 6e-6 and 0.14 on random weights with peaked logits."""
_EMBEDDING, _LAYER, _NORM, _HEAD = "embedding", "layer", "final norm", "head"
_CANNOT_TELL = "which module departs cannot be told"


def starts(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """The part of a probe that has fingerprints. What follows does not change it, as attention is causal."""
    return [list(ids[:NUM_TOKENS]) for ids in sequences[:NUM_SEQUENCES]]


def decoder_modules(model: Any) -> dict[str, torch.nn.Module]:
    """The modules of a decoder in the order of computation, by name: embedding, layer 0, ..., final norm, head.

    Of a Hugging Face model and of vLLM's alike, with `model.embed_tokens`, `model.layers`, `model.norm` and `lm_head`;
    empty for one without these names.
    """
    body, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    embedding, layers, norm = (getattr(body, name, None) for name in ("embed_tokens", "layers", "norm"))
    if head is None or embedding is None or layers is None or norm is None:
        return {}
    # vLLM never calls the head itself: its logits come from a processor that has the head as an argument.
    head = getattr(model, "logits_processor", head)
    numbered = {f"{_LAYER} {i}": layer for i, layer in enumerate(layers)}
    return {_EMBEDDING: embedding, **numbered, _NORM: norm, _HEAD: head}


class Recorder:
    """While it is open, keeps the fingerprint of what each module gave out last."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._noted: dict[str, NDArray[np.float32]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
        self._hooks = [
            module.register_forward_hook(partial(self._note, name)) for name, module in self._modules.items()
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        # At once: the next module may change an output in place.
        if (states := _hidden_states(name, output)) is not None:
            self._noted[name] = _fingerprint(states.detach()).cpu().numpy()

    def take(self, lengths: Sequence[int]) -> tuple[Fingerprint, ...]:
        """Of every sequence of the newest forward pass, without what stands behind its length; then it forgets.

        Empty mappings where a module did not run.
        """
        noted, self._noted = self._noted, {}
        if noted.keys() != self._modules.keys():
            return tuple({} for _ in lengths)
        # vLLM has no axis of sequences.
        by_sequence = {name: rows if rows.ndim == 3 else rows[None] for name, rows in noted.items()}
        return tuple(
            {name: by_sequence[name][row, :length].tobytes() for name in self._modules}
            for row, length in enumerate(lengths)
        )


def _hidden_states(name: str, output: Any) -> Tensor | None:
    """[..., T, H] of a module's output.

    vLLM's modules give out a second tensor: the residual, which the next module adds. Only a layer's output lacks it.
    """
    first, *others = output if isinstance(output, tuple) else (output,)
    if not isinstance(first, Tensor):
        return None
    residual = next((other for other in others if isinstance(other, Tensor)), None)
    return first if residual is None or not name.startswith(_LAYER) else first + residual


def _fingerprint(states_TH: Tensor) -> Tensor:
    """[..., T, 1 + K] float32: norm and projections of every token."""
    states_TH = states_TH.float()
    projections_TK = states_TH @ _directions(states_TH.shape[-1]).to(states_TH.device)
    return torch.cat([states_TH.norm(dim=-1, keepdim=True), projections_TK], dim=-1)


@lru_cache(maxsize=8)
def _directions(size: int) -> Tensor:
    """[size, K] of -1 and 1, the same in every process."""
    signs = np.random.default_rng(size).integers(0, 2, (size, _NUM_DIRECTIONS)) * 2 - 1
    return torch.from_numpy(signs.astype(np.float32))


def relative_gaps(mine: Sequence[Fingerprint], learners: Sequence[Fingerprint]) -> dict[str, float]:
    """The largest |x - x'| / |x| over the tokens that both have, for every module, x the learner's.

    Infinite where a number is not finite. Empty where the two have no module or no token in common.
    """
    gaps: dict[str, float] = {}
    for my_modules, their_modules in zip(mine, learners, strict=False):
        for name, theirs in their_modules.items():
            if name in my_modules and my_modules[name] and theirs:
                gaps[name] = max(gaps.get(name, 0.0), _relative_gap(_rows(my_modules[name]), _rows(theirs)))
    return gaps


def _relative_gap(mine: NDArray[np.float32], learners: NDArray[np.float32]) -> float:
    num_tokens = min(len(mine), len(learners))
    difference_T = np.sqrt(np.mean(np.square(mine[:num_tokens, 1:] - learners[:num_tokens, 1:]), axis=-1))
    gap_T = difference_T / np.maximum(learners[:num_tokens, 0], np.finfo(np.float32).tiny)
    return float(np.max(np.where(np.isfinite(gap_T), gap_T, np.inf)))


def _rows(fingerprint: bytes) -> NDArray[np.float32]:
    return np.frombuffer(fingerprint, np.float32).reshape(-1, 1 + _NUM_DIRECTIONS)


def explain(mine: Sequence[Fingerprint], learners: Sequence[Fingerprint], dtype: str) -> str:
    """Which module departs first, in a sentence: what comes before it agrees, so that its own weights are wrong."""
    gaps, tolerance = relative_gaps(mine, learners), _TOLERANCE[dtype]
    if not gaps:
        side = "sampler" if any(learners) else "learner"
        return f"{_CANNOT_TELL}: the {side} has no embed_tokens, layers, norm and lm_head under their usual names"
    for name, gap in gaps.items():
        if gap > tolerance:
            return f"the first module that departs is the {name}, by {gap:.3g} of its output (tolerance {tolerance:g})"
    name = max(gaps, key=lambda name: gaps[name])
    return f"no module departs by more than {tolerance:g} of its output; most does the {name}, by {gaps[name]:.3g}"
