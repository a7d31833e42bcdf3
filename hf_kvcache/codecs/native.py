"""Blocks stored as the model computed them."""

from __future__ import annotations

import torch

from .base import Codec, Geometry, PageLayout


class NativeCodec(Codec):
    """Keys and values in the model's own dtype: exact, and sealing copies nothing.

    Page: `k [kv_heads, block_size, k_dim]`, `v [kv_heads, block_size, v_dim]`.
    """

    name = "native"
    lossless = True
    k_bits = v_bits = 0  # the width of the model's dtype, which a codec does not choose

    def layout(self, geometry: Geometry, order: str) -> PageLayout:
        g = geometry
        return PageLayout.pack(
            k=((g.kv_heads, g.block_size, g.k_dim), g.dtype), v=((g.kv_heads, g.block_size, g.v_dim), g.dtype)
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor, order: str) -> dict[str, torch.Tensor]:
        return {"k": k, "v": v}

    def decode(
        self, fields: dict[str, torch.Tensor], geometry: Geometry, order: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return fields["k"].float(), fields["v"].float()
