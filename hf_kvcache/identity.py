"""Which weights computed a block: fingerprints of a model and of the adapters loaded into it."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .errors import UnsupportedError

CHUNK = 1 << 20  # values that are summed up
PIECE = 1 << 16  # values at a time: on a CPU they stay in its cache
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # integers as wide as a value; wider ones are taken apart

_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, Identity]] = weakref.WeakKeyDictionary()
_sums: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, tuple]] = weakref.WeakKeyDictionary()  # state and checksum


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
        """The identity of a model: names, shapes, dtypes and a checksum of every parameter and buffer.

        A tensor is summed again only when it was replaced or written to. (A write through `tensor.data`, or to an inference
        tensor, cannot be seen: call `pool.drop_prefixes()` after one.)

        Raises:
            UnsupportedError: for weights without memory (on the meta device, as offloaded ones are).
        """
        modules = list(model.modules())
        state = hash(
            (_adapters(modules), *[_state(tensor) for module in modules for tensor in _tensors(module).values()])
        )
        if model not in _known or _known[model][0] != state:
            _known[model] = state, cls._computed(model)
        return _known[model][1]

    @property
    def fingerprint(self) -> str:
        """Of weights and adapters, the same in every process and on every device."""
        used = "".join(f"\n{name} {digest.hex()} {merged}" for name, digest, merged in self.adapters)
        return hashlib.sha256(self.weights + used.encode()).hexdigest()

    @classmethod
    def _computed(cls, model: torch.nn.Module) -> Identity:
        adapters, paths = _adapters(model.modules()), dict(model.named_modules()).items()
        tensors = [(f"{path}.{name}", x) for path, module in paths for name, x in _tensors(module).items()]
        sums = _sums.setdefault(model, {})
        own, weights = {name: hashlib.sha256() for name, *_ in adapters}, hashlib.sha256(_config(model).encode())
        for name, tensor in tensors:
            parts = name.split(".")
            owner = next((own[part] for part in parts if part in own and parts[-1] != part), weights)
            state = _state(tensor)
            if sums.get(name, (None,))[0] != state:
                sums[name] = state, _checksum(name, tensor)
            owner.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode() + sums[name][1])
        for name, _, _, scalings in adapters:
            own[name].update(repr(scalings).encode())
        used = tuple((name, own[name].digest(), merged) for name, active, merged, _ in adapters if active or merged)
        first = next((tensor for _, tensor in tensors if tensor.is_floating_point()), torch.zeros(0))
        return cls(weights.digest(), used, first.dtype, first.device)


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers, as far as a checkpoint would hold them."""
    kept = {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}
    local = lambda x: x.to_local() if hasattr(x, "to_local") else x  # noqa: E731 - a process sums its own shard
    return {name: local(x) for name, x in {**module._parameters, **kept}.items() if x is not None}


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor gets another storage or is written to."""
    if tensor.is_meta:
        return 0, 0
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def _checksum(name: str, tensor: torch.Tensor) -> bytes:
    """Of every bit of a tensor, computed where it is: for each chunk the sum of its values as integers, and the same with
    a weight for each place."""
    if tensor.is_meta:
        raise UnsupportedError(
            f"{name} is on the meta device (offloaded?), so nobody can tell which weights computed a prefix: load the model "
            "to a device, or use a cache without a session."
        )
    bits = tensor.detach().reshape(-1)
    bits = bits.view(BITS.get(bits.element_size(), torch.int32))
    places = torch.arange(1, min(CHUNK, len(bits)) + 1, device=bits.device) * 0x9E3779B97F4A7C1  # odd; sums wrap around
    sums, step = [], CHUNK if bits.is_cuda else PIECE
    for chunk in bits.split(CHUNK):
        plain = weighted = 0
        for piece, place in zip(chunk.split(step), places.split(step), strict=False):
            wide = piece.long()
            plain, weighted = plain + wide.sum(), weighted + wide.mul_(place[: len(piece)]).sum()
        sums += [plain, weighted]
    return torch.stack(sums).cpu().numpy().tobytes() if sums else b""


def _config(model: torch.nn.Module) -> str:
    config = getattr(model, "config", None)
    entries = config.to_dict() if hasattr(config, "to_dict") else {}
    said = {key: value for key, value in entries.items() if not key.startswith("_") and key != "transformers_version"}
    return json.dumps(said, sort_keys=True, default=str)


def _adapters(modules: Iterable[torch.nn.Module]) -> tuple[tuple[str, bool, bool, tuple], ...]:
    """`(name, active, merged, scalings)` of every adapter that a module has, as peft's layers say it of themselves."""
    found: dict[str, tuple[bool, bool, list]] = {}
    for module in modules:
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters"):
            off, scalings = getattr(module, "disable_adapters", False), getattr(module, "scaling", {})
            merged, active = set(module.merged_adapters), set() if off else set(module.active_adapters)
            for name in merged | set(module.active_adapters) | set(getattr(module, "lora_A", {})):
                was_active, was_merged, before = found.get(name, (False, False, []))
                scaling = repr(scalings.get(name)) if isinstance(scalings, dict) else repr(scalings)
                found[name] = was_active or name in active, was_merged or name in merged, [*before, scaling]
    return tuple((name, active, merged, tuple(said)) for name, (active, merged, said) in sorted(found.items()))
