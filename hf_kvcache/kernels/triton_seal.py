"""Writing and sealing pages on CUDA, in Triton: one launch for all blocks and heads. `cuda.py` marshals.

Sealing stores the bytes that `codec.encode` produces: the same float32 operations in the same order, divisions rounded to
nearest, scales and zero points to float16 outwards (`codecs/affine.py`). On a device, torch itself divides by a constant by
multiplying with its inverse, so that there a scale may differ from torch's by one step.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..codecs.base import Codec, Geometry, PageLayout
from .triton_decode import ELEMENTS, PAGE_UNIT, padded, page_constants

HALF_MAX = tl.constexpr(65504.0)
E4M3_MAX = tl.constexpr(448.0)
STEP = tl.constexpr(32)  # tokens at a time


def write_constants(codec: Codec, geometry: Geometry, layout: PageLayout) -> dict[str, Any]:
    """What `write_kernel` is compiled for, given the layer's open pages."""
    known = page_constants(codec, geometry, layout)
    names = ("BLOCK", "K_DIM", "V_DIM", "K_PAD", "V_PAD", "K_CODES", "V_CODES")
    return {name: known[name] for name in names}


def seal_constants(codec: Codec, geometry: Geometry, layout: PageLayout) -> dict[str, Any]:
    """What `seal_kernel` is compiled for, given the layer's sealed pages."""
    known = page_constants(codec, geometry, layout)
    if codec.name == "fp8":  # written element by element
        known |= {"K_PAD": padded(geometry.k_dim), "V_PAD": padded(geometry.v_dim)}
    return known


def seal_pages_constants(
    codec: Codec, geometry: Geometry, layout: PageLayout, open_layout: PageLayout
) -> dict[str, Any]:
    """What `seal_pages_kernel` is compiled for, given the layer's sealed pages and the layout of its open ones."""
    k, v = (open_layout.fields[name].offset for name in ("k", "v"))
    return seal_constants(codec, geometry, layout) | {"ELEMENT": ELEMENTS[geometry.dtype], "OPEN_K": k, "OPEN_V": v}


@triton.jit
def _page(base_ptr, offsets_ptr, ids_ptr, n):
    return base_ptr + tl.load(offsets_ptr + tl.load(ids_ptr + n)) * PAGE_UNIT


@triton.jit
def _copy(source, source_step, target, target_step, count, DIM: tl.constexpr, PAD: tl.constexpr):
    """`count` rows of `DIM` adjacent channels."""
    d = tl.arange(0, PAD)
    for start in range(0, count, STEP):
        t = start + tl.arange(0, STEP)
        mask = (t < count)[:, None] & (d < DIM)[None, :]
        rows = tl.load(source + t.to(tl.int64)[:, None] * source_step + d[None, :], mask=mask)
        tl.store(target + t[:, None] * target_step + d[None, :], rows, mask=mask)


@triton.jit(do_not_specialize=["k_batch", "v_batch"])
def write_kernel(
    k_ptr,
    v_ptr,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    segments_ptr,
    base_ptr,
    offsets_ptr,
    BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    K_CODES: tl.constexpr,
    V_CODES: tl.constexpr,
):
    """Copy new tokens into pages of their dtype. Grid `(segments, kv_heads)`; `segments` as `reference.write` has them."""
    segment, h = segments_ptr + tl.program_id(0) * 5, tl.program_id(1)
    b, token = tl.load(segment).to(tl.int64), tl.load(segment + 1).to(tl.int64)
    count, slot = tl.load(segment + 2), tl.load(segment + 4)
    page = _page(base_ptr, offsets_ptr, segment, 3)
    place = h * BLOCK + slot
    k_page = (page + K_CODES).to(tl.pointer_type(k_ptr.dtype.element_ty)) + place * K_DIM
    v_page = (page + V_CODES).to(tl.pointer_type(v_ptr.dtype.element_ty)) + place * V_DIM
    _copy(k_ptr + b * k_batch + h * k_head + token * k_token, k_token, k_page, K_DIM, count, K_DIM, K_PAD)
    _copy(v_ptr + b * v_batch + h * v_head + token * v_token, v_token, v_page, V_DIM, count, V_DIM, V_PAD)


