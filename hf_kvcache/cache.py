"""The caches: what `model.generate(past_key_values=...)` is given. With `attention.py` the only code that knows the
transformers cache protocol."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from . import savefile, saving, usage
from .attention import IMPLEMENTATION, CacheLength, KVHandle, enabled
from .codecs import Codec, Geometry, NativeCodec, codec_for
from .codecs.packing import LANES
from .compiled import CUDA_GRAPHS_END, Traced, TracedHandle, TracedLength, is_compiling
from .errors import CacheInputError, CacheStateError, ConfigurationError, SavedStateError
from .identity import Identity
from .layers import LayerStorage
from .passes import LayerGroup
from .plan_file import CachePlan
from .pool import BlockPool
from .retention import Retention, Window, retention_for
from .rotary import RotaryAngles
from .savefile import Entry, SavedFile
from .spec import STATE_ONLY, LayerSpec, specs_from_config
from .storage import Storage
from .tiers import DiskTier, HostTier, Tier, tier_for
from .usage import MemoryReport


class KVLayer(CacheLayerMixin):
    """One model layer's keys and values, as transformers sees them. Rows and columns are the whole cache's business:
    crop, reorder and reset exist on `KVCache` only, because all layers of a group share one block table."""

    is_compileable = False  # the cache says it (`KVCache.is_compileable`)
    is_croppable = True
    is_sliding = False  # windows are applied by the kernels; masks are made for every position seen
    keys = values = None

    def __init__(self, storage: LayerStorage):
        self.storage = storage

    @property
    def is_initialized(self) -> bool:
        return self.storage.columns > 0

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: pages are allocated when tokens come."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store new keys and values; returns handles to all of the layer's (see `attention.py`)."""
        fresh = self.storage.append(key_states, value_states)
        columns = self.storage.columns
        return KVHandle(fresh, 0, columns), KVHandle(fresh, 1, columns)

    def get_seq_length(self) -> int:
        return self.storage.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.storage.storage.padding = None  # masks are about to be made; ours says if there is padding
        return CacheLength(self.storage.columns + query_length, self.storage.storage), 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """Nothing to do: tiers move blocks, not layers."""

    prefetch = offload

    def _whole_cache_only(self, *args, **kwargs):
        raise CacheInputError("all layers share their block tables: call this on the cache, not on one of its layers.")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _whole_cache_only

    def __repr__(self) -> str:
        return (
            f"KVLayer({self.storage.layer}: {self.storage.group.retention!r}, {self.storage.group.store.sealed.codec})"
        )


class HybridLayer(LinearAttentionLayer, KVLayer):
    """A layer with a linear-attention state (transformers' own) beside its keys and values (ours)."""

    is_compileable = False

    def __init__(self, storage: LayerStorage, **state):
        LinearAttentionLayer.__init__(self, **state)
        KVLayer.__init__(self, storage)


