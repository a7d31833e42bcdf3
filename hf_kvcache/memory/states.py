"""What layers without keys and values keep for a request, whatever its length: the states of linear attention, Mamba and short
convolutions, and the keys and values of an encoder's text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..spec import STATE_ONLY


@dataclass(frozen=True)
class State:
    """A layer's state for one row: elements in the model's dtype (`conv`) and elements in float32 (`recurrent`), as
    transformers keeps them."""

    conv: int
    recurrent: int

    def nbytes(self, dtype: torch.dtype) -> int:
        return self.conv * dtype.itemsize + self.recurrent * torch.float32.itemsize


def state_of(config, kind: str) -> State | None:
    """The state of a layer of this kind, from the text decoder's config; None where its shape is not known.

    The convolution keeps the last `kernel` inputs of each channel, the recurrence one matrix per head.
    """
    if kind not in STATE_ONLY and not kind.startswith("hybrid"):
        return State(0, 0)
    get = lambda name: getattr(config, name, None)  # noqa: E731
    if get("linear_num_value_heads"):  # gated delta rule: Qwen3-Next and its kin
        keys, values = (
            config.linear_num_key_heads * config.linear_key_head_dim,
            config.linear_num_value_heads * config.linear_value_head_dim,
        )
        return State((2 * keys + values) * config.linear_conv_kernel_dim, values * config.linear_key_head_dim)
    if get("mamba_n_heads") and get("mamba_d_head") and get("mamba_d_state"):  # Mamba 2: Falcon-H1, Bamba, Granite
        inner = config.mamba_n_heads * config.mamba_d_head
        channels = inner + 2 * config.mamba_n_groups * config.mamba_d_state
        return State(channels * config.mamba_d_conv, inner * config.mamba_d_state)
    if get("conv_L_cache"):  # short convolutions: LFM2
        return State(config.hidden_size * config.conv_L_cache, 0)
    return None
