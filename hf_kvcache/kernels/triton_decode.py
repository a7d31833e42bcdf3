"""Decode attention over pages on CUDA, in Triton. `cuda.py` marshals what these kernels are given.

One program attends from up to 16 query rows (the grouped heads of one KV head times the queries of a pass) to one
split of a row's entries: online softmax over tiles of tokens, partial `(out, lse)` per split, merged by
`combine_kernel` (split-KV: Flash-Decoding, Dao et al. 2023). Packed codes meet the query as they are stored:

- keys, a scale `s` and zero point `z` per channel: `q . k_t = sum_d (q_d s_d) c_td + sum_d q_d z_d`. The scale is folded
  into the query once per page, the zero point is one number per query row.
- values, a scale and zero point per token: `o = sum_t (p_t s_t) c_td + sum_t p_t z_t`, likewise.
- a 16-bit word holds the codes of `C` channel planes and `T` token planes (`codecs/packing.py`), so a dot product is `C`
  dot products of shifted and masked words; bits that spell `1024 + code` in float16 make the conversion two operations.

Tensor cores multiply float16 (bfloat16 for pages in bfloat16). A query row is first scaled by a power of two so that its
largest channel is `2 ** (bits - 2)` to twice that, and probabilities carry the same factor: with scales that come from
float16 data, `q_d s_d` and `p_t s_t` then never overflow, and keep full precision down to data whose range is 4e-4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..codecs.base import FIELD_ALIGNMENT, Codec, Geometry, PageLayout
from ..codecs.packing import planes_for

ROWS = tl.constexpr(16)  # query rows of a tile: what one tensor core instruction takes
COMBINED = tl.constexpr(16)  # parts that are merged at a time
LOG2E = tl.constexpr(1.4426950408889634)
E4M3_FACTOR = tl.constexpr(256.0)  # what `_e4m3` leaves out
PAGE_UNIT = tl.constexpr(FIELD_ALIGNMENT)  # bytes in which page offsets count

ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
INTERPRETED = triton.knobs.runtime.interpret


class Launch(NamedTuple):
    """How a kernel is compiled: warps of a program, stages of its software pipeline, tokens of a tile at most."""

    warps: int
    stages: int
    tokens: int


# By representation and head size, smallest first; the same on every architecture. `tests/aot` compiles all rows without a GPU:
# none spills, and the bytes that a row moves per instruction are recorded there.
LAUNCHES = {
    ("native", 64): Launch(4, 3, 64),
    ("native", 128): Launch(4, 2, 64),
    ("native", 256): Launch(4, 2, 32),
    ("float32", 64): Launch(4, 2, 32),
    ("float32", 128): Launch(4, 2, 32),  # wider ones spill
    ("fp8", 64): Launch(4, 3, 64),
    ("fp8", 128): Launch(4, 3, 64),
    ("fp8", 256): Launch(8, 3, 64),
    ("int8", 64): Launch(2, 3, 64),
    ("int8", 128): Launch(4, 3, 64),
    ("int8", 256): Launch(4, 3, 64),
    ("int4", 64): Launch(1, 3, 32),
    ("int4", 128): Launch(2, 3, 64),
    ("int4", 256): Launch(4, 3, 64),
    ("int2", 64): Launch(2, 2, 64),
    ("int2", 128): Launch(2, 3, 64),
    ("int2", 256): Launch(4, 3, 64),
}


def launch_for(codec: Codec, geometry: Geometry) -> Launch | None:
    """A layer's row of the table: mixtures take that of their smaller codes, head sizes the next one. None: no row."""
    size, name = max(geometry.k_dim, geometry.v_dim), codec.name
    if name == "native" and geometry.dtype == torch.float32:
        name = "float32"
    elif name not in ("native", "fp8"):
        name = f"int{min(codec.k_bits, codec.v_bits)}"
    return next((row for (known, largest), row in LAUNCHES.items() if known == name and size <= largest), None)


