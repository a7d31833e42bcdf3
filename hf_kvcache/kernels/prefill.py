"""Attention of new tokens over themselves, before they are stored: torch's fused kernels where they give what is needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import reference
from .merge import merge

# torch's fused CPU attention also knows the log-sum-exp that parts are merged by, but only this operator returns it.
_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


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
    """`(out, lse)` of one row's newest queries over its new keys; see `reference.prefill`."""
    fused = _flash is not None and q.device.type == "cpu" and softcap is None and k.shape[-1] == v.shape[-1]
    if not fused:
        return reference.prefill(q, k, v, scale, window=window, sinks=sinks, turned=turned, softcap=softcap)
    n, offset = k.shape[1], k.shape[1] - q.shape[1]
    window = n if window is None else min(window, n)
    if window < n and not offset:
        recent = _windowed(q, k, v, scale, window)
    else:
        start = max(0, offset + 1 - window)
        mask = _band(offset, n, start, window, q) if offset else None
        recent = tuple(x[0] for x in _fused(q[None], k[None, :, start:], v[None, :, start:], scale, mask))
    if sinks and window < n:
        _add_sinks(recent, q if turned is None else turned, k, v, scale, window, min(sinks, n))
    return recent


def _add_sinks(part, q, k, v, scale: float, window: int, sinks: int) -> None:
    """Let the queries of `part` see the first `sinks` keys as well, as soon as the window has left them behind."""
    n, m = k.shape[1], q.shape[1]
    late = slice(max(0, window - (n - m)), m)  # before these, the window has left nothing behind
    position = torch.arange(n - m, n, device=q.device)[late, None]
    passed = torch.arange(sinks, device=q.device) <= position - window
    with_sinks = merge(
        tuple(x[late] for x in part), reference.attend(q[:, late], k[:, :sinks], v[:, :sinks], scale, passed)
    )
    for whole, x in zip(part, with_sinks, strict=True):
        whole[late] = x


def _windowed(q, k, v, scale: float, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query over its newest `window` keys, by causal attention alone: no mask, and no work that one would hide.

    The tokens are cut into blocks of `window`, the first one shorter. A query sees its own block as far as itself and, of
    the block before, what lies behind its own place in it.
    """
    rest = k.shape[1] % window
    shorter = [x[None, :, :rest] for x in (q, k, v)]
    queries, keys, values = (x[:, rest:].unflatten(1, (-1, window)).transpose(0, 1) for x in (q, k, v))
    parts = [_fused(*shorter, scale)] if rest else []
    parts.append(merge(_fused(queries[:1], keys[:1], values[:1], scale), _behind(queries[:1], *shorter[1:], scale)))
    if len(queries) > 1:
        own = _fused(queries[1:], keys[1:], values[1:], scale)
        parts.append(merge(own, _behind(queries[1:], keys[:-1], values[:-1], scale)))
    return tuple(torch.cat([x.flatten(0, 1) for x in tensors]) for tensors in zip(*parts, strict=True))


def _behind(q, k, v, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of blocks over the (perhaps fewer) keys of the blocks before, each over those that lie behind its own place:
    causal as well once both are read backwards, less the key at that very place."""
    batch, heads, window, _ = q.shape
    out = q.new_zeros((batch, window, heads, v.shape[3]), dtype=torch.float32)
    lse = q.new_full((batch, window, heads), -torch.inf, dtype=torch.float32)
    if window > 1 and k.shape[2]:
        q, k, v = q.flip(2)[:, :, 1:], k.flip(2)[:, :, : window - 1], v.flip(2)[:, :, : window - 1]
        out[:, :-1], lse[:, :-1] = (x.flip(1) for x in _fused(q, k, v, scale))
    return out, lse


def _band(offset: int, n: int, start: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """`[n - offset, n - start]` as a mask to add: queries `offset..n` see the keys of `start..n` that are not newer, nor
    `window` older."""
    distance = torch.arange(offset, n, device=like.device)[:, None] - torch.arange(start, n, device=like.device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def _fused(q, k, v, scale: float, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` `[batch, m, q_heads, v_dim]` and `lse` `[batch, m, q_heads]` in float32, of `[batch, heads, n, dim]`; causal where
    there is no mask, query `i` over the keys `0..i`."""
    out, lse = _flash(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).float(), lse.float().transpose(1, 2)
