"""The CUDA kernels (`triton_decode.py`, `triton_seal.py`) and what they are given. Triton is imported when a kernel runs.

What does not change between calls goes to the device once: where a layer's pages are is kept on its `Pages`, what a view says
on the `View`, which serves all layers of a forward. The arrays of a view, and those that say what to write and to seal, may
not change after their first use.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import deque
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch

from ..codecs.base import FIELD_ALIGNMENT, Codec, Geometry
from ..codecs.packing import PLANAR
from .base import Pages, View

BITS = (8, 4, 2)
TRITON = (3, 6)  # the oldest that the kernels have been compiled with
CAPABILITY = (8, 0)  # the first whose tensor cores take bfloat16
ROWS = 16  # query rows of a program
MAX_GRID = 65535  # programs that CUDA takes along the second axis of a grid
WAVES = 2  # programs that a decode over a long context starts, in units of what runs at once
SEALED, OPEN, ALL = range(3)  # sources of entries


@functools.cache
def _obstacle() -> str | None:
    """Why the kernels cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip:
        return "this is ROCm, for which they have not been built"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return f"{torch.cuda.get_device_name()} is older than compute capability {'.'.join(map(str, CAPABILITY))}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'hf-kvcache[cuda]')"
    if tuple(map(int, version("triton").split(".")[:2])) < TRITON:
        return f"Triton {version('triton')} is older than {'.'.join(map(str, TRITON))}"
    return None


def available() -> bool:
    """Whether the kernels run on this machine's device."""
    return _obstacle() is None


def status() -> str:
    """One sentence: which CUDA kernels are in use, or why none are and what serves."""
    if available():
        return f"CUDA kernels: Triton {version('triton')}, on {torch.cuda.get_device_name()}."
    return f"CUDA kernels: not in use, because {_obstacle()}; plain torch would serve pages on a device."


def supports(geometry: Geometry, codec: Codec, q_len: int) -> bool:
    """Whether `decode` can serve this layer: the codecs of this package, head sizes up to 256 (128 in float32)."""
    from . import triton_decode as kernels

    known = codec.name in ("native", "fp8") or (codec.k_bits in BITS and codec.v_bits in BITS)
    if not known or geometry.dtype not in kernels.ELEMENTS or kernels.launch_for(codec, geometry) is None:
        return False
    return codec.name != "fp8" or geometry.k_dim % 2 == geometry.v_dim % 2 == 0  # two elements are read as one word


