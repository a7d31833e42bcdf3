"""A forward pass under torch.compile: the two halves of a layer's work as custom operators.

torch.compile follows a model down to tensors; block tables, plans and pages are no tensors, and change at every step. While it
traces, `update` therefore leaves `hf_kvcache::append` in the graph and the attention function `hf_kvcache::attend`; when the
graph runs, they do what an uncompiled pass does. Nothing that changes from step to step or from cache to cache is
part of the compiled code:

- Which cache is meant is data: the `ticket`, a tensor with the number of a `Storage`.
- What an operator changes is read by operators only. The one exception is the number of columns, of which the graph
  reads what was there when it started.
- `append` returns a ticket that `attend` takes, so that no compiler pass drops it or moves it behind what reads the pages.

Plans are made on the host while the graph runs. The operators are tagged `cudagraph_unsafe`, so that CUDA graphs end
before them and begin again behind them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from .errors import CacheInputError
from .layers import Fresh

if TYPE_CHECKING:
    from .storage import Storage

is_compiling = torch.compiler.is_compiling
CUDA_GRAPHS_END = getattr(torch.Tag, "cudagraph_unsafe", None)  # None where this torch would capture an operator's work

_storages: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def ticket_for(storage: Storage) -> torch.Tensor:
    """A new ticket, by which operators find `storage` while it lives: a number on the CPU, int64."""
    number = next(_numbers)
    _storages[number] = storage
    with torch.inference_mode(False):  # or caches that are made inside and outside of it would be compiled for apart
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def _operator(name: str, schema: str):
    tags = {} if CUDA_GRAPHS_END is None else {"tags": (CUDA_GRAPHS_END,)}
    return torch.library.custom_op(f"hf_kvcache::{name}", mutates_args=(), schema=schema, **tags)


@_operator("append", "(Tensor k, Tensor v, Tensor ticket, int layer, Tensor? padding) -> Tensor")
def _append(k, v, ticket, layer, padding):
    """Store a layer's new keys and values; `padding` `[batch, columns]` is the pass's mask where the graph made one."""
    storage = _storages[ticket.item()]
    if padding is not None:
        _tell(storage, padding[:, : storage.columns + k.shape[2]].bool().cpu().numpy())
    storage.layers[layer].append(k, v)
    return ticket.clone()


def _tell(storage: Storage, padding) -> None:
    if padding.shape[1] >= storage.columns and not storage.same_past(padding):
        raise CacheInputError(
            "the attention mask hides columns that the cache holds as tokens, or shows some that it holds as padding; a "
            "compiled model cannot follow it. Pass the mask that the columns were stored with, or run the model uncompiled."
        )
    storage.padding = padding


@_append.register_fake
def _(k, v, ticket, layer, padding):
    return torch.empty_like(ticket)


@_operator(
    "attend",
    "(Tensor q, Tensor k, Tensor v, Tensor ticket, int layer, float scale, int? window, float? softcap, Tensor? s_aux, "
    "Tensor? position_ids) -> Tensor",
)
def _attend(q, k, v, ticket, layer, scale, window, softcap, s_aux, position_ids):
    """`LayerStorage.attend` of the pass that `k` and `v` were appended in, once their positions are checked."""
    own = _storages[ticket.item()].layers[layer]
    fresh = Fresh(own, own.group.step, k, v)
    own.check_positions(fresh, position_ids)
    return own.attend(fresh, q, scale=scale, window=window, softcap=softcap, s_aux=s_aux).contiguous()


@_attend.register_fake
def _(q, k, v, ticket, layer, scale, window, softcap, s_aux, position_ids):
    batch, heads, q_len, _ = q.shape
    return q.new_empty((batch, q_len, heads, v.shape[3]))


@_operator("materialise", "(Tensor k, Tensor v, Tensor ticket, int layer, SymInt columns) -> (Tensor, Tensor)")
def _materialise(k, v, ticket, layer, columns):
    """`LayerStorage.materialise` of the pass that `k` and `v` were appended in, which ends at `columns`."""
    own = _storages[ticket.item()].layers[layer]
    tensors = own.materialise(Fresh(own, own.group.step, k, v))
    return tuple(x.clone() if x is given else x for x, given in zip(tensors, (k, v), strict=True))


@_materialise.register_fake
def _(k, v, ticket, layer, columns):
    return tuple(x.new_empty((x.shape[0], x.shape[1], columns, x.shape[3])) for x in (k, v))


# ---- what the model's code holds while it is traced ------------------------------------------------------------------


class Traced:
    """What `layers.Fresh` is in an uncompiled pass: a layer's new keys and values, and where the rest of them is."""

    def __init__(self, storage: Storage, k: torch.Tensor, v: torch.Tensor, layer: int):
        padding, storage.told = storage.told, None
        self.k, self.v, self.layer = k.detach(), v.detach(), layer  # no gradient comes back from pages
        self.columns = storage.columns + k.shape[2]
        self.ticket = _append(self.k, self.v, storage.ticket, layer, padding)
        self.materialised = None

    def attend(self, q, scale, window, softcap, s_aux, position_ids) -> torch.Tensor:
        position_ids = None if q.shape[2] == 1 else position_ids  # to be checked
        q, s_aux = q.detach(), None if s_aux is None else s_aux.detach()
        return _attend(q, self.k, self.v, self.ticket, self.layer, scale, window, softcap, s_aux, position_ids)

    def materialise(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.materialised is None:
            self.materialised = _materialise(self.k, self.v, self.ticket, self.layer, self.columns)
        return self.materialised


class TracedHandle:
    """What `KVHandle` is in an uncompiled pass. No tensor, but taken for the materialised one by tensor operations."""

    def __init__(self, traced: Traced, which: int):
        self.traced, self.which = traced, which

    def materialise(self) -> torch.Tensor:
        return self.traced.materialise()[self.which]

    def __getattr__(self, name: str):
        return getattr(self.materialise(), name)

    def __getitem__(self, index):
        return self.materialise()[index]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = lambda x: x.materialise() if isinstance(x, TracedHandle) else x  # noqa: E731
        return func(*[plain(x) for x in args], **{name: plain(x) for name, x in (kwargs or {}).items()})


class TracedLength:
    """What `CacheLength` is in an uncompiled pass: a key length that knows whose it is."""

    def __init__(self, columns: int, storage: Storage):
        self.columns, self.storage = columns, storage


class TracedMask:
    """What `CompactMask` is in an uncompiled pass: a causal mask, within `window` where given, over the columns that hold a
    token (`padding` `[batch, columns]`; None where all do). It stays one when a model indexes it."""

    def __init__(self, padding: torch.Tensor | None, window: int | None):
        self.padding, self.window = padding, window

    def __getitem__(self, index) -> TracedMask:
        return self

    def columns(self, kv_len: int) -> torch.Tensor | None:
        """The tensor that a `CompactMask` is."""
        return None if self.padding is None else self.padding[:, None, None, :kv_len].bool()
