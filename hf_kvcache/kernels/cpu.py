"""The native CPU kernels: `cpu.cpp` through ctypes. The computation is documented there; this file only marshals.

What does not change between calls is marshalled once: the description of a layer's pages is kept on its `Pages`, that of a
view, which serves all layers of a forward, on its `View`. Arrays of a view may be written to but not replaced after its
first use.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch

from .. import files
from ..codecs.base import Codec, Geometry
from ..codecs.packing import LANES
from .base import Pages, View

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FLOAT8 = 3
CODES = {8: 4, 4: 5, 2: 6}

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Operand(ctypes.Structure):
    _fields_ = [("format", _i32), ("dim", _i32), ("data", _i64), ("scale", _i64), ("zero", _i64)]


class _Pages(ctypes.Structure):
    _fields_ = [("addresses", _pointer), ("kv_heads", _i32), ("block_size", _i32), ("k", _Operand), ("v", _Operand)]


class _View(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ids", "first", "entry_begin", "n_sealed", "entry_end", "begin", "end")),
        *((name, _pointer) for name in ("cos", "sin")),
        *((name, _i32) for name in ("batch", "q_len", "stride", "sinks", "half", "interleaved")),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", _pointer),
        ("batch_stride", _i64),
        ("head_stride", _i64),
        ("token_stride", _i64),
        ("dtype", _i32),
    ]


_SIGNATURES = {
    "hfkv_isa": (ctypes.c_char_p,),
    "hfkv_isa_count": (_i32,),
    "hfkv_force_isa": (None, _i32),
    "hfkv_use_openmp": (None, _pointer),
    "hfkv_decode": (None, *[_pointer] * 4, *[_i64] * 3, _i32, _i32, _f32, _f32, _i32, _pointer, _pointer),
    "hfkv_write": (None, *[_pointer] * 4, _i32, _i32),
    "hfkv_seal": (None, _pointer, _pointer, _i32, *[_pointer] * 3, _i32),
    "hfkv_seal_pages": (None, _pointer, _pointer, _i32, _pointer, _pointer, _i32),
    "hfkv_checksums": (None, _pointer, _i64, _i32, _pointer),
    "hfkv_read_pages": (_i32, _i32, _pointer, _i64, _i32, _pointer, _pointer),
}


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library beside this file, or None if it was not built or does not load here."""
    for path in sorted(Path(__file__).parent.glob("_cpu*.so")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # built for another machine
            continue
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.hfkv_use_openmp(_gomp_parallel())
        return library
    return None


def _gomp_parallel() -> int | None:
    """Address of the function that runs a parallel region in the OpenMP pool torch uses, where that speaks GNU's ABI."""
    try:
        # A symbol is looked up in the library and what it was linked to: in the OpenMP of torch and no other.
        torch_deps = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"))
        return ctypes.cast(torch_deps.GOMP_parallel, _pointer).value
    except (OSError, AttributeError):
        return None


def status() -> str:
    """One sentence: what of the native kernels is in use, or what their absence costs."""
    library = load()
    if library is None:
        return (
            "CPU kernels: not built (no _cpu*.so beside hf_kvcache/kernels/cpu.py loads), so plain torch is used, "
            "which decodes every block to float32 at every step; reinstall with a C++17 compiler present."
        )
    threads = "torch's OpenMP threads" if _gomp_parallel() else "its own threads (torch's OpenMP pool was not found)"
    return f"CPU kernels: {Path(library._name).name}, {library.hfkv_isa().decode()}, on {threads}."


def supports(geometry: Geometry, codec: Codec, q_len: int) -> bool:
    """Whether `decode` can serve this layer on this machine: any shape, for the codecs of this package."""
    known = codec.name in ("native", "fp8") or (codec.k_bits in CODES and codec.v_bits in CODES)
    return load() is not None and known and geometry.dtype in DTYPES


def decode(
    q: torch.Tensor, sealed: Pages, open_: Pages, view: View, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference.decode` computes."""
    if q.dtype not in DTYPES:
        q = q.float()
    if q.stride(-1) != 1:
        q = q.contiguous()
    batch, heads, q_len, _ = q.shape
    by_batch, by_head, by_token, _ = q.stride()
    size = q.element_size()
    out = torch.empty((batch, q_len, heads, sealed.geometry.v_dim), dtype=torch.float32)
    lse = torch.empty((batch, q_len, heads), dtype=torch.float32)
    # The descriptions are held here: another thread may replace what the pages keep while this call is under way.
    sealed_pages, open_pages, marshalled = _pages(sealed), _pages(open_), _view(view)
    load().hfkv_decode(
        sealed_pages[-1],
        open_pages[-1],
        marshalled[-1],
        q.data_ptr(),
        by_batch * size,
        by_head * size,
        by_token * size,
        DTYPES[q.dtype],
        heads,
        scale,
        softcap or 0.0,
        torch.get_num_threads(),
        out.data_ptr(),
        lse.data_ptr(),
    )
    return out, lse


def write(open_: Pages, k: torch.Tensor, v: torch.Tensor, segments: np.ndarray) -> None:
    """Copy new tokens into native pages.

    Args:
        k, v: `[batch, kv_heads, n, dim]`.
        segments: int32 `[m, 5]` of (row, first token, count, page id, first slot).
    """
    k, v = _as_stored(open_, k), _as_stored(open_, v)
    k_struct, v_struct, pages = _tensor(k), _tensor(v), _pages(open_)
    load().hfkv_write(
        pages[-1],
        ctypes.addressof(k_struct),
        ctypes.addressof(v_struct),
        segments.ctypes.data,
        len(segments),
        torch.get_num_threads(),
    )


def seal(sealed: Pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
    """Encode whole blocks of exact keys and values into pages: the bytes that `codec.encode` produces.

    Args:
        ids: int32 `[m]`, the pages to fill.
        k, v: `[batch, kv_heads, n, dim]`.
        places: int32 `[m, 2]` of (row, first token) of each block.
    """
    k, v = _as_stored(sealed, k), _as_stored(sealed, v)
    k_struct, v_struct, pages = _tensor(k), _tensor(v), _pages(sealed)
    load().hfkv_seal(
        pages[-1],
        ids.ctypes.data,
        len(ids),
        ctypes.addressof(k_struct),
        ctypes.addressof(v_struct),
        places.ctypes.data,
        torch.get_num_threads(),
    )


def seal_pages(sealed: Pages, ids: np.ndarray, open_: Pages, sources: np.ndarray) -> None:
    """Encode the full native pages `sources` (int32 `[m]`) into pages `ids` (int32 `[m]`)."""
    sealed_pages, open_pages = _pages(sealed), _pages(open_)
    load().hfkv_seal_pages(
        sealed_pages[-1], ids.ctypes.data, len(ids), open_pages[-1], sources.ctypes.data, torch.get_num_threads()
    )


def checksums(rows: np.ndarray) -> np.ndarray:
    """What `files.checksums` computes of `rows` (uint8 `[n, nbytes]`), by that where the kernels are not built."""
    if load() is None:
        return files.checksums(rows)
    rows, sums = np.ascontiguousarray(rows), np.empty(len(rows), np.uint64)
    load().hfkv_checksums(rows.ctypes.data, rows.shape[1], len(rows), sums.ctypes.data)
    return sums


def read_pages(descriptor: int, offsets: np.ndarray, sums: np.ndarray, rows: np.ndarray) -> int | None:
    """Fill `rows` (uint8 `[n, nbytes]`, C-contiguous) from `offsets` (int64 `[n]`) of a file and compare with their checksums
    (uint64 `[n]`); the first row that is not right, or None."""
    n, nbytes = rows.shape
    first = load().hfkv_read_pages(descriptor, rows.ctypes.data, nbytes, n, offsets.ctypes.data, sums.ctypes.data)
    return None if first == n else first


def _as_stored(pages: Pages, x: torch.Tensor) -> torch.Tensor:
    x = x.to(pages.geometry.dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _tensor(x: torch.Tensor) -> _Tensor:
    size = x.element_size()
    batch, head, token, _ = x.stride()
    return _Tensor(x.data_ptr(), batch * size, head * size, token * size, DTYPES[x.dtype])


def _pages(pages: Pages) -> tuple:
    """The description of `pages` and, last, its address; made anew only when its array of addresses is another one."""
    cached = pages.__dict__.get("_cpu")
    if cached is None or cached[0] is not pages.addresses:
        g = pages.geometry
        struct = _Pages(
            pages.addresses.ctypes.data,
            g.kv_heads,
            g.block_size,
            _operand(pages, "k", g.k_dim),
            _operand(pages, "v", g.v_dim),
        )
        cached = pages.__dict__["_cpu"] = (pages.addresses, struct, ctypes.addressof(struct))
    return cached


def _operand(pages: Pages, name: str, dim: int) -> _Operand:
    fields = pages.layout.fields
    if name in fields:
        return _Operand(DTYPES[fields[name].dtype], dim, fields[name].offset)
    codes, scale = fields[f"{name}_codes"], fields[f"{name}_scale"]
    if codes.dtype == torch.float8_e4m3fn:
        return _Operand(FLOAT8, dim, codes.offset, scale.offset)
    if pages.order != LANES:
        raise ValueError(f"the CPU kernels read codes in {LANES!r} order, these pages are in {pages.order!r}.")
    bits = getattr(pages.codec, f"{name}_bits")
    return _Operand(CODES[bits], dim, codes.offset, scale.offset, fields[f"{name}_zero"].offset)


def _view(view: View) -> tuple:
    """The description of `view` and, last, its address."""
    cached = view.__dict__.get("_cpu")
    if cached is None:
        batch, q_len = view.begin.shape
        arrays = (view.ids, view.first, view.entry_begin, view.n_sealed, view.entry_end, view.begin, view.end)
        angles, half, interleaved = (), 0, False
        if view.rope is not None:
            angles = tuple(x.float().contiguous() for x in (view.rope.cos, view.rope.sin))
            half, interleaved = angles[0].shape[-1], view.rope.interleaved
        struct = _View(
            *(x.ctypes.data for x in arrays),
            *((x.data_ptr() for x in angles) if angles else (None, None)),
            batch,
            q_len,
            view.ids.shape[1],
            view.sinks,
            half,
            interleaved,
        )
        cached = view.__dict__["_cpu"] = (struct, angles, ctypes.addressof(struct))
    return cached
