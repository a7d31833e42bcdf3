"""The packed orders of low-bit codes: one per kind of kernel, with lossless conversion in both directions.

`lanes` (CPU)
    A matrix of codes `[rows, lanes]` is stored as pairs of rows. Byte `2 * x + c` of pair `j` holds, in bit plane `p`
    (bits `p * bits` and up), the code of row `2 * j + c` and lane `p * lanes / planes + x`, with `planes = 8 / bits`.
    Two codes of one lane lie side by side, as the multiply-add-pairs instructions of x86 and Arm want them, and a whole
    vector of lanes
    is one load: no shuffles, no horizontal sums. For keys the rows are channels and the lanes tokens (a score per
    lane), for values the rows are tokens and the lanes channels (an output channel per lane). Odd rows and uneven lanes
    are padded with zero codes.

`planar` (CUDA)
    16-bit words that hold `C` channel planes times `T` token planes, `C * T * bits == 16`: word `(t, d)` holds at bit
    `(j * C + p) * bits` the code of token `j * block / T + t`, channel `p * dim / C + d`. Shift and mask unpack a
    plane; the dot product splits into `C` dots of depth `dim / C`. Keys and values use the same order. Channels are
    padded with zero codes to a multiple of `C`.

The default for a device is `order_for(device)`. `convert(codes, ...)` between orders is `unpack` followed by `pack`.
"""

from __future__ import annotations

import torch

LANES, PLANAR = "lanes", "planar"
ORDERS = (LANES, PLANAR)


def order_for(device: torch.device) -> str:
    """The packed order that the kernels of `device` read."""
    return PLANAR if device.type == "cuda" else LANES


def planes_for(dim: int, bits: int) -> tuple[int, int]:
    """`(C, T)` of the planar order: as many channel planes as leave at least 32 channels each (narrower planes make the
    tensor cores repeat work), the rest as token planes."""
    channel_planes = 16 // bits
    while channel_planes > 1 and dim / channel_planes < 32:
        channel_planes //= 2
    return channel_planes, 16 // bits // channel_planes


def packed_shape(tokens: int, dim: int, bits: int, order: str, *, keys: bool) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the packed codes of one head: what `pack` makes of `[tokens, dim]`."""
    if order == LANES:
        rows, lanes = (dim, tokens) if keys else (tokens, dim)
        planes = 8 // bits
        return (-(-rows // 2), 2 * -(-lanes // planes)), torch.uint8
    channel_planes, token_planes = planes_for(dim, bits)
    return (-(-tokens // token_planes), -(-dim // channel_planes)), torch.int16


def pack(codes: torch.Tensor, bits: int, order: str, *, keys: bool) -> torch.Tensor:
    """Pack uint8 `codes` `[..., tokens, dim]`, each below `2 ** bits`; see the module for the orders."""
    if order == LANES:
        return _pack_lanes(codes.transpose(-1, -2) if keys else codes, bits)
    return _pack_planar(codes, bits)


def unpack(packed: torch.Tensor, tokens: int, dim: int, bits: int, order: str, *, keys: bool) -> torch.Tensor:
    """The uint8 codes `[..., tokens, dim]` that `pack` was given."""
    if order == LANES:
        rows, lanes = (dim, tokens) if keys else (tokens, dim)
        codes = _unpack_lanes(packed, rows, lanes, bits)
        return codes.transpose(-1, -2) if keys else codes
    return _unpack_planar(packed, tokens, dim, bits)


def _pad_to(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))


def _pack_lanes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    planes = 8 // bits
    codes = _pad_to(codes, 2, planes)
    *lead, rows, lanes = codes.shape
    by_plane = codes.view(*lead, rows // 2, 2, planes, lanes // planes).movedim(-2, 0).transpose(-1, -2)
    packed = by_plane[0].clone()
    for plane in range(1, planes):
        packed |= by_plane[plane] << (plane * bits)
    return packed.reshape(*lead, rows // 2, 2 * (lanes // planes))


def _unpack_lanes(packed: torch.Tensor, rows: int, lanes: int, bits: int) -> torch.Tensor:
    planes = 8 // bits
    *lead, pairs, width = packed.shape
    pairwise = packed.view(*lead, pairs, width // 2, 2).transpose(-1, -2)  # [..., pairs, 2, lanes / planes]
    by_plane = torch.stack([(pairwise >> (plane * bits)) & (2**bits - 1) for plane in range(planes)], dim=-2)
    return by_plane.reshape(*lead, pairs * 2, planes * (width // 2))[..., :rows, :lanes]


def _pack_planar(codes: torch.Tensor, bits: int) -> torch.Tensor:
    channel_planes, token_planes = planes_for(codes.shape[-1], bits)
    codes = _pad_to(codes, token_planes, channel_planes).to(torch.int32)
    *lead, tokens, dim = codes.shape
    shape = (*lead, token_planes, tokens // token_planes, channel_planes, dim // channel_planes)
    by_plane = codes.view(shape)
    word = torch.zeros((*lead, shape[-3], shape[-1]), dtype=torch.int32, device=codes.device)
    for j in range(token_planes):
        for p in range(channel_planes):
            word |= by_plane[..., j, :, p, :] << ((j * channel_planes + p) * bits)
    return torch.where(word >= 1 << 15, word - (1 << 16), word).to(torch.int16)  # the same 16 bits, as a signed word


def _unpack_planar(packed: torch.Tensor, tokens: int, dim: int, bits: int) -> torch.Tensor:
    channel_planes, token_planes = planes_for(dim, bits)
    word, mask = packed.to(torch.int32), 2**bits - 1
    by_token = [
        torch.cat([(word >> ((j * channel_planes + p) * bits)) & mask for p in range(channel_planes)], dim=-1)
        for j in range(token_planes)
    ]
    return torch.cat(by_token, dim=-2)[..., :tokens, :dim].to(torch.uint8)
