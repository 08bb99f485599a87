"""The support that the sampler really sampled from, for a learner whose logprobs must be of the same distribution.

B sequences, T tokens, V vocabulary. With top-k, top-p or min-p below full support the sampler's probabilities are
renormalised over what is left; a learner that leaves its logits whole sees a ratio below 1 on every token it trains on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank


def filter_logits(logits_BTV: Tensor, *, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Logits with -inf outside the support, [B, T, V]; they are already divided by the temperature.

    As vLLM samples (0.32, v1/sample): first tokens below min_p times the largest probability go, then all but the
    top_k largest logits (ties with the last one stay), then, of the rest renormalised, the smallest whose running sum
    from below is at most 1 - top_p, the largest token staying always. In float32, as there, so that a borderline token
    falls on the same side. -1 or 0, 1.0 and 0.0 turn a filter off.

    Where learner and sampler logits differ, a sampled token near a border may lie outside the learner's support: its
    logprob is -inf, and its log ratio ends at the bound of `log_ratio`, where it is counted.
    """
    require_rank(3, logits=logits_BTV)
    if top_k < -1 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"top_k {top_k}, top_p {top_p}, min_p {min_p}: expected -1 or more, (0, 1] and [0, 1]")
    if top_k >= logits_BTV.shape[-1]:
        top_k = 0
    if top_k <= 0 and top_p == 1 and min_p == 0:
        return logits_BTV
    kept_BTV = logits_BTV.detach().float()
    if min_p > 0:
        probs_BTV = kept_BTV.softmax(dim=-1)
        kept_BTV = kept_BTV.masked_fill(probs_BTV < probs_BTV.amax(dim=-1, keepdim=True) * min_p, -torch.inf)
    if top_k > 0:
        smallest_BT1 = kept_BTV.topk(top_k, dim=-1).values[..., -1:]
        kept_BTV = kept_BTV.masked_fill(kept_BTV < smallest_BT1, -torch.inf)
    if top_p < 1:
        kept_BTV = _top_p(kept_BTV, top_p)
    return logits_BTV.masked_fill(kept_BTV == -torch.inf, -torch.inf)


def _top_p(logits_BTV: Tensor, top_p: float) -> Tensor:
    ascending_BTV, order_BTV = logits_BTV.sort(dim=-1)
    below_BTV = ascending_BTV.softmax(dim=-1).cumsum(dim=-1)
    drop_BTV = below_BTV <= 1 - torch.tensor(top_p, dtype=below_BTV.dtype, device=below_BTV.device)
    drop_BTV[..., -1] = False
    return logits_BTV.masked_fill(torch.empty_like(drop_BTV).scatter_(-1, order_BTV, drop_BTV), -torch.inf)
