"""Which weights computed a block: fingerprints of a model and of the adapters loaded into it."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

SAMPLES = 16  # values of each parameter that a fingerprint looks at

_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, Identity]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Identity:
    """What a model is to a cache.

    Attributes:
        weights: fingerprint of config and weights without adapters.
        adapters: name and fingerprint of each adapter in use, and whether it is merged.
        dtype, device: of the weights.
    """

    weights: bytes
    adapters: tuple[tuple[str, bytes, bool], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: torch.nn.Module) -> Identity:
        """The identity of a model: names, shapes, dtypes and a few values of every parameter and buffer.

        Computed again only when a tensor was replaced or written to, or an adapter was loaded, switched or merged.
        """
        modules = list(model.modules())
        state = hash(
            (_adapters(modules), *[_state(tensor) for module in modules for tensor in _tensors(module).values()])
        )
        if model not in _known or _known[model][0] != state:
            _known[model] = state, cls._computed(model)
        return _known[model][1]

    @classmethod
    def _computed(cls, model: torch.nn.Module) -> Identity:
        adapters, paths = _adapters(model.modules()), dict(model.named_modules()).items()
        tensors = [(f"{path}.{name}", x) for path, module in paths for name, x in _tensors(module).items()]
        own, weights = {name: hashlib.sha256() for name, _, _ in adapters}, hashlib.sha256(_config(model).encode())
        for name, tensor in tensors:
            parts = name.split(".")
            owner = next((own[part] for part in parts if part in own and parts[-1] != part), weights)
            owner.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode() + _values(tensor))
        used = tuple((name, own[name].digest(), merged) for name, active, merged in adapters if active or merged)
        first = next((tensor for _, tensor in tensors if tensor.is_floating_point()), torch.zeros(0))
        return cls(weights.digest(), used, first.dtype, first.device)


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers, as far as a checkpoint would hold them."""
    kept = {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: x for name, x in {**module._parameters, **kept}.items() if x is not None}


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor gets another storage or is written to."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _values(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta or not tensor.numel():
        return b""
    index = torch.linspace(0, tensor.numel() - 1, min(SAMPLES, tensor.numel()), dtype=torch.float64).long()
    place = torch.unravel_index(index.to(tensor.device), tensor.shape) if tensor.dim() else ()
    return tensor.detach()[place].to(torch.float64).cpu().numpy().tobytes()


def _config(model: torch.nn.Module) -> str:
    config = getattr(model, "config", None)
    entries = config.to_dict() if hasattr(config, "to_dict") else {}
    said = {key: value for key, value in entries.items() if not key.startswith("_") and key != "transformers_version"}
    return json.dumps(said, sort_keys=True, default=str)


def _adapters(modules: Iterable[torch.nn.Module]) -> tuple[tuple[str, bool, bool], ...]:
    """`(name, active, merged)` of every adapter that a module has, as peft's layers say it of themselves."""
    found: dict[str, tuple[bool, bool]] = {}
    for module in modules:
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters"):
            off = getattr(module, "disable_adapters", False)
            merged, active = set(module.merged_adapters), set() if off else set(module.active_adapters)
            for name in merged | set(module.active_adapters) | set(getattr(module, "lora_A", {})):
                was_active, was_merged = found.get(name, (False, False))
                found[name] = was_active or name in active, was_merged or name in merged
    return tuple((name, *found[name]) for name in sorted(found))
