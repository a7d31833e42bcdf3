"""Attention over a union of parts, from attention over each part: the algebra that everything here composes with.

A part's result is `(out, lse)`: `out` `[batch, q_len, heads, v_dim]` in float32, normalised over the part, and `lse`
`[batch, q_len, heads]`, the logarithm of the part's sum of exponentials (natural). An empty part is `(0, -inf)`.
(Online softmax: Milakov & Gimelshein 2018; as an operator on attention states: FlashInfer.)
"""

from __future__ import annotations

import torch


def merge(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` over the union of disjoint `parts`."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top.isneginf(), 0.0, top))  # an empty union has weights 0, not NaN
    total = weights.sum(0)
    out = sum(w[..., None] * o for w, (o, _) in zip(weights, parts, strict=True))
    return out / torch.where(total > 0, total, 1.0)[..., None], top + torch.log(total)


def with_sink_logits(part: tuple[torch.Tensor, torch.Tensor], s_aux: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part with one more logit `s_aux` `[heads]` per head in the softmax, whose value is zero (gpt-oss)."""
    out, lse = part
    total = torch.logaddexp(lse, s_aux.float().to(lse.device).expand_as(lse))
    return out * torch.exp(lse - total)[..., None], total
