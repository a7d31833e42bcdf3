"""Attention over a union of parts, from attention over each part: the algebra that everything here composes with.

A part's result is `(out, lse)`: `out` `[batch, q_len, heads, v_dim]` in float32, normalised over the part, and `lse`
`[batch, q_len, heads]`, the logarithm of the part's sum of exponentials (natural). An empty part is `(0, -inf)`.
(Online softmax: Milakov & Gimelshein 2018; as an operator on attention states: FlashInfer.)
"""

from __future__ import annotations

import functools

import torch


def merge(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` over the union of disjoint `parts`."""
    return functools.reduce(_merge, parts)


def merge_into(part: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same of two, in the place of the first one."""
    lse, share = _weighed(part[1], other[1])
    part[0].lerp_(other[0], share)
    part[1].copy_(lse)


def _merge(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]):
    lse, share = _weighed(a[1], b[1])
    return torch.lerp(a[0], b[0], share), lse


def _weighed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-sum-exp of a union, and what share of it the second part has, `[..., 1]`."""
    lse = torch.logaddexp(a, b)
    share = torch.exp(b - torch.where(lse.isneginf(), 0.0, lse))  # an empty union has a share of 0, not NaN
    return lse, share[..., None]


def with_sink_logits(part: tuple[torch.Tensor, torch.Tensor], s_aux: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part with one more logit `s_aux` `[heads]` per head in the softmax, whose value is zero (gpt-oss)."""
    out, lse = part
    total = torch.logaddexp(lse, s_aux.float().to(lse.device).expand_as(lse))
    return out * torch.exp(lse - total)[..., None], total
