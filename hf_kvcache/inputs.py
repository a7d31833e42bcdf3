"""What a session is told: its own arguments, checked, and what a call of generate() gives the model beside ids and mask, on
which keys and values depend as well."""

from __future__ import annotations

import operator

import numpy as np
import torch
from transformers import GenerationConfig

from .errors import ConfigurationError
from .prefix import Media, Priority, digest

# What generate() keeps for itself, beside the fields of a GenerationConfig.
NOT_FOR_THE_MODEL = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer",
                     "synced_gpus", "assistant_model", "tokenizer", "assistant_tokenizer", "negative_prompt_ids",
                     "negative_prompt_attention_mask")  # fmt: skip
BESIDE_IDS = ("position_ids", "token_type_ids")  # a number for each token, which generate() cuts as it cuts the ids
_DEFAULTS = GenerationConfig()


def of_call(inputs: dict, media: list[Media]) -> tuple[bytes | None, bool]:
    """Digest of everything that the model is given beside ids and mask (None where it cannot be told), and whether tensors of
    media are among it. Declared `media` speak for their tensors."""
    given = {name: value for name, value in inputs.items() if name not in NOT_FOR_THE_MODEL}
    given = {name: value for name, value in given.items() if value is not None and not hasattr(_DEFAULTS, name)}
    tensors = {name for name, value in given.items() if name not in BESIDE_IDS and _has_numbers(value)}
    if tensors and not media:
        return None, True
    try:
        given = {name: _plain(value) for name, value in given.items() if name not in tensors}
    except TypeError:
        return None, bool(tensors)
    return digest(**given) if given else b"", bool(tensors)


def speculates(model: torch.nn.Module, inputs: dict) -> bool:
    """Whether generate() will have drafts checked: it then begins with the whole prompt, whatever a cache holds."""
    names = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    return any(setting(model, inputs, name) for name in names)


def setting(model: torch.nn.Module, inputs: dict, name: str):
    """What generate() goes by: its own argument, then the config that it is given, then the model's."""
    configs = inputs.get("generation_config"), model.generation_config
    said = inputs.get(name), *(getattr(config, name, None) for config in configs)
    return next((value for value in said if value is not None), None)


def places_by_itself(model: torch.nn.Module) -> bool:
    """Whether a model places a prompt by what it remembers of the last one that it computed from the start (M-RoPE)."""
    return any("rope_deltas" in vars(module) for module in model.modules())


def _has_numbers(value, inside: bool = False) -> bool:
    """Whether an input is, or contains, tensors, arrays or lists of numbers, by which images and the like come."""
    if isinstance(value, (dict, list, tuple)):
        return any(_has_numbers(entry, True) for entry in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, (torch.Tensor, np.ndarray)) or (inside and isinstance(value, (int, float)))


def _plain(value):
    """An input as `digest` takes it. Raises `TypeError` where equal bytes would not mean equal inputs."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", str(value.dtype), tuple(value.shape), data
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return "list", *map(_plain, value)
    if isinstance(value, dict):
        return "dict", *((_plain(key), _plain(entry)) for key, entry in value.items())
    if type(value) is float:
        return "float", value.hex()
    if type(value) in (type(None), bool, int, str, bytes):
        return value
    raise TypeError(f"no digest of a {type(value).__name__}")


def named(what: str, value: str | bytes | None) -> str | bytes | None:
    """A salt or the name of an adapter, of exactly the type that it says it is."""
    if value is None or (isinstance(value, bytes) and what == "salt"):
        return value if value is None else bytes(value)
    if isinstance(value, str):
        return str(value)
    raise ConfigurationError(f"{what}={value!r} must be a string{' or bytes' if what == 'salt' else ''}, or None.")


def medium(item: Media | tuple) -> Media:
    try:
        content, start, length = item
        start, length = operator.index(start), operator.index(length)
        kind = next(kind for kind in (bytes, str) if isinstance(content, kind))
    except (TypeError, ValueError, StopIteration):
        start = length = 0
    if start < 0 or length < 1:
        raise ConfigurationError(
            f"media has {item!r}; an item is (content, start, length): a hash of it as bytes or a string, the place of its "
            "first placeholder token, and how many there are, at least one."
        )
    return Media(kind(content), start, length)


def checked(priority: Priority) -> Priority:
    start, stop, level, seconds = priority
    if (
        not 0 <= level <= 100
        or start < 0
        or (stop is not None and stop <= start)
        or (seconds is not None and seconds <= 0)
    ):
        raise ConfigurationError(
            f"{priority}: a level is 0 (evicted first) to 100, a range has tokens, and seconds are more than 0 or None."
        )
    return priority
