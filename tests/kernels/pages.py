"""Random pages and views for tests of kernels, with NaN wherever a kernel must not look."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_kvcache.codecs import codec_for
from hf_kvcache.codecs.base import Codec, Geometry
from hf_kvcache.codecs.packing import LANES, order_for
from hf_kvcache.kernels.base import Pages, Rotation, View


def empty_pages(
    codec: Codec, geometry: Geometry, count: int, *, order: str = LANES, device: str = "cpu", slabs: int = 2
) -> Pages:
    """`count` pages over several slabs in shuffled order, every byte 0xFF: NaN in all float fields."""
    layout = codec.layout(geometry, order)
    rng = np.random.default_rng(count)
    slab = rng.permutation(np.arange(count) % slabs).astype(np.int32)
    row = np.zeros(count, dtype=np.int32)
    for s in range(slabs):
        mine = np.nonzero(slab == s)[0]
        row[mine] = rng.permutation(len(mine))
    store = [
        torch.full((int((slab == s).sum()), layout.nbytes), 0xFF, dtype=torch.uint8, device=device)
        for s in range(slabs)
    ]
    addresses = np.array(
        [store[s].data_ptr() + int(r) * layout.nbytes for s, r in zip(slab, row, strict=True)], dtype=np.int64
    )
    return Pages(codec, geometry, layout, order, store, slab, row, addresses)


@dataclass
class Stored:
    """A batch of rows in pages. `k`, `v` are the exact keys and values of every row, `[kv_heads, kept, dim]` each."""

    sealed: Pages
    open_: Pages
    view: View
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def random_stored(
    codec: str,
    *,
    lengths: tuple[int, ...] = (100,),
    kv_heads: int = 2,
    k_dim: int = 64,
    v_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    q_len: int = 1,
    window: int | None = None,
    sinks: int = 0,
    rotary_dim: int = 0,
    interleaved: bool = False,
    partial: bool = False,
    outliers: float = 1.0,
    magnitude: float = 1.0,
    causal: bool = True,
    order: str | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Stored:
    """Rows of `lengths` kept positions: all full blocks but the last two sealed, the rest open, as in a running cache.

    `partial` ends some entries before their page does. Keys have a large constant offset per channel, as real ones do, and
    every ninth channel of them is `outliers` times as large; all of it, values too, is multiplied by `magnitude`.
    Queries are the last `q_len` positions if `causal`, else they follow all of them.
    """
    g = Geometry(kv_heads, k_dim, v_dim or k_dim, block_size, dtype)
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    order = order or order_for(torch.device(device))
    codec = codec_for(codec)
    counts = [_entry_counts(n, block_size, partial, rng) for n in lengths]
    stride = max(len(c) for c in counts) + 2
    batch = len(lengths)
    total = sum(len(c) for c in counts) + 3
    sealed = empty_pages(codec, g, total, order=order, device=device)
    open_ = sealed if codec.name == "native" else empty_pages(codec_for("native"), g, total, order=order, device=device)
    page = rng.permutation(total)
    ids = np.full((batch, stride), total - 1, dtype=np.int32)
    first = np.zeros((batch, stride + 1), dtype=np.int32)
    n_sealed, entry_end = np.zeros(batch, dtype=np.int32), np.zeros(batch, dtype=np.int32)
    keys, values, used = [], [], 0
    for b, row in enumerate(counts):
        offset = 2 * torch.randn(kv_heads, 1, k_dim, generator=generator)
        k = torch.randn(kv_heads, sum(row), k_dim, generator=generator) + offset
        k[..., ::9] *= outliers
        k = (magnitude * k).to(dtype)
        v = (magnitude * torch.randn(kv_heads, sum(row), g.v_dim, generator=generator)).to(dtype)
        ids[b, : len(row)] = page[used : used + len(row)]
        used += len(row)
        first[b, 1 : len(row) + 1] = np.cumsum(row)
        first[b, len(row) + 1 :] = first[b, len(row)]
        entry_end[b], n_sealed[b] = len(row), max(0, len(row) - 2)
        for e, n in enumerate(row):
            where = ids[b, e : e + 1]
            at = slice(first[b, e], first[b, e] + n)
            pages = sealed if e < n_sealed[b] else open_
            _store(pages, where, k[:, at], v[:, at])
        keys.append(k.to(device))
        values.append(v.to(device))
    kept = np.array([sum(row) for row in counts], dtype=np.int32)
    position = kept[:, None] - (q_len if causal else 0) + np.arange(q_len)[None]
    end = np.clip(position + 1, 0, kept[:, None]).astype(np.int32)
    begin = np.zeros_like(end) if window is None else np.maximum(position + 1 - window, 0).astype(np.int32)
    rope = None
    if rotary_dim:
        angles = torch.randn(batch, q_len, rotary_dim // 2, generator=generator).to(device)
        rope = Rotation(angles.cos(), angles.sin(), interleaved)
    view = View(ids, first, np.zeros(batch, dtype=np.int32), n_sealed, entry_end, begin, end, sinks, rope)
    return Stored(sealed, open_, view, keys, values)


def _entry_counts(length: int, block_size: int, partial: bool, rng: np.random.Generator) -> list[int]:
    counts = []
    while length > 0:
        n = min(length, block_size)
        if partial and n > 1 and rng.random() < 0.4:
            n = int(rng.integers(1, n))
        counts.append(n)
        length -= n
    return counts


def _store(pages: Pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor) -> None:
    """Encode `[kv_heads, n, dim]` into one page; what depends on slots beyond `n` only stays NaN."""
    n, g = k.shape[1], pages.geometry
    # The slots beyond n repeat the last token, so that scales shared by the block are those of real tokens.
    full = [torch.cat((x, x[:, -1:].expand(-1, g.block_size - n, -1)), dim=1)[None] for x in (k, v)]
    fields = pages.codec.encode(*full, pages.order)
    for name in ("k", "v", "v_scale", "v_zero"):
        if name in fields and fields[name].dim() >= 3 and n < g.block_size:
            fields[name][:, :, n:] = torch.nan
    for name in ("k_codes", "v_codes"):
        if pages.codec.name == "fp8" and n < g.block_size:
            fields[name].view(torch.uint8)[:, :, n:] = 0x7F
    device = pages.slabs[0].device
    pages.scatter(ids, {name: x.to(device) for name, x in fields.items()})


def random_queries(stored: Stored, group: int, seed: int = 1) -> torch.Tensor:
    """`[batch, heads, q_len, k_dim]`, stored as a projection leaves it: `[batch, q_len, heads, k_dim]`."""
    g = stored.sealed.geometry
    batch, q_len = stored.view.begin.shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, q_len, g.kv_heads * group, g.k_dim, generator=generator)
    return q.to(g.dtype).transpose(1, 2)


def extreme_elements(kind: str, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    if kind == "outliers":
        x[..., ::7] *= 60 * 25
    elif kind == "narrow":
        x = 3 + 1e-7 * x
    elif kind == "tiny":
        x *= 1e-7
    elif kind == "huge":
        x *= 1e5
    elif kind == "constant":
        x[:] = x[..., :1, :1].clone()
    elif kind == "zero":
        x[:] = 0
    elif kind == "signed zeros":
        x = 0 * x
    return x
