"""Turning queries back to their position inside the cache: the rotary angles of a model, read from its config."""

from __future__ import annotations

import importlib

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .kernels.base import Rotation

FIXED_TYPES = ("default", "linear", "llama3", "yarn")  # scaled, but the same at every length
WITHOUT_ROPE = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval", "cla_share_factor")
PARTLY_ROPE = ("cohere2", "exaone4", "llama4_text")  # models whose full-attention layers have no rotary embedding


class RotaryAngles:
    """`angles(dropped, device)`: the rotation that takes a query `dropped` positions back.

    Args:
        inverse_frequencies: `[rotary_dim / 2]`.
        interleaved: whether channel pairs are neighbours, or half the rotary width apart.
    """

    def __init__(self, inverse_frequencies: torch.Tensor, interleaved: bool):
        self.inverse_frequencies, self.interleaved = inverse_frequencies.float().cpu(), interleaved

    @classmethod
    def from_config(cls, config) -> RotaryAngles | None:
        """The angles of a model with one plain or scaled rotary embedding in all layers; None for any other."""
        config = config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None)
        if not isinstance(parameters, dict) or "rope_theta" not in parameters:
            return None  # none, or another one for each layer type
        if parameters.get("rope_type", "default") not in FIXED_TYPES:
            return None
        # Models with several kinds of layers often leave some without any rotary embedding, and no config says which.
        if len(set(getattr(config, "layer_types", None) or ())) > 1 or config.model_type in PARTLY_ROPE:
            return None
        if any(getattr(config, name, None) for name in WITHOUT_ROPE):
            return None
        if getattr(config, "kv_lora_rank", None):  # only part of a latent key is rotated, and it is not the first part
            return None
        interleaved = _channel_pairs(config.model_type)
        if interleaved is None:
            return None
        return cls(_inverse_frequencies(config, parameters), interleaved)

    def __call__(self, dropped: np.ndarray, device: torch.device) -> Rotation:
        angles = -torch.from_numpy(dropped.astype(np.float64))[..., None] * self.inverse_frequencies.double()
        cos, sin = (f(angles).float().contiguous().to(device) for f in (torch.cos, torch.sin))
        return Rotation(cos, sin, self.interleaved)


def depends_on_length(config) -> bool:
    """Whether the rotary embedding of a position depends on how long the text is that it is part of."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [parameters, *parameters.values()] if isinstance(parameters, dict) else []
    types = [kind.get("rope_type", "default") for kind in kinds if isinstance(kind, dict)]
    return any("dynamic" in name or name == "longrope" for name in types)


def _inverse_frequencies(config, parameters: dict) -> torch.Tensor:
    rope_type = parameters.get("rope_type", "default")
    if rope_type != "default":
        return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))[0]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(
        dim * parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    )
    return 1.0 / parameters["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def _channel_pairs(model_type: str) -> bool | None:
    """Whether the model's own `rotate_half` pairs neighbouring channels (True) or halves (False); None if neither."""
    try:
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        rotated = module.rotate_half(torch.arange(1.0, 9.0)).tolist()
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return {(-5, -6, -7, -8, 1, 2, 3, 4): False, (-2, 1, -4, 3, -6, 5, -8, 7): True}.get(tuple(map(int, rotated)))
