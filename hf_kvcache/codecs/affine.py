"""Low-bit integers with a scale and a zero point: int8, int4, int2, and mixtures of them."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from .base import Codec, Geometry, PageLayout
from .packing import pack, packed_shape, unpack

BITS = (8, 4, 2)
HALF_MAX = torch.finfo(torch.float16).max


class AffineCodec(Codec):
    """`x = scale * code + zero` with unsigned codes of `k_bits` and `v_bits` bits.

    Keys have a scale and a zero point per channel of the block, values per token: key channels carry large constant
    offsets that a per-token scale would drown everything else in (KIVI, Liu et al. 2024). Both are float16, rounded
    outwards so that
    the grid always covers the block: every element decodes to within half a scale step.

    Page, with `H` KV heads and `N` positions a block:
    `k_codes [H, *packed]`, `v_codes [H, *packed]` (see `packing.py`), `k_scale`, `k_zero [H, k_dim]`, `v_scale`,
    `v_zero [H, N]`.

    Args:
        k_bits, v_bits: 8, 4 or 2 bits for keys and for values; keys deserve at least as many as values.
    """

    def __init__(self, k_bits: int, v_bits: int | None = None):
        v_bits = k_bits if v_bits is None else v_bits
        for bits in (k_bits, v_bits):
            if bits not in BITS:
                raise ConfigurationError(f"bits={bits!r} is not a width this codec has; use one of {BITS} or 'fp8'.")
        self.k_bits, self.v_bits = k_bits, v_bits
        self.name = f"int{k_bits}" if k_bits == v_bits else f"k{k_bits}v{v_bits}"

    def layout(self, geometry: Geometry, order: str) -> PageLayout:
        g = geometry
        if g.block_size % 8:
            raise ConfigurationError(
                f"block_size={g.block_size} does not suit {self.name}: packed codes need a multiple of 8; 64 is a good one."
            )
        k_shape, k_dtype = packed_shape(g.block_size, g.k_dim, self.k_bits, order, keys=True)
        v_shape, v_dtype = packed_shape(g.block_size, g.v_dim, self.v_bits, order, keys=False)
        half = torch.float16
        return PageLayout.pack(
            k_codes=((g.kv_heads, *k_shape), k_dtype),
            v_codes=((g.kv_heads, *v_shape), v_dtype),
            k_scale=((g.kv_heads, g.k_dim), half),
            k_zero=((g.kv_heads, g.k_dim), half),
            v_scale=((g.kv_heads, g.block_size), half),
            v_zero=((g.kv_heads, g.block_size), half),
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor, order: str) -> dict[str, torch.Tensor]:
        k_codes, k_scale, k_zero = quantize(k, self.k_bits, dim=-2)
        v_codes, v_scale, v_zero = quantize(v, self.v_bits, dim=-1)
        return {
            "k_codes": pack(k_codes, self.k_bits, order, keys=True),
            "v_codes": pack(v_codes, self.v_bits, order, keys=False),
            "k_scale": k_scale,
            "k_zero": k_zero,
            "v_scale": v_scale,
            "v_zero": v_zero,
        }

    def decode(
        self, fields: dict[str, torch.Tensor], geometry: Geometry, order: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g = geometry
        k_codes = unpack(fields["k_codes"], g.block_size, g.k_dim, self.k_bits, order, keys=True)
        v_codes = unpack(fields["v_codes"], g.block_size, g.v_dim, self.v_bits, order, keys=False)
        k = k_codes.float() * fields["k_scale"].float().unsqueeze(-2) + fields["k_zero"].float().unsqueeze(-2)
        v = v_codes.float() * fields["v_scale"].float().unsqueeze(-1) + fields["v_zero"].float().unsqueeze(-1)
        return k, v

    def reorder(
        self, fields: dict[str, torch.Tensor], geometry: Geometry, order: str, new: str
    ) -> dict[str, torch.Tensor]:
        g, again = geometry, dict(fields)
        for name, dim, bits in (("k_codes", g.k_dim, self.k_bits), ("v_codes", g.v_dim, self.v_bits)):
            keys = name == "k_codes"
            codes = unpack(fields[name], g.block_size, dim, bits, order, keys=keys)
            again[name] = pack(codes, bits, new, keys=keys)
        return again


def quantize(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (uint8, shape of `x`), scale and zero point (float16, `dim` removed) of every slice of `x` along `dim`."""
    x = x.float()
    low, high = (
        x.amin(dim, keepdim=True) + 0.0,
        x.amax(dim, keepdim=True) + 0.0,
    )  # one zero: which sign wins is not defined
    zero = _half_down(low).float()
    scale = -_half_down(-(high - zero) / (2**bits - 1)).float()
    steps = (x - zero) / torch.where(scale > 0, scale, 1.0)
    codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8)
    return codes, scale.squeeze(dim).half(), zero.squeeze(dim).half()


def _half_down(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 not above `x`: rounding to nearest could leave the smallest element below the grid."""
    half = x.clamp(-HALF_MAX, HALF_MAX).half()
    bits = half.view(torch.int16)
    # One step towards minus infinity in the bit pattern: down for positive numbers, up in magnitude for negative ones,
    # and from either zero to the smallest negative number.
    magnitude = bits & 0x7FFF
    lower = torch.where(bits > 0, bits - 1, torch.where(magnitude == 0, torch.full_like(bits, -0x7FFF), bits + 1))
    stepped = torch.where(half.float() > x, lower, bits).view(torch.float16)
    return stepped.clamp(-HALF_MAX, HALF_MAX)