def page_constants(codec: Codec, geometry: Geometry, layout: PageLayout) -> dict[str, Any]:
    """What kernels are compiled for on account of a layer's pages, by the names that kernels use."""
    g, fields = geometry, layout.fields
    offset = lambda name: fields[name].offset if name in fields else 0  # noqa: E731
    known = {"BLOCK": g.block_size, "FORMAT": codec.name if codec.name in ("native", "fp8") else "int"}
    for side, dim, bits in (("k", g.k_dim, codec.k_bits), ("v", g.v_dim, codec.v_bits)):
        channel_planes, token_planes = {"native": (1, 1), "fp8": (2, 1)}.get(codec.name) or planes_for(dim, bits)
        values = {
            "DIM": dim,
            "BITS": bits,
            "C": channel_planes,
            "T": token_planes,
            "PAD": padded(-(-dim // channel_planes)),
            "CODES": offset(side) or offset(f"{side}_codes"),
            "SCALE": offset(f"{side}_scale"),
            "ZERO": offset(f"{side}_zero"),
        }
        known |= {f"{side.upper()}_{name}": value for name, value in values.items()}
    return known


def decode_constants(codec: Codec, geometry: Geometry, layout: PageLayout) -> dict[str, Any]:
    """`page_constants`, and how `decode_kernel` tiles the pages."""
    known, native = page_constants(codec, geometry, layout), codec.name == "native"
    tokens, block_size = launch_for(codec, geometry).tokens, geometry.block_size
    plane = block_size // max(known["K_T"], known["V_T"])
    pages = max(1, tokens // block_size) if native else 1
    dot = ELEMENTS[geometry.dtype] if native else tl.float16
    return known | {
        "ELEMENT": dot if native else tl.int16,
        "DOT": tl.float32 if INTERPRETED and dot == tl.bfloat16 else dot,  # the interpreter multiplies bfloat16 wrongly
        "PAGES": pages,
        "CHUNKS": -(-plane // tokens),
        "TOKENS": padded(min(tokens, pages * plane)),
        "ASM": not INTERPRETED,
    }


def padded(n: int) -> int:
    """Width of a tile that holds `n`: a power of two, and no less than tensor cores take."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def _code(word, SHIFT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """The unsigned codes at bit `SHIFT` of 16-bit words, exact in float16."""
    if ASM:  # two words a register: shift, and-or, packed subtract
        MASK: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; lop3.b32 t, t, {MASK}, $2, 0xea; sub.f16x2 $0, t, $2; }}",
            "=r,r,r",
            [word, tl.full(word.shape, 0x6400, tl.int16)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        code = (word >> SHIFT) & ((1 << BITS) - 1)
        return ((code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)


@triton.jit
def _e4m3(word, SHIFT: tl.constexpr, ASM: tl.constexpr):
    """The e4m3 numbers in the low (`SHIFT` 0) or high (8) bytes of 16-bit words, times 2^-8, exact in float16: the
    exponents of the two formats are 8 apart, subnormal numbers included."""
    if ASM:
        LEFT: tl.constexpr = 8 - SHIFT
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 x, t; shl.b32 x, $1, {LEFT}; and.b32 t, x, 0x7f007f00; shr.b32 t, t, 1; "
            "lop3.b32 $0, x, 0x80008000, t, 0xea; }",
            "=r,r",
            [word],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        x = word.to(tl.int32) << (8 - SHIFT)
        return (((x & 0x7F00) >> 1) | (x & 0x8000)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _capped(x, cap):
    """`cap * tanh(x / cap)`"""
    return cap - 2 * cap / (tl.exp2(x * (2 * LOG2E / cap)) + 1)


@triton.jit
def _operand(tile, PLANE: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr):
    """Plane `PLANE` of a loaded tile, as a dot product takes it."""
    if FORMAT == "int":
        return _code(tile, PLANE * BITS, BITS, ASM)
    elif FORMAT == "fp8":
        return _e4m3(tile, PLANE * 8, ASM)
    else:
        return tile.to(DOT)


@triton.jit
def _dot(a, b, acc):
    if a.dtype == tl.float32:  # three products in tensor float 32 are as good as one in float32
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _channels(d, PLANE: tl.constexpr, C: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """The channels at places `d` of a plane: planes are slices of the channels, but for the two bytes of an fp8 word."""
    if FORMAT == "fp8":
        return d * C + PLANE
    else:
        return d + PLANE * ((DIM + C - 1) // C)


@triton.jit
def _query(q_rows, angles, c, mask, half, turned, cos_ptr, sin_ptr, ROPE: tl.constexpr):
    """Channels `c` of query rows in float32, the first `turned` of them rotated. `angles`: where each row's begin."""
    x = tl.load(q_rows[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROPE != "none":
        if ROPE == "interleaved":
            j, partner, sign = c // 2, c ^ 1, tl.where(c % 2 == 0, -1.0, 1.0)
        else:
            j, partner, sign = c % half, tl.where(c < half, c + half, c - half), tl.where(c < half, -1.0, 1.0)
        mask = mask & (c < turned)[None, :]
        y = tl.load(q_rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + angles[:, None] + j[None, :], mask=mask, other=1.0)
        sin = tl.load(sin_ptr + angles[:, None] + j[None, :], mask=mask, other=0.0)
        x = x * cos + sign[None, :] * y * sin
    return x


@triton.jit(do_not_specialize=["half", "kv_heads", "group", "q_len", "stride", "sinks", "sink_splits", "source"])
def decode_kernel(
    q_ptr,
    cos_ptr,
    sin_ptr,
    base_ptr,
    offsets_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    scale,
    softcap,
    q_batch,
    q_head,
    q_token,
    half,
    kv_heads,
    group,
    q_len,
    stride,
    sinks,
    sink_splits,
    source,
    FORMAT: tl.constexpr,
    ELEMENT: tl.constexpr,
    DOT: tl.constexpr,
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
    K_ZERO: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    ROPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid `(splits, kv_heads * ceil(group * q_len / ROWS), batch)`.

    Args:
        q_ptr: queries of any float dtype, channels adjacent; strides `q_batch`, `q_head`, `q_token` in elements.
        cos_ptr, sin_ptr: float32 `[batch, q_len, half]`, read by the splits over sinks, unless `ROPE` is "none".
        base_ptr, offsets_ptr: page `i` is at `base + 64 * offsets[i]` bytes (int64, of either sign).
        table_ptr: int32, one after the other: ranges of entries `[3 sources, batch, (sinks from, to, recent from, to)]`,
            `begin` and `end` `[batch, q_len]`, `ids` `[batch, stride]`, `first` `[batch, stride + 1]` (`View`).
        out_ptr, lse_ptr: float32 `[splits, batch, q_len, heads, V_DIM]` and `[splits, batch, q_len, heads]`.
        softcap: cap of the scores, where `SOFTCAP`.
        sink_splits: how many of the splits, the first ones, go over sinks; the rest go over the recent range.
        source: which ranges of entries: 0 sealed pages, 1 open pages, 2 all, where they are one kind.
        FORMAT: "int" (`X_BITS` bits, `X_C * X_T * X_BITS == 16`), "fp8" (2 planes) or "native". A page's codes or elements are
            loaded as `ELEMENT` and multiplied as `DOT`.
        X_PAD: width of a plane, rounded up to a power of two. X_CODES ...: byte offsets of a page's fields.
        BLOCK: positions of a page. A tile is `PAGES` whole pages or a page in `CHUNKS`; `TOKENS` of each token plane.
    """
    T: tl.constexpr = K_T if K_T > V_T else V_T
    PLANE: tl.constexpr = BLOCK // T  # tokens of a token plane
    K_WIDTH: tl.constexpr = (K_DIM + K_C - 1) // K_C
    V_WIDTH: tl.constexpr = (V_DIM + V_C - 1) // V_C
    K_RAGGED: tl.constexpr = K_PAD * K_C != K_DIM
    V_RAGGED: tl.constexpr = V_PAD * V_C != V_DIM
    RAGGED: tl.constexpr = FORMAT == "native" or TOKENS * CHUNKS != PLANE
    K_HEADROOM: tl.constexpr = K_BITS - 2 if FORMAT == "int" else 0
    V_HEADROOM: tl.constexpr = V_BITS - 2 if FORMAT == "int" else 0

    split, h = tl.program_id(0), tl.program_id(1) % kv_heads
    b, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    ranges = table_ptr + (source * batch + b) * 4
    begin_ptr = table_ptr + 12 * batch + b * q_len
    ids = table_ptr + (12 + 2 * q_len) * batch + b * stride
    first = table_ptr + (12 + 2 * q_len + stride) * batch + b * (stride + 1)

    # Rows of the tile, and what each may see: a split over sinks ends where the recent range begins.
    row = tl.program_id(1) // kv_heads * ROWS + tl.arange(0, ROWS)
    alive = row < group * q_len
    g, i = row // q_len, row % q_len
    turn = split < sink_splits
    if ONE_QUERY:
        begin, end = tl.load(begin_ptr), tl.load(begin_ptr + batch)
    else:
        begin = tl.load(begin_ptr + i, mask=alive, other=0)
        end = tl.load(begin_ptr + batch * q_len + i, mask=alive, other=0)
    end = tl.where(turn, tl.minimum(tl.minimum(begin, end), sinks), end)
    begin = tl.where(turn, 0, begin)

    # The queries, scaled row by row to where float16 is at its best; `factor` undoes it.
    q_rows = q_ptr + b * q_batch + (h * group + g).to(tl.int64) * q_head + i.to(tl.int64) * q_token
    angles = (b * q_len + i) * half
    kd, vd = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    planes, largest = (), tl.full([ROWS], 1e-20, tl.float32)
    for p in tl.static_range(K_C):
        channels = _channels(kd, p, K_C, K_DIM, FORMAT)
        valid = alive[:, None] & ((kd < K_WIDTH) & (channels < K_DIM))[None, :]
        x = _query(q_rows, angles, channels, valid, half, tl.where(turn, 2 * half, 0), cos_ptr, sin_ptr, ROPE)
        planes = planes + (x,)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    shrink = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * (1 << K_HEADROOM)
    factor = exponent.to(tl.float32, bitcast=True) * (scale * LOG2E / (1 << K_HEADROOM))
    q = ()
    for p in tl.static_range(K_C):
        q = q + ((planes[p] * shrink[:, None]).to(DOT),)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    acc = ()
    for p in tl.static_range(V_C):
        acc = acc + (tl.zeros([ROWS, V_PAD], tl.float32),)

    lo = tl.load(ranges + tl.where(turn, 0, 2))
    hi = tl.load(ranges + tl.where(turn, 1, 3))
    tiles = tl.cdiv((hi - lo) * CHUNKS, PAGES)
    share = tl.cdiv(tiles, tl.where(turn, sink_splits, tl.num_programs(0) - sink_splits))
    start = tl.where(turn, split, split - sink_splits) * share
    t = tl.arange(0, TOKENS)
    for tile in range(start, tl.minimum(start + share, tiles)):
        if PAGES == 1:
            entry = lo + tile // CHUNKS
            at = tile % CHUNKS * TOKENS + t
            inside = at < PLANE
            page = base_ptr + tl.load(offsets_ptr + tl.load(ids + entry)) * PAGE_UNIT
            index = tl.load(first + entry)
            count = tl.load(first + entry + 1) - index
        else:  # every token has a page of its own
            entry = lo + tile * PAGES + t // BLOCK
            at = t % BLOCK
            inside = (t < PAGES * BLOCK) & (entry < hi)
            page_id = tl.load(ids + entry, mask=inside, other=0)
            page = base_ptr + tl.load(offsets_ptr + page_id, mask=inside, other=0) * PAGE_UNIT
            index = tl.load(first + entry, mask=inside, other=0)
            count = tl.load(first + entry + 1, mask=inside, other=0) - index
        if FORMAT == "native":
            inside = inside & (at < count)  # what lies beyond may be NaN

        k_tiles, v_tiles = (), ()
        for u in tl.static_range(T // K_T):
            rows = (page + K_CODES).to(tl.pointer_type(ELEMENT)) + (h * BLOCK // K_T + u * PLANE + at) * K_WIDTH
            mask = inside[None, :] & (kd < K_WIDTH)[:, None]
            k_tiles = k_tiles + (_load(rows[None, :] + kd[:, None], mask, RAGGED or K_RAGGED),)
        for u in tl.static_range(T // V_T):
            rows = (page + V_CODES).to(tl.pointer_type(ELEMENT)) + (h * BLOCK // V_T + u * PLANE + at) * V_WIDTH
            mask = inside[:, None] & (vd < V_WIDTH)[None, :]
            v_tiles = v_tiles + (_load(rows[:, None] + vd[None, :], mask, RAGGED or V_RAGGED),)

        bias = tl.zeros([ROWS], tl.float32)
        scaled, unscale = q, factor
        if FORMAT == "int":
            scaled, products = (), tl.zeros([ROWS, K_PAD], tl.float32)
            for p in tl.static_range(K_C):
                c = _channels(kd, p, K_C, K_DIM, FORMAT)
                mask = (kd < K_WIDTH) & (c < K_DIM)
                k_scale = _load((page + K_SCALE).to(tl.pointer_type(tl.float16)) + h * K_DIM + c, mask, K_RAGGED)
                k_zero = _load((page + K_ZERO).to(tl.pointer_type(tl.float16)) + h * K_DIM + c, mask, K_RAGGED)
                products += q[p].to(tl.float32) * k_zero.to(tl.float32)[None, :]
                scaled = scaled + (q[p] * k_scale[None, :],)
            bias = tl.sum(products, axis=1)
        if FORMAT == "fp8":
            k_scale = tl.load((page + K_SCALE).to(tl.pointer_type(tl.float32)) + h)
            v_scale = tl.load((page + V_SCALE).to(tl.pointer_type(tl.float32)) + h)
            unscale = factor * tl.maximum(k_scale * E4M3_FACTOR, 1e-12)

        for j in tl.static_range(T):
            slot = j * PLANE + at
            if ONE_QUERY:  # all rows see the same tokens
                live = inside & (slot >= begin - index) & (slot < tl.minimum(end - index, count))
                seen = live[None, :]
            else:
                live = inside & (slot < count)
                stored = (index + slot)[None, :]
                seen = live[None, :] & (stored >= begin[:, None]) & (stored < end[:, None])
            score = tl.zeros([ROWS, TOKENS], tl.float32) + bias[:, None]
            for p in tl.static_range(K_C):
                k = _operand(k_tiles[j % (T // K_T)], j * K_T // T * K_C + p, K_BITS, FORMAT, DOT, ASM)
                score = _dot(scaled[p], k, score)
            factors = unscale
            if SOFTCAP:
                score = _capped(score * unscale[:, None], softcap * LOG2E)
                factors = tl.full([ROWS], 1.0, tl.float32)
            score = tl.where(seen, score, -float("inf"))

            new_top = tl.maximum(top, tl.max(score, axis=1) * factors)
            finite = tl.where(new_top == -float("inf"), 0.0, new_top)
            fade = tl.exp2(top - finite)
            prob = tl.exp2(score * factors[:, None] - (finite - V_HEADROOM)[:, None])
            total = total * fade + tl.sum(prob, axis=1)
            top = new_top

            if FORMAT == "int":
                places = h * BLOCK + slot
                v_scale = tl.load((page + V_SCALE).to(tl.pointer_type(tl.float16)) + places, mask=live, other=0.0)
                v_zero = tl.load((page + V_ZERO).to(tl.pointer_type(tl.float16)) + places, mask=live, other=0.0)
                shift = shift * fade + tl.sum(prob * v_zero.to(tl.float32)[None, :], axis=1)
                prob = prob * v_scale.to(tl.float32)[None, :]
            if FORMAT == "fp8":
                prob = prob * tl.minimum(v_scale * E4M3_FACTOR, 65504.0)
            weight = prob.to(DOT)
            faded = ()
            for p in tl.static_range(V_C):
                v = _operand(v_tiles[j % (T // V_T)], j * V_T // T * V_C + p, V_BITS, FORMAT, DOT, ASM)
                faded = faded + (_dot(weight, v, acc[p] * fade[:, None]),)
            acc = faded

    place = ((split * batch + b) * q_len + i) * (kv_heads * group) + h * group + g
    some = total > 0
    inverse = 1.0 / tl.where(some, total, 1.0)
    for p in tl.static_range(V_C):
        c = _channels(vd, p, V_C, V_DIM, FORMAT)
        mask = alive[:, None] & ((vd < V_WIDTH) & (c < V_DIM))[None, :]
        tl.store(out_ptr + place[:, None] * V_DIM + c[None, :], (acc[p] + shift[:, None]) * inverse[:, None], mask=mask)
    lse = (top - V_HEADROOM + tl.log2(tl.where(some, total, 1.0))) / LOG2E
    tl.store(lse_ptr + place, tl.where(some, lse, -float("inf")), mask=alive)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(parts_ptr, part_lses_ptr, out_ptr, lse_ptr, parts, V_DIM: tl.constexpr, V_PAD: tl.constexpr):
    """Merge `[parts, rows, V_DIM]` and `[parts, rows]` over the parts, as `merge.py` does. Grid `(rows,)`."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    d, s = tl.arange(0, V_PAD), tl.arange(0, COMBINED)
    top, total, acc = -float("inf"), 0.0, tl.zeros([V_PAD], tl.float32)
    for start in range(0, parts, COMBINED):
        part = start + s
        lse = tl.load(part_lses_ptr + part * rows + row, mask=part < parts, other=-float("inf")) * LOG2E
        mask = (part < parts)[:, None] & (d < V_DIM)[None, :]
        out = tl.load(parts_ptr + (part * rows + row)[:, None] * V_DIM + d[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        finite = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade, weight = tl.exp2(top - finite), tl.exp2(lse - finite)
        total = total * fade + tl.sum(weight, axis=0)
        acc = acc * fade + tl.sum(out * weight[:, None], axis=0)
        top = new_top
    some = total > 0
    tl.store(out_ptr + row * V_DIM + d, acc / tl.where(some, total, 1.0), mask=d < V_DIM)
    lse = (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E
    tl.store(lse_ptr + row, tl.where(some, lse, -float("inf")))
