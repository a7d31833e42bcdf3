"""8-bit floating point (e4m3) with a scale per head and block."""

from __future__ import annotations

import torch

from .base import Codec, Geometry, PageLayout

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


class Fp8Codec(Codec):
    """`x = scale * e4m3(x / scale)`, the scale chosen per KV head and block, so that no early outlier or all-zero start
    fixes the range of what comes later (one scale per tensor, frozen at the first update, saturates).

    Page, with `H` KV heads and `N` positions a block: `k_codes [H, N, k_dim]`, `v_codes [H, N, v_dim]` (e4m3 bytes),
    `k_scale`, `v_scale [H]` (float32). Every kind of kernel reads this one order.
    """

    name = "fp8"
    k_bits = v_bits = 8

    def layout(self, geometry: Geometry, order: str) -> PageLayout:
        g = geometry
        return PageLayout.pack(
            k_codes=((g.kv_heads, g.block_size, g.k_dim), torch.float8_e4m3fn),
            v_codes=((g.kv_heads, g.block_size, g.v_dim), torch.float8_e4m3fn),
            k_scale=((g.kv_heads,), torch.float32),
            v_scale=((g.kv_heads,), torch.float32),
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor, order: str) -> dict[str, torch.Tensor]:
        (k_codes, k_scale), (v_codes, v_scale) = _scaled(k), _scaled(v)
        return {"k_codes": k_codes, "v_codes": v_codes, "k_scale": k_scale, "v_scale": v_scale}

    def decode(
        self, fields: dict[str, torch.Tensor], geometry: Geometry, order: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = fields["k_codes"].float() * fields["k_scale"][..., None, None]
        v = fields["v_codes"].float() * fields["v_scale"][..., None, None]
        return k, v


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale `[pages, kv_heads]` of `x` `[pages, kv_heads, block_size, dim]`; all-zero blocks have scale 0."""
    x = x.float()
    scale = x.abs().amax(dim=(-2, -1)) / E4M3_MAX
    codes = (x / torch.where(scale > 0, scale, 1.0)[..., None, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn), scale
