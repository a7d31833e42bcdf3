"""Attention of new tokens over themselves, before they are stored: torch's fused kernels where they give what is needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import reference
from .merge import merge_into

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
    """`(out, lse)` of one row's newest queries over its new keys; see `reference.prefill`."""
    n, m = k.shape[1], q.shape[1]
    if softcap is not None or k.shape[2] != v.shape[2] or not _is_fused(q, masked=m not in (1, n)):
        return reference.prefill(q, k, v, scale, window=window, sinks=sinks, turned=turned, softcap=softcap)
    window = n if window is None else min(window, n)
    if m == n and window < n:
        recent = _windowed(q, k, v, scale, window)
    else:
        start = max(0, n - m + 1 - window)  # the oldest key that any query sees
        mask = None if m in (1, n) else _band(n - m, n, start, window, q)
        part = _fused(q[None], k[None, :, start:], v[None, :, start:], scale, causal=m == n, mask=mask)
        recent = tuple(x[0] for x in part)
    if sinks and window < n:
        _add_sinks(recent, q if turned is None else turned, k, v, scale, window, min(sinks, n))
    return recent


def _is_fused(q: torch.Tensor, masked: bool) -> bool:
    """Whether the device has a fused operation for queries like these, grouped heads included. CUDA's takes no mask."""
    if q.device.type == "cpu":
        return _flash_on_cpu is not None
    if masked or q.device.type != "cuda" or _flash_on_cuda is None or not torch.backends.cuda.flash_sdp_enabled():
        return False
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _add_sinks(part, q, k, v, scale: float, window: int, sinks: int) -> None:
    """Let the queries of `part` see the first `sinks` keys as well, as soon as the window has left them behind."""
    n, m = k.shape[1], q.shape[1]
    late = slice(max(0, window - (n - m)), m)  # before these, the window has left nothing behind
    position = torch.arange(n - m, n, device=q.device)[late, None]
    passed = torch.arange(sinks, device=q.device) <= position - window
    seen = reference.attend(q[:, late], k[:, :sinks], v[:, :sinks], scale, passed)
    merge_into(tuple(x[late] for x in part), seen)


def _windowed(q, k, v, scale: float, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query over its newest `window` keys, by causal attention alone: no mask, and no work that one would hide.

    The tokens are cut into blocks of `window`, before them perhaps a shorter one. A query sees its own block as far as itself
    and, of the block before, what lies behind its own place in it.
    """
    rest = k.shape[1] % window
    queries, keys, values = (x[:, rest:].unflatten(1, (-1, window)).transpose(0, 1) for x in (q, k, v))
    out, lse = _fused(queries, keys, values, scale)
    _add_behind((out[1:], lse[1:]), queries[1:], keys[:-1], values[:-1], scale)
    whole = out.flatten(0, 1), lse.flatten(0, 1)
    if not rest:
        return whole
    shorter = [x[None, :, :rest] for x in (q, k, v)]
    _add_behind((out[:1], lse[:1]), queries[:1], *shorter[1:], scale)
    return tuple(torch.cat([x[0], y]) for x, y in zip(_fused(*shorter, scale), whole, strict=True))


def _add_behind(part, q, k, v, scale: float) -> None:
    """Let the queries of `part`, blocks of a window, see the (perhaps fewer) keys of the blocks before as well, each those that
    lie behind its own place: causal too, once both are read backwards and without the key at that very place."""
    window = q.shape[2]
    q, k, v = q.flip(2)[:, :, 1:], k.flip(2)[:, :, : window - 1], v.flip(2)[:, :, : window - 1]
    some = k.shape[2]  # as many queries see some of these keys each, the others see all
    for queries, causal in ((slice(0, some), True), (slice(some, window - 1), False)):
        if len(q) and queries.start < queries.stop:
            back = slice(window - 1 - queries.stop, window - 1 - queries.start)
            behind = _fused(q[:, :, queries], k, v, scale, causal=causal)
            merge_into(tuple(x[:, back] for x in part), tuple(x.flip(1) for x in behind))


def _band(offset: int, n: int, start: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """`[n - offset, n - start]` as a mask to add: queries `offset..n` see the keys of `start..n` that are not newer, nor
    `window` older."""
    distance = torch.arange(offset, n, device=like.device)[:, None] - torch.arange(start, n, device=like.device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def _fused(q, k, v, scale: float, *, causal: bool = True, mask=None) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` `[batch, m, q_heads, v_dim]` and `lse` `[batch, m, q_heads]` in float32, of `[batch, heads, n, dim]`; causal (of as
    many queries as keys), or as `mask` says, or over every key."""
    if q.device.type == "cuda":
        out, lse, *_ = _flash_on_cuda(q, k, v, 0.0, causal, False, scale=scale)
    else:
        out, lse = _flash_on_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).float(), lse.float().transpose(1, 2)
