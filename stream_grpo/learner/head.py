"""The output head, asked for figures of single positions: logits of a whole microbatch never exist.

What turns logits into figures is given; here it is seen to that a piece of them is there at a time, in the forward pass
and in the backward pass, where each piece is computed again. All of it happens while the head's own `forward` runs,
so that ZeRO 3 gathers its weight once for the forward and once for the backward pass, whatever the number of pieces.

N positions asked for, H hidden size, V vocabulary, F figures of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

Measure = Callable[[Tensor, slice, bool], Tensor]
"""(logits of some of the positions, which ones, whether its gradient alone is wanted) -> their figures, [F, n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the head gives out in place of logits."""

    at_N: Tensor
    """Position of each token's distribution among all that the head is given, counted row by row."""
    measure: Measure
    num_at_once: int
    """Positions whose logits exist at one time."""

    def pieces(self) -> Iterator[slice]:
        """The positions, some at a time."""
        num_all = len(self.at_N)
        return (slice(start, start + self.num_at_once) for start in range(0, num_all, self.num_at_once))


def with_fp32_head(model: Any) -> None:
    """Have the output head multiply in float32, whatever the dtype of the model.

    Logits in bfloat16 carry three digits: the logprobs of likely tokens, and with them the ratios, would be rounded
    (ScaleRL, arXiv 2510.13786).
    """
    head = model.get_output_embeddings()
    # Bound to the head, so that a copy of the model has a head with weights of its own.
    head.forward = MethodType(_fp32_forward, head)


def _fp32_forward(head: Any, hidden: Tensor) -> Tensor:
    bias = None if head.bias is None else head.bias.float()
    return linear(hidden.float(), head.weight.float(), bias)


def can_be_asked(model: Any) -> bool:
    """Whether the output head is a matrix and nothing else; what the model does to its logits is not looked at."""
    return type(model.get_output_embeddings()) is torch.nn.Linear


@contextmanager
def asked(model: Any, question: Question) -> Iterator[None]:
    """While it is open, a forward pass of the model gives out figures [F, N] where it gives logits."""
    head = model.get_output_embeddings()
    own = head.__dict__.get("forward")
    is_fp32 = getattr(own, "__func__", None) is _fp32_forward
    head.forward = partial(_answer, head, question, torch.float32 if is_fp32 else None)
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def _answer(head: Any, question: Question, dtype: torch.dtype | None, hidden: Tensor) -> Tensor:
    """[F, N], in a piece that autograd keeps where all positions are one."""
    hidden_NH = hidden.reshape(-1, hidden.shape[-1]).index_select(0, question.at_N)
    dtype = dtype or head.weight.dtype
    if len(hidden_NH) > question.num_at_once:
        figures: Tensor = _InPieces.apply(hidden_NH, head.weight, head.bias, question, dtype)  # type: ignore[no-untyped-call]
        return figures
    bias = None if head.bias is None else head.bias.to(dtype)
    return question.measure(linear(hidden_NH.to(dtype), head.weight.to(dtype), bias), slice(None), False)


class _InPieces(torch.autograd.Function):
    """Figures of all positions from the logits of some at a time; the backward pass computes these again.

    With L = figures' gradient taken to the logits of a piece: d hidden = L W, d W = sum over pieces of L^T hidden.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        question: Question,
        dtype: torch.dtype,
    ) -> Tensor:
        # The weight itself, not a copy: under ZeRO 3 it is empty until the backward pass gathers it.
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.question, ctx.dtype = question, dtype
        weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        return torch.cat(
            [
                question.measure(linear(hidden_NH[piece].to(dtype), weight, bias), piece, False)
                for piece in question.pieces()
            ],
            dim=-1,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_FN: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        question, dtype = ctx.question, ctx.dtype
        weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        d_hidden = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        # Summed up in the dtype of the products: in bfloat16 each piece would be rounded.
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for piece in question.pieces():
            hidden = hidden_NH[piece].to(dtype)
            d_logits = _gradient(linear(hidden, weight, bias), question, piece, gradient_FN[:, piece])
            if d_hidden is not None:
                d_hidden[piece] = d_logits @ weight
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), hidden)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight_VH.dtype),
            None if d_bias is None or bias_V is None else d_bias.to(bias_V.dtype),
            None,
            None,
        )


def _gradient(logits: Tensor, question: Question, piece: slice, gradient_Fn: Tensor) -> Tensor:
    """Of the figures, in the logits of a piece."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        figures = question.measure(leaf, piece, True)
    (d_logits,) = torch.autograd.grad(figures, leaf, gradient_Fn)
    return d_logits