class KVCache(Cache):
    """A cache composed of one choice on each lever.

    Args:
        config: the model's config.
        block_size: positions per block; 16 for native storage, 64 for a low-bit codec; None for the pool's.
        pool: a `BlockPool` to share or to limit; None makes one of its own.
        retention: which positions stay (`retention/`): a rule or its name; None for all.
        codec: how sealed blocks are represented (`codecs/`): an instance, a name, a number of bits; None for native.
        tier: where sealed blocks live (`tiers/`): a tier or its name; None for the device.
        residual: newest positions that a lossy codec leaves in the model's dtype.
        layers: other choices for some layers: `{index or layer type: {"codec": ..., "retention": ...}}`, indices first.

    Raises:
        ConfigurationError: for values that make no sense, and combinations that do not exist.
    """

    def __init__(
        self,
        config,
        *,
        block_size: int | None = None,
        pool: BlockPool | None = None,
        retention: Retention | str | None = None,
        codec: Codec | str | int | None = None,
        tier: Tier | str | None = None,
        residual: int = 0,
        layers: Mapping[int | str, Mapping] | None = None,
    ):
        self.config = config
        self.pool = BlockPool(config) if pool is None else pool
        _check_pool(self.pool, config)
        self.block_size = self.pool.block_size if block_size is None else block_size
        _check_counts(self.block_size, residual)
        self.residual = residual
        self.choices = {
            "retention": retention_for(retention),
            "codec": codec_for(codec),
            "tier": tier_for(tier),
        }
        self.layer_choices = dict(layers or {})
        self.specs = specs_from_config(config)
        _check_layer_choices(self.layer_choices, self.specs)
        self.rotary = RotaryAngles.from_config(config)
        self._has_states_or_latents = any(
            spec.kind in STATE_ONLY or spec.kind.startswith("hybrid") or spec.k_dim != spec.v_dim for spec in self.specs
        )
        self.token_ids: list[np.ndarray] | None = None  # per row, as far as `prepare` was told; see there
        self.told: np.ndarray | None = None  # the padding mask that it was told
        self._model: weakref.ref | None = None  # who computes, where somebody said so
        storage = Storage(self.pool, [])
        super().__init__(layers=self._build(storage))
        self.storage = storage

    @classmethod
    def from_plan(cls, config, plan: str | Path | Mapping, **others) -> KVCache:
        """The cache that a plan describes; `hf-kvcache tune` writes them.

        Args:
            config: the model's config.
            plan: the path of a JSON file, or what it holds (see `plan_file.py`).
            others: choices in place of the plan's: a `pool`, a `tier` (which may have a folder, as no plan may), ...

        Raises:
            ConfigurationError: for what is no plan, or one for another model.
        """
        return cls(config, **{**CachePlan.read(plan).choices(specs_from_config(config)), **others})

    def _build(self, storage: Storage) -> list:
        """The transformers layers, and behind them the groups that share a table."""
        members: dict[tuple, list[int]] = {}
        for index, spec in enumerate(self.specs):
            if spec.stores:
                members.setdefault(self._choice(index, spec), []).append(index)
        placed: dict[int, LayerStorage] = {}
        for (retention, codec, tier), indices in members.items():
            codec.layout(Geometry(1, 1, 1, self.block_size, torch.float32), LANES)  # refuses what cannot be, now
            tier, native = copy.deepcopy(tier), NativeCodec()
            store = self.pool.group(tuple(indices), codec, self.block_size, tier.place, native)
            if retention.window is None and tier.resident_tokens is None:
                self.pool.expect_everything(store)
            group = LayerGroup(retention, tier, store, self.pool, self.residual, self.rotary)
            storage.groups.append(group)
            for place, index in enumerate(indices):
                placed[index] = LayerStorage(storage, group, place, self.specs[index], index)
        storage.layers = [placed.get(index) for index in range(len(self.specs))]
        layers = _transformers_layers(self.config, storage.layers, self.specs)
        storage.recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in layers)
        return layers

    def _choice(self, index: int, spec: LayerSpec) -> tuple[Retention, Codec, Tier]:
        own = {**self.choices, **self.layer_choices.get(spec.kind, {}), **self.layer_choices.get(index, {})}
        retention = retention_for(own["retention"]).within(spec.window)
        return retention, self._shared_codec(own["codec"]), self._shared_tier(own["tier"])

    def _shared_tier(self, tier: Tier | str | None) -> Tier:
        """One instance per choice, so that equal choices make one group."""
        if isinstance(tier, Tier):
            return tier
        return self.__dict__.setdefault("_tiers", {}).setdefault(tier, tier_for(tier))

    def _shared_codec(self, codec: Codec | str | int | None) -> Codec:
        """One instance per name, so that equal choices make one group."""
        instances = self.__dict__.setdefault("_codecs", {})
        codec = codec_for(codec)
        return instances.setdefault(codec.name, codec)

    # ---- the transformers protocol ----------------------------------------------------------------------------------

    @property
    def _is_user_defined(self) -> bool:
        """Set by generate() on every cache that a user hands in; from then on positions are checked."""
        return self.storage.checks_positions

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self.storage.checks_positions = value

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise CacheInputError(
                f"the model has a layer {layer_idx}, the cache was built for {len(self.layers)} layers: build it from this "
                "model's config."
            )
        if is_compiling():
            traced = Traced(self.storage, key_states, value_states, layer_idx)
            return (TracedHandle(traced, 0), TracedHandle(traced, 1)) if self._is_enabled() else traced.materialise()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if is_compiling():
            columns = self.storage.columns + query_length
            return TracedLength(columns, self.storage) if self._is_enabled() else columns, 0
        return super().get_mask_sizes(query_length, layer_idx)

    @property
    def is_compileable(self) -> bool:
        """Whether generate() is to compile its steps by itself, as it does on CUDA alone: where memory is reserved for the
        cache, and a model on our attention has no layers whose tensors grow with the text, or carry a state."""
        reserved = CUDA_GRAPHS_END is not None and self.pool.capacity_tokens is not None
        return reserved and self._is_enabled() and not self._has_states_or_latents

    def _is_enabled(self) -> bool:
        """Whether the model is on our attention, as far as the config tells that the cache was built from."""
        return self.config.get_text_config(decoder=True)._attn_implementation == IMPLEMENTATION

    def crop(self, tokens_to_remove: int) -> None:
        """Take columns back: `n <= 0` removes `-n` of them, `n > 0` keeps the first `n` (the older convention).

        Exact whatever the codec. Raises `CacheStateError`, changing nothing, where a window has moved on too far.
        """
        n, columns = int(tokens_to_remove), self.storage.columns
        target = max(0, min(columns, columns + n if n <= 0 else n))
        linear = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        if linear and columns:
            self.storage.check_crop(target)
            for layer in linear:
                layer.crop(target - columns)
        self.storage.crop(target)
        if self.token_ids is not None:
            self.token_ids = [ids[: self._row_tokens(r)] for r, ids in enumerate(self.token_ids)]

    def _row_tokens(self, row: int) -> int:
        return len(self.storage.token_columns(row)) if self.storage.columns else 0

    def reset(self) -> None:
        """Be as new: every block goes back to the pool."""
        self.storage.reset()
        self.token_ids = self.told = None
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                LinearAttentionLayer.reset(layer)
        self.storage.spoiled = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was. Moves no block."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Follow every row by `repeats - 1` copies of itself that share its blocks."""
        if repeats < 1:
            raise CacheInputError(f"repeats={repeats} must be at least 1.")
        self._select(torch.arange(self.storage.batch).repeat_interleave(repeats))

    def _select(self, indices: torch.Tensor) -> None:
        rows = indices.detach().cpu().numpy().astype(np.int64).reshape(-1)
        batch = self.storage.batch
        self.storage.select(rows)
        if self.token_ids is not None:
            copies = batch // len(self.token_ids)  # generate() repeats each row of the prompt for its beams or samples
            self.token_ids = [self.token_ids[r // copies] for r in rows] if copies else None
            self.told = self.told[rows // copies] if copies else None
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                LinearAttentionLayer.reorder_cache(layer, torch.from_numpy(rows))

    def activate_past_recording(self) -> None:
        """Keep a few hundred positions that a window has passed: speculative decoding may take tokens back."""
        self.storage.record_past()
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.activate_past_recording()

    # ---- what users call --------------------------------------------------------------------------------------------

    def prepare(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Make the cache fit a prompt: keep the longest prefix whose tokens it is known to hold, cut the rest.

        Token ids are known from earlier calls of `prepare`; what was generated since is not, and is computed again. At
        least one column is always left to compute. Call it before `generate()` with the same ids and mask.

        Args:
            input_ids: `[batch, columns]`, the whole prompt.
            attention_mask: `[batch, columns]`, 0 where a column is padding; None where there is none.

        Returns:
            the number of leading columns that need no computation.
        """
        ids = input_ids.detach().cpu().numpy()
        mask = (
            np.ones(ids.shape, bool) if attention_mask is None else attention_mask.detach().cpu().numpy().astype(bool)
        )
        if mask.shape != ids.shape:
            raise CacheInputError(
                f"attention_mask is {mask.shape}, input_ids are {ids.shape}: they must have one shape."
            )
        self.storage.settle()
        rows = [row[keep] for row, keep in zip(ids, mask, strict=True)]
        columns = self._reuse(rows, mask)
        self.token_ids, self.told = rows, mask
        return columns

    def _reuse(self, rows: list[np.ndarray], mask: np.ndarray) -> int:
        """Hold the longest beginning of a prompt that can be had; returns its columns."""
        return self._keep_columns(self._held_columns(rows, mask), mask)

    def _held_columns(self, rows: list[np.ndarray], mask: np.ndarray) -> int:
        """Leading columns of a prompt whose tokens the cache is known to hold."""
        if self.token_ids is None or not len(rows) == self.storage.batch == len(self.token_ids):
            return 0
        if not self._padding_is_as_told():
            return 0
        common = [_common_prefix(a, b) for a, b in zip(self.token_ids, rows, strict=True)]
        return columns_within(mask, [min(n, self._row_tokens(r)) for r, n in enumerate(common)])

    def _padding_is_as_told(self) -> bool:
        """Whether rows hold the tokens of the prompt that `prepare` was given and nothing else. (A model that does not use
        our masks stores padding as well.)"""
        columns = min(self.told.shape[1], self.storage.columns)
        held = np.ones_like(self.told[:, :columns]) if self.storage.valid is None else self.storage.valid[:, :columns]
        return np.array_equal(held, self.told[:, :columns].repeat(len(held) // len(self.told), axis=0))

    def _keep_columns(self, columns: int, mask: np.ndarray) -> int:
        """Cut back to `columns` of the prompt, or to nothing where a window or a recurrent state cannot go back."""
        lengths = mask[:, :columns].sum(axis=1)
        if columns == 0 or self.storage.recurrent or not self.storage.can_crop(lengths):
            self.reset()
            return 0
        self.storage.crop_rows(columns, lengths)
        self.storage.valid = None if mask[:, :columns].all() else mask[:, :columns]
        return columns

    def can_admit(self, lengths: Sequence[int]) -> bool:
        """Whether the pool has room now for rows of `lengths` tokens in a cache like this one, without reuse; evicting
        what is not in use where necessary. Takes and evicts nothing."""
        storage, model = self._empty_twin().storage, self.pool.identity
        dtype = model.dtype if model else getattr(self.config.get_text_config(decoder=True), "dtype", None)
        for layer in filter(None, storage.layers):
            layer.expect(dtype or torch.get_default_dtype(), model.device if model else torch.device("cpu"))
        return self.pool.fits(storage.demands(np.asarray(lengths, np.int64)))

    def fork(self) -> KVCache:
        """An independent cache with the same content that shares every block; writing copies one open block."""
        twin = self._empty_twin()
        twin.storage.adopt(self.storage)
        for mine, theirs in zip(twin.layers, self.layers, strict=True):
            if isinstance(theirs, LinearAttentionLayer):
                state = {k: copy.deepcopy(v) for k, v in theirs.__dict__.items() if k != "storage"}
                mine.__dict__.update(state)
        return twin

    def _empty_twin(self) -> KVCache:
        twin = copy.copy(self)
        twin.__dict__ = {k: v for k, v in self.__dict__.items() if k not in ("layers", "storage")}
        twin.storage = Storage(self.pool, [])
        twin.layers = twin._build(twin.storage)
        return twin

    def __deepcopy__(self, memo) -> KVCache:
        return self.fork()

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        path_or_url: str | os.PathLike,
        model: torch.nn.Module | None = None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> None:
        """Write everything that the cache holds to a file, for `KVCache.load`, in this process or another one.

        What was at `path_or_url` before is replaced in one step when all of it is written, and stays otherwise. Pages are written
        once, however many rows share them, and empty slots not at all.

        Args:
            path_or_url: a path, or a URL of any file system that fsspec knows (`s3://...`).
            model: who computed it. May be left out after `hf_kvcache.enable(model)`, `session.generate(model, ...)` or `load`.
            input_ids: `[batch, columns]` the ids of what is held, or more, as `generate()` returned them. Without them, those
                that `prepare` was told count as known, which is what `prepare` of the loaded cache can find again.

        Raises:
            CacheStateError: there is nothing to save, or recurrent states have seen a pass that was taken back.
            CacheInputError: nobody said which model computed it, or `input_ids` are not of what is held.
            ConfigurationError: codec, retention or tier is of a class of your own.
            UnsupportedError: weights on the meta device.
            SavedStateError: the file could not be written.
            TierError: blocks in a slower tier could not be read; the cache is as it was.
        """
        self.storage.settle()
        if not self.storage.columns or not self.storage.at_rest():
            raise CacheStateError(
                "the cache is empty: there is nothing to save. Let the model compute something first."
            )
        self.storage.check_states()
        model = self._who_computes(model)
        token_ids, told = self._known() if input_ids is None else self._shown_ids(input_ids)
        said = {
            "fingerprint": Identity.of(model).fingerprint,
            "model": type(model).__name__,
            "class": type(self).__name__ if type(self).__name__ in PRESETS else KVCache.__name__,
            "block_size": self.block_size,
            "residual": self.residual,
            "choices": saving.choices_said(self.choices, self.layer_choices),
            "states": {},
        }
        entries = {}
        if token_ids is None:
            warnings.warn(
                f"nobody said which tokens the cache holds, so prepare() will find nothing in {path_or_url}: "
                "cache.save(..., input_ids=...) says it.",
                stacklevel=2,
            )
        else:
            entries["tokens"] = Entry.of(np.concatenate(token_ids).astype(np.int64))
            entries["tokens.rows"] = Entry.of(np.array([len(row) for row in token_ids], np.int64))
            entries["tokens.mask"] = Entry.of(told.astype(np.uint8))
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionLayer):
                said["states"][index], tensors = _state_said(layer)
                entries |= {f"state.{index}.{name}": Entry.of(tensor) for name, tensor in tensors.items()}
        with savefile.writing(path_or_url) as file:
            saving.save(file, self.storage, said, entries)
        self._model = weakref.ref(model)

    def _who_computes(self, model: torch.nn.Module | None) -> torch.nn.Module:
        known = (self._model and self._model()) or self.pool.model or enabled(self.config)
        if model is None and known is None:
            raise CacheInputError(
                "nobody said which model computed this cache, so nobody could check it when it is loaded: use "
                "cache.save(path, model), or hf_kvcache.enable(model) once."
            )
        model = known if model is None else model
        if specs_from_config(model.config) != self.specs:
            raise CacheInputError(
                f"this {type(model).__name__} has other layers than the model that the cache was built for."
            )
        if self.pool.identity is not None:
            self.pool.bind(model)
        return model

    def _known(self) -> tuple[list[np.ndarray] | None, np.ndarray | None]:
        """Ids of each row, as far as they are known, and the padding mask."""
        return self.token_ids, self.told

    def _shown_ids(self, input_ids: torch.Tensor) -> tuple[list[np.ndarray], np.ndarray]:
        """The same, from the ids of all columns."""
        batch, columns = self.storage.batch, self.storage.columns
        ids = input_ids.detach().cpu().numpy()
        if ids.ndim != 2 or len(ids) != batch or ids.shape[1] < columns:
            raise CacheInputError(
                f"input_ids are {ids.shape}, the cache holds {batch} rows of {columns} columns: give the ids of all of them, "
                "which is what generate() returned."
            )
        mask = np.ones((batch, columns), bool) if self.storage.valid is None else self.storage.valid
        rows = [row[:columns][keep] for row, keep in zip(ids, mask, strict=True)]
        for r, known in enumerate(self.token_ids or ()):
            n = batch // len(self.token_ids)
            for row in rows[r * n : r * n + n] if self._padding_is_as_told() else ():
                if _common_prefix(known, row) < min(len(known), len(row)):
                    raise CacheInputError(f"input_ids differ in row {r} from those that prepare() was told.")
        return rows, mask

    @classmethod
    def load(
        cls,
        path_or_url: str | os.PathLike,
        model: torch.nn.Module,
        *,
        pool: BlockPool | None = None,
        tier: Tier | str | None = None,
    ) -> KVCache:
        """A cache as it was saved, of the class that it had (`KVCache` for a session), ready for `model`:
        `cache.prepare(ids); model.generate(ids, **cache_kwarg(cache))` goes on where it stopped.

        Everything is checked before it is used: the model's fingerprint, shapes, tables, a checksum of every page. The checksums
        notice damage, not somebody who means harm: load what you trust.

        Args:
            path_or_url: what `save` was given.
            model: the model that computed it.
            pool: where its pages are taken from; None makes a pool of its own.
            tier: where old blocks live from now on, in place of the tier that the cache had. (A disk tier's folder is not in the
                file: unless this says another, its blocks go to the folder of temporary files, with a warning.)

        Raises:
            SavedStateError: no such file, or it is damaged, of another model or format version, or a cache of another class. A
                pool that was given is unchanged.
            ConfigurationError: the tier that the file says cannot be had here (a disk with too little room): say `tier`.
            CapacityError: the pool has no room; it is unchanged.
            CacheInputError: the pool holds another model's keys and values.
            TierError: blocks could not be written to a slower tier; the pool is unchanged.
        """
        identity = Identity.of(model)
        with savefile.reading(path_or_url) as file:
            saved = SavedFile(file, path_or_url, saving.KIND)
            with saved.understanding():
                saving.check_model(saved, model, identity.fingerprint)
                said = saved.description
                kind = PRESETS[said["class"]]
                if not issubclass(kind, cls):
                    raise SavedStateError(
                        f"{path_or_url} holds a {kind.__name__}, no {cls.__name__}: KVCache.load takes both."
                    )
                choices = saving.choices_from(said["choices"]) | ({} if tier is None else {"tier": tier})
                _warn_of_folder(path_or_url, choices, given=tier is not None)
                if pool is not None:
                    saved.verify()  # before anything in it changes
                cache = kind.__new__(kind)
                sizes = {name: said[name] for name in ("block_size", "residual")}
                KVCache.__init__(cache, model.config, pool=pool, **sizes, **choices)
                devices = saving.layer_devices(model, len(cache.specs))
                cache._take_up(saved, devices)
            if pool is not None and pool.identity is not None:
                pool.bind(model)
            saving.restore(saved, cache.storage, devices)
        cache._model = weakref.ref(model)
        return cache

    def _take_up(self, saved: SavedFile, devices: Sequence[torch.device]) -> None:
        """What a file says of recurrent states, and of the tokens that are held."""
        for index, state in saved.description["states"].items():
            _restore_state(self.layers[int(index)], state, saved, f"state.{int(index)}", devices[int(index)])
        if "tokens" in saved.table:
            told = saved.array("tokens.mask", (None, None), "U8").astype(bool)
            counts = saved.array("tokens.rows", (len(told),), "I64")
            ids = saved.array("tokens", (None,), "I64")
            saving.require(len(told) > 0 and (counts >= 0).all() and (counts <= len(ids)).all(), "numbers of tokens")
            saving.require(counts.sum() == len(ids) and saved.description["batch"] % len(told) == 0, "rows of tokens")
            self.token_ids, self.told = np.split(ids, np.cumsum(counts)[:-1]), told

    # ---- looking ----------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """Bytes by tier, what a plain cache would hold, and waste; see `MemoryReport`."""
        return usage.report(self.storage, sum(_state_bytes(layer) for layer in self.layers))

    def stats(self) -> dict:
        """Numbers of what happened so far: tokens by row, blocks by state, tokens sealed, tensors materialised, and the
        share of what was written that a query no longer reads as it was (`compressed`: lossy codes, what a window
        passed), and the bytes that went to a slower tier (`bytes_written`) and were copied back from it (`bytes_read`).
        """
        tables = [group.table for group in self.storage.groups]
        for table in tables if self.storage.at_rest() else ():
            table.settle()
        lengths = tables[0].length.tolist() if tables else []
        return {
            "tokens": lengths,
            "columns": self.storage.columns,
            "blocks_open": sum(int((t.n_entries - t.n_sealed).sum()) for t in tables),
            "blocks_sealed": sum(int((t.n_sealed - t.n_cold).sum()) for t in tables),
            "blocks_cold": sum(int(t.n_cold.sum()) for t in tables),
            "tokens_sealed": sum(t.tokens_sealed for t in tables),
            "positions_dropped": sum(int(t.gap.sum()) for t in tables),
            "compressed": usage.compressed(self.storage),
            "materialisations": self.storage.materialisations,
            "bytes_written": sum(group.tier.bytes_written for group in self.storage.groups),
            "bytes_read": sum(group.tier.bytes_read for group in self.storage.groups),
        }

    def check_integrity(self) -> None:
        """Recount blocks and references of the whole pool; raises `IntegrityError`. For tests and debugging."""
        self.pool.check_integrity()

    def __repr__(self) -> str:
        parts = []
        for group in self.storage.groups:
            rule = group.retention
            text = f"{len(group.store.open.pages)} layers: {rule!r}" if not rule.native else (
                f"{len(group.store.open.pages)} layers: the model's window of {rule.window}"
            )  # fmt: skip
            if rule.rebase and rule.sinks:
                text += " (re-based)" if group.angles is not None else " (not re-based: rotary embedding unknown)"
            codec = group.store.sealed.codec
            text += f", {codec}" + ("" if codec.lossless else f" with the newest {self.residual} exact")
            if group.tier.resident_tokens is not None:
                text += f", {group.tier} beyond {group.tier.resident_tokens} tokens"
            parts.append(text)
        held = f"{self.storage.batch} x {self.storage.columns} tokens" if self.storage.columns else "empty"
        return f"{type(self).__name__}({held}, blocks of {self.block_size}; {'; '.join(parts)})"


def _check_counts(block_size, residual) -> None:
    if not isinstance(block_size, int) or block_size < 1:
        raise ConfigurationError(
            f"block_size={block_size!r} must be a whole number of at least 1 (16 and 64 are usual)."
        )
    if not isinstance(residual, int) or residual < 0:
        raise ConfigurationError(f"residual={residual!r} must be a whole number of at least 0 tokens.")


def _warn_of_folder(path_or_url: str | os.PathLike, choices: Mapping, given: bool) -> None:
    """Say where the blocks go of a disk tier that came out of a file."""
    tiers = [own.get("tier") for own in choices["layers"].values()] + ([] if given else [choices["tier"]])
    spilling = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
    if spilling is not None:
        warnings.warn(
            f"{path_or_url} does not say in which folder its disk tier is to be: it is in {spilling.place.folder}, where "
            "temporary files are. KVCache.load(..., tier=DiskTier(tokens, folder)) says another.",
            stacklevel=3,
        )


def _check_pool(pool: BlockPool, config) -> None:
    if not isinstance(pool, BlockPool):
        raise ConfigurationError(f"pool={pool!r} is not a BlockPool.")
    if pool.config is not None and specs_from_config(pool.config) != specs_from_config(config):
        raise ConfigurationError(
            "the pool was made for a model with other layers: caches that share a pool share a model."
        )


def _check_layer_choices(choices: Mapping, specs: list[LayerSpec]) -> None:
    kinds = {spec.kind for spec in specs}
    for key, own in choices.items():
        if key not in kinds and not (isinstance(key, int) and 0 <= key < len(specs)):
            raise ConfigurationError(
                f"layers has a key {key!r}; use a layer index below {len(specs)} or one of {sorted(kinds)}."
            )
        unknown = set(own) - {"retention", "codec", "tier"}
        if unknown:
            raise ConfigurationError(
                f"layers[{key!r}] sets {sorted(unknown)}; a layer can have its own retention, codec, tier."
            )


def _transformers_layers(config, storages: list[LayerStorage | None], specs: list[LayerSpec]) -> list:
    """Our layers where keys and values are stored, transformers' own where there is a state, or nothing to hold."""
    state = {"number_of_states": getattr(config.get_text_config(decoder=True), "number_of_conv_states", 1)}
    layers = []
    for storage, spec in zip(storages, specs, strict=True):
        if storage is not None and spec.kind.startswith("hybrid"):
            layers.append(HybridLayer(storage, **state))
        elif storage is not None:
            layers.append(KVLayer(storage))
        elif spec.kind in STATE_ONLY:
            layers.append(LinearAttentionLayer(**state))
        elif hasattr(cache_utils, "DummyLayer"):
            layers.append(cache_utils.DummyLayer())
        else:
            break  # before transformers 5.23 the layers that share others' keys and values have no place in a cache
    return layers


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n


def columns_within(mask: np.ndarray, lengths: Sequence[int]) -> int:
    """Leading columns in which row `r` has at most `lengths[r]` tokens; at least one is left to compute."""
    fits = (np.cumsum(mask, axis=1) <= np.asarray(lengths)[:, None]).all(axis=0)
    return min(int(fits.argmin()) if not fits.all() else len(fits), mask.shape[1] - 1)


def _state_said(layer: LinearAttentionLayer) -> tuple[dict, dict[str, torch.Tensor]]:
    """What a recurrent layer keeps: numbers, and tensors by name."""
    states = {"record_past": layer.record_past, "previous": [], "kernel": []}
    tensors = {}
    for n in range(layer.number_of_states):
        states["previous"].append(layer.has_previous_state[n])
        states["kernel"].append(layer.conv_kernel_size[n])
        for name, state in (("conv", layer.conv_states[n]), ("recurrent", layer.recurrent_states[n])):
            if state is not None:
                tensors[f"{n}.{name}"] = state
    return states, tensors


def _restore_state(layer, said: dict, saved: SavedFile, name: str, device: torch.device) -> None:
    saving.require(isinstance(layer, LinearAttentionLayer), f"{name} of a layer that has none")
    layer.record_past = bool(said["record_past"])
    for n, (previous, kernel) in enumerate(zip(said["previous"], said["kernel"], strict=True)):
        parts = {part: f"{name}.{n}.{part}" for part in ("conv", "recurrent")}
        parts = {part: saved.tensor(key).to(device) for part, key in parts.items() if key in saved.table}
        saving.require(n < layer.number_of_states, f"{name} has a state {n}")
        tensors = {f"{part}_states": tensor for part, tensor in parts.items()}
        LinearAttentionLayer.lazy_initialization(layer, **tensors, state_idx=n, conv_kernel_size=kernel)
        for states, tensor in tensors.items():
            saving.require(len(tensor) == saved.description["batch"], f"{name} has {len(tensor)} rows")
            getattr(layer, states)[n] = tensor
        layer.has_previous_state[n] = bool(previous)


def _state_bytes(layer) -> int:
    if not isinstance(layer, LinearAttentionLayer):
        return 0
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(s.untyped_storage().nbytes() for s in states if s is not None)


class PagedCache(KVCache):
    """Everything, exactly, in blocks: grows without copying, shares blocks between rows and forks, gives back what it
    drops (PagedAttention, Kwon et al. 2023)."""

    def __init__(self, config, *, block_size: int | None = None, **choices):
        super().__init__(config, block_size=block_size, **choices)


class SlidingWindowCache(KVCache):
    """The last `window` positions and the first `sinks` ones (StreamingLLM, Xiao et al. 2024); memory stays flat for
    ever.

    Sinks that the window has left behind are attended at their position inside the cache where the model's rotary
    embedding can be read from its config (`Window(rebase=True)`), else at their position in the text; `repr(cache)`
    says which.
    """

    def __init__(self, config, *, window: int = 1024, sinks: int = 4, retention: Retention | None = None, **choices):
        super().__init__(config, retention=retention or Window(window, sinks), **choices)


class QuantizedCache(KVCache):
    """Sealed blocks in 8, 4 or 2 bits, keys per channel and values per token (KIVI, Liu et al. 2024), or in fp8; the
    newest `residual` positions stay exact. Each token is quantised once, and attended to packed."""

    def __init__(
        self,
        config,
        *,
        bits: int | str = 4,
        residual: int = 64,
        block_size: int = 64,
        codec: Codec | None = None,
        **choices,
    ):
        if codec is None and bits not in (2, 4, 8, "fp8"):
            raise ConfigurationError(f"bits={bits!r} is not a width this cache has; use 2, 4, 8 or 'fp8'.")
        super().__init__(config, codec=codec or bits, residual=residual, block_size=block_size, **choices)


class OffloadedCache(KVCache):
    """Everything, exactly; blocks older than the newest `resident_tokens` live in host memory or on disk and come back ahead
    of the attention over them.

    With a `disk_path` they go to a spill file in that folder, of at most `disk_bytes` of pages, once `host_bytes` of host memory
    are full (0 unless given); without one all of them go to host memory. See `DiskTier` and `HostTier`, which `tier` may also
    give.
    """

    def __init__(
        self,
        config,
        *,
        resident_tokens: int | None = None,
        host_bytes: int | None = None,
        disk_path: str | os.PathLike | None = None,
        disk_bytes: int | None = None,
        tier: Tier | None = None,
        **choices,
    ):
        limits = {"host_bytes": host_bytes, "disk_path": disk_path, "disk_bytes": disk_bytes}
        tier = _offload_tier(tier, resident_tokens, limits)
        super().__init__(config, tier=tier, **choices)


def _offload_tier(tier: Tier | None, resident_tokens: int | None, limits: dict) -> Tier:
    if tier is not None:
        others = [name for name, x in {"resident_tokens": resident_tokens, **limits}.items() if x is not None]
        if others:
            raise ConfigurationError(
                f"tier={tier!r} says where blocks live, and so does {others[0]}: give one of them."
            )
        return tier
    resident_tokens = 1024 if resident_tokens is None else resident_tokens
    path, disk_bytes, host_bytes = limits["disk_path"], limits["disk_bytes"], limits["host_bytes"]
    if path is not None:
        return DiskTier(resident_tokens, path, host_bytes=host_bytes or 0, disk_bytes=disk_bytes)
    if disk_bytes is not None:
        raise ConfigurationError(f"disk_bytes={disk_bytes} limits a file, and there is none without disk_path.")
    return HostTier(resident_tokens, host_bytes=host_bytes)


# What a file may say that a cache was. (A subclass of your own is loaded as the `KVCache` that it is.)
PRESETS = {kind.__name__: kind for kind in (KVCache, PagedCache, SlidingWindowCache, QuantizedCache, OffloadedCache)}


def cache_kwarg(cache: Cache) -> dict[str, Cache]:
    """`cache` under the keyword that the installed transformers gives it in `generate()` and `forward()`:
    `model.generate(**inputs, **cache_kwarg(cache))`. (`past_key_values`, and `cache` from 5.24 on.)"""
    return {_KEYWORD: cache}


def _keyword() -> str:
    from transformers.models.llama.modeling_llama import LlamaModel

    return "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


_KEYWORD = _keyword()