def decode(
    q: torch.Tensor, sealed: Pages, open_: Pages, view: View, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference.decode` computes, for a positive `scale`."""
    kv_heads = sealed.geometry.kv_heads
    at_once = MAX_GRID // kv_heads * ROWS // (q.shape[1] // kv_heads)
    if q.shape[2] <= at_once:
        return _decode(q, sealed, open_, view, scale, softcap)
    cuts = [slice(start, start + at_once) for start in range(0, q.shape[2], at_once)]
    parts = [_decode(q[:, :, cut], sealed, open_, _queries(view, cut), scale, softcap) for cut in cuts]
    return tuple(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))


def _queries(view: View, cut: slice) -> View:
    """`view` for some of its queries."""
    begin, end = (np.ascontiguousarray(x[:, cut]) for x in (view.begin, view.end))
    rope = view.rope and replace(view.rope, cos=view.rope.cos[:, cut], sin=view.rope.sin[:, cut])
    return replace(view, begin=begin, end=end, rope=rope)


def _decode(
    q: torch.Tensor, sealed: Pages, open_: Pages, view: View, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import triton_decode as kernels

    if q.dtype not in kernels.ELEMENTS:
        q = q.float()
    if q.stride(-1) != 1:
        q = q.contiguous()
    batch, heads, q_len, _ = q.shape
    g, seen = sealed.geometry, _seen(view, q.device)
    group = heads // g.kv_heads
    tiles_of_rows = -(-group * q_len // ROWS)
    launches = []
    for source, pages in ((ALL, open_),) if sealed is open_ else ((SEALED, sealed), (OPEN, open_)):
        if any(seen.entries[source]):
            fixed, launch = _decode_constants(pages)
            tiles = [-(-n * fixed["CHUNKS"] // fixed["PAGES"]) for n in seen.entries[source]]
            splits = _splits(*tiles, batch * g.kv_heads * tiles_of_rows, q.device)
            launches.append((source, pages, fixed, launch, splits))

    out = q.new_empty((batch, q_len, heads, g.v_dim), dtype=torch.float32)
    lse = q.new_empty((batch, q_len, heads), dtype=torch.float32)
    count = sum(sum(splits) for *_, splits in launches)
    if count == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    parts, part_lses = (x[None] if count == 1 else x.new_empty((count, *x.shape)) for x in (out, lse))
    done = 0
    with torch.cuda.device_of(q):
        for source, pages, fixed, launch, (sink_splits, recent_splits) in launches:
            base, offsets = _places(pages)
            kernels.decode_kernel[(sink_splits + recent_splits, g.kv_heads * tiles_of_rows, batch)](
                q,
                *(seen.angles or (lse, lse)),
                base,
                offsets,
                seen.table,
                parts[done:],
                part_lses[done:],
                float(scale),
                float(softcap or 0.0),
                *q.stride()[:3],
                seen.half,
                g.kv_heads,
                group,
                q_len,
                view.ids.shape[1],
                view.sinks,
                sink_splits,
                source,
                **fixed,
                ONE_QUERY=q_len == 1,
                ROPE=seen.rope,
                SOFTCAP=softcap is not None,
                num_warps=launch.warps,
                num_stages=launch.stages,
            )
            done += sink_splits + recent_splits
        if count > 1:
            rows, width = batch * q_len * heads, kernels.padded(g.v_dim)
            kernels.combine_kernel[(rows,)](parts, part_lses, out, lse, count, V_DIM=g.v_dim, V_PAD=width)
    return out, lse


def _splits(sink_tiles: int, recent_tiles: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Splits over sinks and over the recent range: enough for all multiprocessors, of as many tiles each."""
    wanted = max(1, WAVES * _multiprocessors(device) // programs)
    share = -(-(sink_tiles + recent_tiles) // wanted)
    return -(-sink_tiles // share), -(-recent_tiles // share)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def write(open_: Pages, k: torch.Tensor, v: torch.Tensor, segments: np.ndarray) -> None:
    """What `reference.write` does."""
    from . import triton_seal as kernels

    k, v = _as_stored(open_, k), _as_stored(open_, v)
    fixed = kernels.write_constants(open_.codec, open_.geometry, open_.layout)
    with torch.cuda.device_of(k):
        kernels.write_kernel[(len(segments), open_.geometry.kv_heads)](
            k, v, *k.stride()[:3], *v.stride()[:3], _on_device(segments, k.device), *_places(open_), **fixed
        )


def seal(sealed: Pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
    """What `reference.seal` does."""
    from . import triton_seal as kernels

    k, v = _as_stored(sealed, k), _as_stored(sealed, v)
    fixed = kernels.seal_constants(sealed.codec, sealed.geometry, sealed.layout)
    places, ids = (_on_device(x, k.device) for x in (places, ids))
    with torch.cuda.device_of(k):
        kernels.seal_kernel[(len(ids), sealed.geometry.kv_heads)](
            k, v, *k.stride()[:3], *v.stride()[:3], places, *_places(sealed), ids, **fixed
        )


def seal_pages(sealed: Pages, ids: np.ndarray, open_: Pages, sources: np.ndarray) -> None:
    """What `reference.seal_pages` does."""
    from . import triton_seal as kernels

    fixed = kernels.seal_pages_constants(sealed.codec, sealed.geometry, sealed.layout, open_.layout)
    base, offsets = _places(sealed)
    sources, ids = (_on_device(x, base.device) for x in (sources, ids))
    with torch.cuda.device_of(base):
        kernels.seal_pages_kernel[(len(ids), sealed.geometry.kv_heads)](
            *_places(open_), sources, base, offsets, ids, **fixed
        )


def _as_stored(pages: Pages, x: torch.Tensor) -> torch.Tensor:
    x = x.to(pages.geometry.dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


_sent: deque[tuple[np.ndarray, torch.Tensor]] = deque(maxlen=8)


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on the device; the layers of a pass share one."""
    where = lambda x: (x.__array_interface__["data"][0], x.shape)  # noqa: E731
    for known, tensor in tuple(_sent):
        if where(known) == where(array) and tensor.device == device:
            return tensor
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device, non_blocking=True)
    _sent.append((array, tensor))
    return tensor


def _places(pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """A slab, and int64 `[pages]`: how far from its start each page is, in units of `FIELD_ALIGNMENT` bytes."""
    base = next(slab for slab in pages.slabs if len(slab))
    # Ids get new addresses with a new array, or, when a slab comes for ids that are known, in this one.
    state = (len(pages.slabs), base.data_ptr())
    cached = pages.__dict__.get("_cuda_places")
    if cached is None or cached[0] is not pages.addresses or cached[1] != state:
        if pages.order != PLANAR:
            raise ValueError(f"the CUDA kernels read codes in {PLANAR!r} order, these pages are in {pages.order!r}.")
        offsets = torch.from_numpy((pages.addresses - base.data_ptr()) // FIELD_ALIGNMENT)
        offsets = offsets.to(base.device, non_blocking=True)
        cached = pages.__dict__["_cuda_places"] = (pages.addresses, state, offsets)
    return base, cached[2]


def _decode_constants(pages: Pages) -> tuple[dict[str, Any], Any]:
    """What the decode kernel is compiled for, and its row of the launch table."""
    cached = pages.__dict__.get("_cuda_constants")
    if cached is None:
        from . import triton_decode as kernels

        arguments = (pages.codec, pages.geometry, pages.layout)
        cached = kernels.decode_constants(*arguments), kernels.launch_for(*arguments[:2])
        pages.__dict__["_cuda_constants"] = cached
    return cached


class _Seen(NamedTuple):
    """A view on the device: the table that `decode_kernel` documents, for each source the largest numbers of entries that
    a row has to visit for its sinks and for its recent range, and the angles of sinks (`rope` names how they pair channels)."""

    table: torch.Tensor
    entries: list[tuple[int, int]]
    angles: tuple[torch.Tensor, ...]
    half: int
    rope: str


def _seen(view: View, device: torch.device) -> _Seen:
    kept = view.__dict__.setdefault("_cuda", {})
    if device not in kept:
        ranges = _ranges(view)
        arrays = (ranges, view.begin, view.end, view.ids, view.first)
        table = torch.from_numpy(np.concatenate([x.ravel() for x in arrays])).to(device, non_blocking=True)
        longest = [(int((r[:, 1] - r[:, 0]).max()), int((r[:, 3] - r[:, 2]).max())) for r in ranges]
        angles, half, rope = (), 0, "none"
        if view.rope is not None and view.sinks:
            angles = tuple(x.to(device, torch.float32).contiguous() for x in (view.rope.cos, view.rope.sin))
            half, rope = angles[0].shape[-1], "interleaved" if view.rope.interleaved else "halves"
        kept[device] = _Seen(table, longest, angles, half, rope)
    return kept[device]


def _ranges(view: View) -> np.ndarray:
    """The entries that any query of a row sees: int32 `[3 sources, batch, (sinks from, to, recent from, to)]`."""
    lo, hi = view.entry_begin, view.entry_end
    entry = np.arange(view.ids.shape[1])
    stored = entry < hi[:, None]
    asked = view.begin < view.end
    oldest = np.where(asked, view.begin, np.iinfo(np.int32).max).min(axis=1, initial=np.iinfo(np.int32).max)
    newest = np.where(asked, view.end, 0).max(axis=1, initial=0)
    # A query sees the sinks that its recent range does not begin before.
    passed = np.minimum(np.minimum(view.begin, view.end), view.sinks).max(axis=1, initial=0)
    before = lambda index: (stored & (view.first[:, :-1] < index[:, None])).sum(axis=1)  # noqa: E731
    sinks_to, recent_to = before(passed), before(newest)
    recent_from = (stored & (view.first[:, 1:] <= oldest[:, None])).sum(axis=1)
    middle = np.clip(view.n_sealed, lo, hi)
    ranges = []
    for start, stop in ((lo, middle), (middle, hi), (lo, hi)):
        cut = lambda x: np.clip(x, start, stop)  # noqa: B023, E731
        ranges.append(
            np.stack([start, cut(sinks_to), cut(recent_from), np.maximum(cut(recent_from), cut(recent_to))], axis=1)
        )
    return np.stack(ranges).astype(np.int32)
