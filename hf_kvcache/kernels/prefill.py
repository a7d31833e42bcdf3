"""Attention of new tokens over themselves, before they are stored: torch's fused kernels where they give what is needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import reference
from .merge import merge

# torch's fused attention also knows the log-sum-exp that parts are merged by, but only these operations return it.
_flash_on_cpu = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_on_cuda = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Plain causal attention of new queries over new keys, `[batch, heads, n, dim]`; a single query sees every key.

    Returns `[batch, n, q_heads, v_dim]` in the dtype of `q`.
    """
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: int = 0,
    turned: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of one row's newest queries over its new keys; see `reference.prefill`.

    On CUDA the fused operation takes no mask, so that plain causal attention is all it serves.
    """
    n, offset = k.shape[1], k.shape[1] - q.shape[1]
    whole = window is None or window >= n
    alike = softcap is None and k.shape[-1] == v.shape[-1]
    if alike and whole and (offset == 0 or q.shape[1] == 1) and _serves_on_cuda(q):
        out, lse, *_ = _flash_on_cuda(q[None], k[None], v[None], 0.0, offset == 0, False, scale=scale)
        return out[0].transpose(0, 1).float(), lse[0].float().T
    if not alike or _flash_on_cpu is None or q.device.type != "cpu":
        return reference.prefill(q, k, v, scale, window=window, sinks=sinks, turned=turned, softcap=softcap)
    if whole:
        return _fused(q, k, v, scale, causal=offset == 0, visible=None if offset == 0 else _band(offset, n, 0, n, n, q))
    parts = []
    for i in range(offset, n, reference.QUERY_CHUNK):
        j, start = min(i + reference.QUERY_CHUNK, n), max(0, i + 1 - window)
        visible = _band(i, j, start, j, window, q)
        parts.append(_fused(q[:, i - offset : j - offset], k[:, start:j], v[:, start:j], scale, False, visible))
    recent = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    sinks = min(sinks, n)
    if not sinks:
        return recent
    queries = torch.arange(offset, n, device=q.device)[:, None]
    passed = torch.arange(sinks, device=q.device) <= queries - window  # sinks that the window has left behind
    return merge(recent, reference.attend(q if turned is None else turned, k[:, :sinks], v[:, :sinks], scale, passed))


def _serves_on_cuda(q: torch.Tensor) -> bool:
    """Whether CUDA's fused attention takes queries like these, grouped heads included."""
    if q.device.type != "cuda" or _flash_on_cuda is None or not torch.backends.cuda.flash_sdp_enabled():
        return False
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _band(i: int, j: int, start: int, stop: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """`[j - i, stop - start]`: queries `i..j` see the keys of `start..stop` that are not newer, nor `window` older."""
    distance = torch.arange(i, j, device=like.device)[:, None] - torch.arange(start, stop, device=like.device)
    return (distance >= 0) & (distance < window)


def _fused(q, k, v, scale: float, causal: bool, visible: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    mask = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
    out, lse = _flash_on_cpu(q[None], k[None], v[None], 0.0, causal, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).float(), lse[0].float().T
