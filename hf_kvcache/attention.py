"""How a model's attention finds the storage: the handle, the attention function and the mask function.

`Cache.update()` returns two `KVHandle`s, tensors without data that carry the layer. Under
`attn_implementation="hf_kvcache"` the attention function takes the handle apart and calls a kernel on the pages;
anything else that touches a handle gets ordinary keys and values, so results are right with every model and every
attention implementation, only slower. While torch.compile traces, the classes of `compiled.py` stand for the handle, the
key length and the compact mask.
"""

from __future__ import annotations

import logging
import weakref

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from .compiled import TracedHandle, TracedLength, TracedMask
from .errors import CacheInputError, ConfigurationError, UnsupportedError
from .layers import Fresh
from .storage import Storage

IMPLEMENTATION = "hf_kvcache"
logger = logging.getLogger("hf_kvcache")


class CacheLength(int):
    """A key length that knows whose it is: the only thing that reaches the mask function from the cache."""

    storage: Storage

    def __new__(cls, length: int, storage: Storage) -> CacheLength:
        self = super().__new__(cls, length)
        self.storage = storage
        return self


class KVHandle(torch.Tensor):
    """Keys or values `[batch, kv_heads, columns, dim]` of one layer that exist only as pages.

    Any operation other than our attention function sees the materialised tensor.
    """

    fresh: Fresh
    which: int

    @staticmethod
    def __new__(cls, fresh: Fresh, which: int, columns: int) -> KVHandle:
        like = (fresh.k, fresh.v)[which]
        batch, heads, _, dim = like.shape
        self = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, columns, dim), dtype=like.dtype, device=like.device
        )
        self.fresh, self.which = fresh, which
        return self

    def materialise(self) -> torch.Tensor:
        """The ordinary tensor."""
        return self.fresh.layer.materialise(self.fresh)[self.which]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        warn_once("materialise", "hf_kvcache: keys and values are materialised for attention that reads them directly; "
                  "call hf_kvcache.enable(model) where the model allows it.")  # fmt: skip
        plain = lambda x: x.materialise() if isinstance(x, KVHandle) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"KVHandle({'kv'[self.which]}, shape={tuple(self.shape)}, dtype={self.dtype})"


_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Log a warning the first time `key` comes up in this process."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)


# ---- masks
# --------------------------------------------------------------------------------------------------------------


class CompactMask(torch.Tensor):
    """Which columns hold a token, `[batch, 1, 1, columns]` bool: stands for a causal mask, within `window` where given.

    It stays one when a model indexes it (Gemma 4 takes the newest queries' part), or generate() lays it out; any other
    operation gives a tensor.
    """

    window: int | None

    @classmethod
    def of(cls, columns: torch.Tensor, window: int | None) -> CompactMask:
        self = columns.as_subclass(cls)
        self.window = window
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.__getitem__, torch.Tensor.contiguous):
            return cls.of(out, args[0].window)
        return out


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """The mask function under our name.

    With one of our caches and a plain causal or sliding mask the kernels need no mask, only to know which columns are
    padding: that is told to the cache here, before the first layer appends. The returned `[batch, 1, 1, kv]` mask is
    for models that take keys and values apart themselves. Everything else gets the boolean mask that sdpa would get.
    """
    traced = isinstance(kv_length, TracedLength)
    common = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length.columns if traced else int(kv_length),
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        **kwargs,
    }
    if traced:
        return _traced_mask(kv_length.storage, **common)
    if not isinstance(kv_length, CacheLength):
        return sdpa_mask(**common)
    storage = kv_length.storage
    padding = _padding(attention_mask, q_offset + q_length)
    if padding is not None and padding.shape[1] < q_offset + q_length:
        raise CacheInputError(
            f"the attention mask covers {padding.shape[1]} columns, the cache holds {q_offset} and {q_length} are new: pass "
            f"one of {q_offset + q_length} that covers what is cached as well."
        )
    known = mask_function is causal_mask_function or _is_sliding(mask_function)
    if padding is not None and not storage.same_past(padding):
        known = False  # the mask hides columns that are stored, or shows some that are not: take it as it is
    else:
        storage.padding = padding
    if not known:
        storage.foreign_mask = True
        return sdpa_mask(**{**common, "allow_is_causal_skip": False})
    window = local_size if _is_sliding(mask_function) else None
    first = q_length == kv_length and (window is None or kv_length <= window)
    if attention_mask is None and (first or q_length == 1) and window is None:
        return None
    return _compact_mask(batch_size, int(kv_length), attention_mask, window, kwargs.get("device"))


def _traced_mask(storage: Storage, **common) -> TracedMask | torch.Tensor | None:
    """The same while torch.compile traces: the first layer's `append` tells the cache, when the graph runs."""
    padding, window, step = common["attention_mask"], common["local_size"], common["q_length"] == 1
    storage.told = padding
    if window is None:
        known = common["mask_function"] is causal_mask_function
    else:  # what a mask function is made of cannot be seen here; the newest column sees a window, if the model says so
        known = step and window == getattr(common["config"], "sliding_window", None) and not common["use_vmap"]
    if not known:
        storage.foreign_mask = True
        return sdpa_mask(**{**common, "allow_is_causal_skip": False})
    return None if step and padding is None and window is None else TracedMask(padding, window)


def _padding(attention_mask: torch.Tensor | None, columns: int):
    if attention_mask is None:
        return None
    return attention_mask[:, :columns].bool().cpu().numpy()


