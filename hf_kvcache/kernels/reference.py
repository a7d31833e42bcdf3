"""The definition of correct: plain torch, float32, short. Every other kernel is tested against this one, and it serves
where no other kernel does (grouped heads are folded into the query length, which on a CPU is ten times faster than
repeating keys and values)."""

from __future__ import annotations

import numpy as np
import torch

from .base import Pages, View

QUERY_CHUNK = 256  # queries of a prefill attended to at a time: bounds the scores held at once


def decode(
    q: torch.Tensor, sealed: Pages, open_: Pages, view: View, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `q` `[batch, q_heads, q_len, k_dim]` over stored pages.

    Returns:
        `out` `[batch, q_len, q_heads, v_dim]` and `lse` `[batch, q_len, q_heads]`, float32, as `merge.py` wants them.
    """
    g = sealed.geometry
    batch, heads, q_len, _ = q.shape
    out = q.new_zeros((batch, q_len, heads, g.v_dim), dtype=torch.float32)
    lse = q.new_full((batch, q_len, heads), -torch.inf, dtype=torch.float32)
    turned = None if view.rope is None else view.rope.apply(q)
    for b in range(batch):
        if view.entry_begin[b] == view.entry_end[b]:
            continue
        k, v, index = stored(sealed, open_, view, b)
        begin = torch.from_numpy(view.begin[b]).to(q.device)[:, None]
        end = torch.from_numpy(view.end[b]).to(q.device)[:, None]
        recent = (index >= begin) & (index < end)
        sink = (index < view.sinks) & (index < end) & ~recent
        scores = _scores(q[b], k, scale)
        if turned is not None:
            scores = torch.where(sink, _scores(turned[b], k, scale), scores)
        out[b], lse[b] = _softmax_times_values(scores, recent | sink, v, softcap)
    return out, lse


def stored(sealed: Pages, open_: Pages, view: View, b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values `[kv_heads, n, dim]` of row `b`'s entries in float32, and their stored indices `[n]`."""
    lo, mid, hi = view.entry_begin[b], view.n_sealed[b], view.entry_end[b]
    mid = min(max(mid, lo), hi)
    parts = [pages.decode(view.ids[b, i:j]) for pages, i, j in ((sealed, lo, mid), (open_, mid, hi)) if j > i]
    k, v = (torch.cat(tensors).transpose(0, 1).flatten(1, 2) for tensors in zip(*parts, strict=True))
    block = sealed.geometry.block_size
    counts = np.diff(view.first[b, lo : hi + 1])
    slots = np.concatenate([e * block + np.arange(n) for e, n in enumerate(counts)])
    slots = torch.from_numpy(slots).to(k.device)
    first = int(view.first[b, lo])
    index = torch.arange(first, first + len(slots), device=k.device)
    return k[:, slots], v[:, slots], index


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
    """Causal attention of one row's newest queries over the new keys themselves, before they are stored.

    `q` `[q_heads, m, k_dim]`, `k` `[kv_heads, n, k_dim]`, `v` `[kv_heads, n, v_dim]` with `m <= n`: the queries are
    those of the last `m` keys. Query `i` sees keys `(i - window, i]` and the first `sinks` keys; for the latter
    `turned` (shape of `q`) replaces `q` where given.

    Returns:
        `out` `[m, q_heads, v_dim]` and `lse` `[m, q_heads]`, float32.
    """
    n, offset = k.shape[1], k.shape[1] - q.shape[1]
    outs, lses = [], []
    for i in range(offset, n, QUERY_CHUNK):
        j = min(i + QUERY_CHUNK, n)
        start = 0 if window is None else max(0, i + 1 - window)
        keep = [*range(min(sinks, start)), *range(start, j)]
        index = torch.tensor(keep, device=q.device) if start > 0 and sinks else torch.arange(start, j, device=q.device)
        keys, values = (x[:, index] if start > 0 and sinks else x[:, start:j] for x in (k, v))
        position = torch.arange(i, j, device=q.device)[:, None]
        recent = index <= position
        if window is not None:
            recent &= index > position - window
        sink = (index < sinks) & (index <= position) & ~recent
        queries = slice(i - offset, j - offset)
        scores = _scores(q[:, queries], keys.float(), scale)
        if turned is not None:
            scores = torch.where(sink, _scores(turned[:, queries], keys.float(), scale), scores)
        out, lse = _softmax_times_values(scores, recent | sink, values.float(), softcap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of one row's `q` `[q_heads, m, k_dim]` over `k`, `v` `[kv_heads, n, dim]` as `visible` `[m, n]` says."""
    return _softmax_times_values(_scores(q, k.float(), scale), visible, v.float(), None)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """`[kv_heads, group, q_len, n]` of `q` `[q_heads, q_len, dim]` and `k` `[kv_heads, n, dim]`."""
    heads, q_len, dim = q.shape
    folded = q.float().reshape(k.shape[0], heads // k.shape[0] * q_len, dim) * scale
    return (folded @ k.transpose(-1, -2)).view(k.shape[0], -1, q_len, k.shape[1])


def _softmax_times_values(
    scores: torch.Tensor, visible: torch.Tensor, v: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` `[q_len, q_heads, v_dim]` and `lse` `[q_len, q_heads]`; `visible` is `[q_len, n]`."""
    kv_heads, group, q_len, n = scores.shape
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [kv_heads, group, q_len]
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    out = weights.reshape(kv_heads, group * q_len, n) @ v
    out = out.view(kv_heads * group, q_len, v.shape[-1])
    return out.transpose(0, 1), lse.view(kv_heads * group, q_len).T


def write(open_: Pages, k: torch.Tensor, v: torch.Tensor, segments: np.ndarray) -> None:
    """Copy new tokens of `k`, `v` `[batch, kv_heads, n, dim]` into pages in the model's dtype.

    `segments` int32 `[m, 5]`: row, first token, number of tokens, page id, first slot.
    """
    for row, token, count, page, slot in segments.tolist():
        slab = open_.slabs[open_.slab[page]][open_.row[page]][None]
        views = open_.layout.views(slab)
        for name, new in (("k", k), ("v", v)):
            views[name][0, :, slot : slot + count] = new[row, :, token : token + count]


def seal(sealed: Pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
    """Encode whole blocks of `k`, `v` `[batch, kv_heads, n, dim]` into pages `ids` of the codec.

    `places` int32 `[m, 2]`: row and first token of each block.
    """
    size = sealed.geometry.block_size
    blocks = [tuple(x[row, :, token : token + size] for x in (k, v)) for row, token in places.tolist()]
    keys, values = (torch.stack(tensors) for tensors in zip(*blocks, strict=True))
    sealed.scatter(ids, sealed.codec.encode(keys, values, sealed.order))


def seal_pages(sealed: Pages, ids: np.ndarray, open_: Pages, sources: np.ndarray) -> None:
    """Encode open pages `sources` into pages `ids` of the codec."""
    fields = open_.gather(sources)
    sealed.scatter(ids, sealed.codec.encode(fields["k"], fields["v"], sealed.order))