@triton.jit
def _half_down(x):
    """The largest float16 not above `x`, in float32."""
    half = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX).to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    lower = tl.where(bits > 0, bits - 1, tl.where((bits & 0x7FFF) == 0, -0x7FFF, bits + 1))
    bits = tl.where(half.to(tl.float32) > x, lower, bits)
    stepped = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.minimum(tl.maximum(stepped, -HALF_MAX), HALF_MAX)


@triton.jit
def _grid(low, high, LEVELS: tl.constexpr):
    """Scale and zero point of elements between `low` and `high`: `affine.quantize`."""
    zero = _half_down(low + 0.0)
    scale = -_half_down(-tl.div_rn(high + 0.0 - zero, LEVELS * 1.0))
    return scale, zero


@triton.jit
def _rint(x):
    """Rounded to the nearest integer, halves to even, for `|x| < 2 ** 22`: adding 1.5 * 2^23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _codes(x, scale, zero, LEVELS: tl.constexpr):
    steps = tl.div_rn(x - zero, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))
    return _rint(tl.minimum(tl.maximum(steps, 0.0), LEVELS)).to(tl.int32)


@triton.jit
def _rows(source, step, t, c, inside):
    return tl.load(source + t.to(tl.int64)[:, None] * step + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _seal_keys(
    source,
    step,
    codes,
    scales,
    zeros,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    PAD: tl.constexpr,
):
    """One head's keys: a scale and a zero point per channel of the block."""
    WIDTH: tl.constexpr = (DIM + C - 1) // C
    LEVELS: tl.constexpr = (1 << BITS) - 1
    d, t = tl.arange(0, PAD), tl.arange(0, STEP)
    grids = ()
    for p in tl.static_range(C):
        c = p * WIDTH + d
        valid = (d < WIDTH) & (c < DIM)
        low, high = tl.full([PAD], float("inf"), tl.float32), tl.full([PAD], -float("inf"), tl.float32)
        for start in range(0, BLOCK, STEP):
            inside = (start + t < BLOCK)[:, None] & valid[None, :]
            x = _rows(source, step, start + t, c, inside)
            low = tl.minimum(low, tl.min(tl.where(inside, x, float("inf")), axis=0))
            high = tl.maximum(high, tl.max(tl.where(inside, x, -float("inf")), axis=0))
        scale, zero = _grid(tl.where(valid, low, 0.0), tl.where(valid, high, 0.0), LEVELS)
        tl.store(scales + c, scale.to(tl.float16), mask=valid)
        tl.store(zeros + c, zero.to(tl.float16), mask=valid)
        grids = grids + (scale, zero)
    for start in range(0, BLOCK // T, STEP):
        at = start + t
        word = tl.zeros([STEP, PAD], tl.int32)
        for j in tl.static_range(T):
            for p in tl.static_range(C):
                c = p * WIDTH + d
                inside = (at < BLOCK // T)[:, None] & ((d < WIDTH) & (c < DIM))[None, :]
                x = _rows(source, step, j * (BLOCK // T) + at, c, inside)
                code = _codes(x, grids[2 * p][None, :], grids[2 * p + 1][None, :], LEVELS)
                word |= tl.where(inside, code, 0) << ((j * C + p) * BITS)
        mask = (at < BLOCK // T)[:, None] & (d < WIDTH)[None, :]
        tl.store(codes + at[:, None] * WIDTH + d[None, :], word.to(tl.int16), mask=mask)


@triton.jit
def _seal_values(
    source,
    step,
    codes,
    scales,
    zeros,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    PAD: tl.constexpr,
):
    """One head's values: a scale and a zero point per token."""
    WIDTH: tl.constexpr = (DIM + C - 1) // C
    LEVELS: tl.constexpr = (1 << BITS) - 1
    d, t = tl.arange(0, PAD), tl.arange(0, STEP)
    for start in range(0, BLOCK // T, STEP):
        at = start + t
        word = tl.zeros([STEP, PAD], tl.int32)
        for j in tl.static_range(T):
            slot = j * (BLOCK // T) + at
            low, high = tl.full([STEP], float("inf"), tl.float32), tl.full([STEP], -float("inf"), tl.float32)
            for p in tl.static_range(C):
                c = p * WIDTH + d
                inside = (at < BLOCK // T)[:, None] & ((d < WIDTH) & (c < DIM))[None, :]
                x = _rows(source, step, slot, c, inside)
                low = tl.minimum(low, tl.min(tl.where(inside, x, float("inf")), axis=1))
                high = tl.maximum(high, tl.max(tl.where(inside, x, -float("inf")), axis=1))
            valid = at < BLOCK // T
            scale, zero = _grid(tl.where(valid, low, 0.0), tl.where(valid, high, 0.0), LEVELS)
            tl.store(scales + slot, scale.to(tl.float16), mask=valid)
            tl.store(zeros + slot, zero.to(tl.float16), mask=valid)
            for p in tl.static_range(C):
                c = p * WIDTH + d
                inside = (at < BLOCK // T)[:, None] & ((d < WIDTH) & (c < DIM))[None, :]
                x = _rows(source, step, slot, c, inside)
                code = _codes(x, scale[:, None], zero[:, None], LEVELS)
                word |= tl.where(inside, code, 0) << ((j * C + p) * BITS)
        mask = (at < BLOCK // T)[:, None] & (d < WIDTH)[None, :]
        tl.store(codes + at[:, None] * WIDTH + d[None, :], word.to(tl.int16), mask=mask)


@triton.jit
def _e4m3(x):
    """The bits of `x`, at most 448 in size, rounded to e4m3: halves to even, as torch converts."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of fraction, exponents 120 lower
    subnormal = _rint(size * 512.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _seal_fp8(source, step, codes, scale_ptr, BLOCK: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """One head's keys or values: one scale."""
    d, t = tl.arange(0, PAD), tl.arange(0, STEP)
    largest = 0.0
    for start in range(0, BLOCK, STEP):
        inside = (start + t < BLOCK)[:, None] & (d < DIM)[None, :]
        largest = tl.maximum(largest, tl.max(tl.abs(_rows(source, step, start + t, d, inside))))
    scale = tl.div_rn(largest, 448.0)
    tl.store(scale_ptr, scale)
    for start in range(0, BLOCK, STEP):
        inside = (start + t < BLOCK)[:, None] & (d < DIM)[None, :]
        x = _rows(source, step, start + t, d, inside)
        x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * tl.where(scale > 0, scale, 1.0))
        x = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
        tl.store(codes + (start + t)[:, None] * DIM + d[None, :], _e4m3(x), mask=inside)


@triton.jit
def _seal(
    k_rows,
    k_step,
    v_rows,
    v_step,
    page,
    h,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_C: tl.constexpr,
    V_C: tl.constexpr,
    K_T: tl.constexpr,
    V_T: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    K_CODES: tl.constexpr,
    V_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_ZERO: tl.constexpr,
):
    """Encode the block of one head whose rows begin at `k_rows`, `v_rows` into `page`."""
    if FORMAT == "fp8":
        k_scale = (page + K_SCALE).to(tl.pointer_type(tl.float32)) + h
        v_scale = (page + V_SCALE).to(tl.pointer_type(tl.float32)) + h
        _seal_fp8(k_rows, k_step, page + K_CODES + h * BLOCK * K_DIM, k_scale, BLOCK, K_DIM, K_PAD)
        _seal_fp8(v_rows, v_step, page + V_CODES + h * BLOCK * V_DIM, v_scale, BLOCK, V_DIM, V_PAD)
    else:
        k_codes = (page + K_CODES).to(tl.pointer_type(tl.int16)) + h * (BLOCK // K_T) * ((K_DIM + K_C - 1) // K_C)
        v_codes = (page + V_CODES).to(tl.pointer_type(tl.int16)) + h * (BLOCK // V_T) * ((V_DIM + V_C - 1) // V_C)
        k_scale = (page + K_SCALE).to(tl.pointer_type(tl.float16)) + h * K_DIM
        k_zero = (page + K_ZERO).to(tl.pointer_type(tl.float16)) + h * K_DIM
        v_scale = (page + V_SCALE).to(tl.pointer_type(tl.float16)) + h * BLOCK
        v_zero = (page + V_ZERO).to(tl.pointer_type(tl.float16)) + h * BLOCK
        _seal_keys(k_rows, k_step, k_codes, k_scale, k_zero, BLOCK, K_DIM, K_BITS, K_C, K_T, K_PAD)
        _seal_values(v_rows, v_step, v_codes, v_scale, v_zero, BLOCK, V_DIM, V_BITS, V_C, V_T, V_PAD)


@triton.jit(do_not_specialize=["k_batch", "v_batch"])
def seal_kernel(
    k_ptr,
    v_ptr,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    places_ptr,
    base_ptr,
    offsets_ptr,
    ids_ptr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_C: tl.constexpr,
    V_C: tl.constexpr,
    K_T: tl.constexpr,
    V_T: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    K_CODES: tl.constexpr,
    V_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_ZERO: tl.constexpr,
):
    """Encode blocks of the input. Grid `(blocks, kv_heads)`; `places` as `reference.seal` has them."""
    n, h = tl.program_id(0), tl.program_id(1)
    b, token = tl.load(places_ptr + n * 2).to(tl.int64), tl.load(places_ptr + n * 2 + 1).to(tl.int64)
    k_rows = k_ptr + b * k_batch + h * k_head + token * k_token
    v_rows = v_ptr + b * v_batch + h * v_head + token * v_token
    page = _page(base_ptr, offsets_ptr, ids_ptr, n)
    _seal(
        k_rows,
        k_token,
        v_rows,
        v_token,
        page,
        h,
        FORMAT,
        BLOCK,
        K_DIM,
        V_DIM,
        K_BITS,
        V_BITS,
        K_C,
        V_C,
        K_T,
        V_T,
        K_PAD,
        V_PAD,
        K_CODES,
        V_CODES,
        K_SCALE,
        V_SCALE,
        K_ZERO,
        V_ZERO,
    )


@triton.jit
def seal_pages_kernel(
    open_base_ptr,
    open_offsets_ptr,
    sources_ptr,
    base_ptr,
    offsets_ptr,
    ids_ptr,
    ELEMENT: tl.constexpr,
    OPEN_K: tl.constexpr,
    OPEN_V: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_C: tl.constexpr,
    V_C: tl.constexpr,
    K_T: tl.constexpr,
    V_T: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    K_CODES: tl.constexpr,
    V_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_ZERO: tl.constexpr,
):
    """Encode full pages of elements `ELEMENT`. Grid `(blocks, kv_heads)`. OPEN_K, OPEN_V: their fields' byte offsets."""
    n, h = tl.program_id(0), tl.program_id(1)
    source = _page(open_base_ptr, open_offsets_ptr, sources_ptr, n)
    k_rows = (source + OPEN_K).to(tl.pointer_type(ELEMENT)) + h * BLOCK * K_DIM
    v_rows = (source + OPEN_V).to(tl.pointer_type(ELEMENT)) + h * BLOCK * V_DIM
    page = _page(base_ptr, offsets_ptr, ids_ptr, n)
    _seal(
        k_rows,
        K_DIM,
        v_rows,
        V_DIM,
        page,
        h,
        FORMAT,
        BLOCK,
        K_DIM,
        V_DIM,
        K_BITS,
        V_BITS,
        K_C,
        V_C,
        K_T,
        V_T,
        K_PAD,
        V_PAD,
        K_CODES,
        V_CODES,
        K_SCALE,
        V_SCALE,
        K_ZERO,
        V_ZERO,
    )