def _compact_mask(batch: int, columns: int, attention_mask, window: int | None, device) -> torch.Tensor:
    if attention_mask is None:
        compact = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device).expand(batch, 1, 1, columns)
    else:
        compact = attention_mask[:, None, None, :columns].bool()
    return CompactMask.of(compact, window)


def _is_sliding(mask_function) -> bool:
    """Whether this is the mask of a causal sliding window and nothing else (a conjunction of exactly those two)."""
    cells = getattr(mask_function, "__closure__", None) or ()
    parts = [part for cell in cells if isinstance(cell.cell_contents, tuple) for part in cell.cell_contents]
    names = [getattr(part, "__qualname__", "") for part in parts]
    return len(parts) == 2 and causal_mask_function in parts and any("sliding_window_overlay" in n for n in names)


def _full_mask(compact, q_len: int, kv_len: int, window: int | None, device) -> torch.Tensor:
    """The boolean `[.., q_len, kv_len]` mask that a compact one (or None) stands for: queries are the last columns."""
    query = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    if isinstance(compact, TracedMask):
        compact = compact.columns(kv_len)
    return visible if compact is None else compact & visible


# ---- attention ------------------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function under our name: `query` `[batch, q_heads, q_len, k_dim]`.

    Returns:
        `[batch, q_len, q_heads, v_dim]`, and None for the weights, which no fused attention has.

    Raises:
        UnsupportedError: for `output_attentions` and for dropout.
    """
    traced = isinstance(key, TracedHandle)
    stored = traced or (isinstance(key, KVHandle) and isinstance(value, KVHandle))
    if kwargs.get("output_attentions"):
        _take_back(key)
        raise UnsupportedError(
            "fused attention has no weights to give: load the model with attn_implementation='eager'."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    compact = isinstance(attention_mask, (CompactMask, TracedMask))
    position_ids = kwargs.get("position_ids")
    if stored and not traced:
        key.fresh.layer.check_positions(key.fresh, position_ids)
    if stored and (attention_mask is None or compact) and kwargs.get("position_bias") is None:
        if dropout and module.training:
            _take_back(key)
            raise UnsupportedError(f"dropout={dropout} is for training; a cache is for inference: call model.eval().")
        options = {
            "scale": scale,
            "window": kwargs.get("sliding_window"),
            "softcap": kwargs.get("softcap"),
            "s_aux": kwargs.get("s_aux"),
        }
        if traced:
            return key.traced.attend(query, position_ids=position_ids, **options), None
        return key.fresh.layer.attend(key.fresh, query, **options), None
    key, value = (x.materialise() if isinstance(x, (KVHandle, TracedHandle)) else x for x in (key, value))
    q_len, kv_len = query.shape[2], key.shape[2]
    if compact or (stored and attention_mask is None and 1 < q_len != kv_len):
        # Causality that our compact mask left to the kernel. (sdpa's own shortcut would align queries with the first
        # keys.)
        window = attention_mask.window if compact else kwargs.get("sliding_window")
        attention_mask = _full_mask(attention_mask, q_len, kv_len, window, query.device)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        return _eager(module, query, key, value, attention_mask, scale, **kwargs), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs)


def _eager(module, query, key, value, attention_mask, scale, softcap=None, s_aux=None, **kwargs) -> torch.Tensor:
    """Attention with soft-capping and sink logits on ordinary tensors, where sdpa has neither."""
    batch, heads, q_len, dim = query.shape
    folded = query.reshape(batch, key.shape[1], -1, q_len, dim)
    scores = (folded @ key.transpose(-1, -2)[:, :, None]).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None and q_len > 1 and kwargs.get("is_causal", getattr(module, "is_causal", True)):
        attention_mask = _full_mask(None, q_len, key.shape[2], kwargs.get("sliding_window"), query.device)
    if attention_mask is not None:
        attention_mask = attention_mask[:, :, None] if attention_mask.dim() == 4 else attention_mask
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    if s_aux is not None:
        sink = s_aux.float().reshape(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value[:, :, None]).reshape(batch, heads, q_len, -1).transpose(1, 2).contiguous()


def _take_back(key: torch.Tensor) -> None:
    """Undo the pass that a refused attention belongs to, so that the cache is as it was."""
    if isinstance(key, KVHandle):
        key.fresh.layer.take_back()


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)


def enable(model: torch.nn.Module) -> torch.nn.Module:
    """Let `model` attend to our caches' pages directly; with any other cache it behaves as with sdpa.

    Set once and left on. The same as `from_pretrained(..., attn_implementation="hf_kvcache")`. A model whose code does
    not go through transformers' attention interface keeps its own attention: our caches still give it right results,
    slower.

    Returns:
        the model.

    Raises:
        ConfigurationError: when `model` is not a transformers model.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigurationError(
            f"{type(model).__name__} is not a transformers model: enable() needs a PreTrainedModel."
        )
    text_config = model.config.get_text_config(decoder=True)
    model.set_attn_implementation(IMPLEMENTATION)
    if text_config._attn_implementation != IMPLEMENTATION:
        warn_once(
            f"enable {type(model).__name__}",
            f"hf_kvcache: {type(model).__name__} keeps its own {text_config._attn_implementation!r} attention; caches stay "
            "right and small with it, but are materialised for every step.",
        )
    _enabled.add(model)
    return model


_enabled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def enabled(config) -> torch.nn.Module | None:
    """The model that was enabled and has this very config, if there is just one."""
    found = [model for model in _enabled if model.config is config]
    return found[0] if len(found) == 1 else None
