"""Caches that find what others of their pool have computed: turns of a chat, requests with one system prompt, branches.

A session matches a prompt with the pool's prefix index (`prefix.py`), begins with the blocks that are there, and enters its
own full blocks as they are sealed, those of the answer too.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import LinearAttentionLayer

from .blocks import Attached
from .cache import KVCache, cache_kwarg, columns_within
from .errors import CacheInputError, ConfigurationError, UnsupportedError
from .identity import Identity
from .inputs import checked, medium, named, of_call, places_by_itself, setting, speculates
from .metrics import ReuseCounter, ReuseMetrics
from .pool import BlockPool
from .prefix import Below, Group, Match, Media, Node, Priority, Root, digest
from .rotary import depends_on_length

CACHE_KEYWORDS = ("cache", "past_key_values")


class Pin:
    """Blocks that stay until `release()`, or until the pool's prefixes are dropped. `tokens`: how many of each row."""

    def __init__(self, pool: BlockPool, nodes: list[Node], tokens: list[int]):
        self._pool, self._nodes, self.tokens = pool, nodes, tokens

    def release(self) -> None:
        """Let the blocks be evicted again. A second call does nothing."""
        with self._pool.lock:
            self._pool.prefixes.unpin(self._nodes)
            self._nodes = []


class Session(KVCache):
    """A cache of a pool that shares prefixes; `pool.session(...)` makes it. Used by one thread at a time.

    Two sessions share a block when all tokens up to its end are equal, and the model's weights, the dtype, the choices
    for the layers, `salt`, `adapter`, the media within it, and what else the model is given.

    Args:
        pool: the pool.
        salt: a secret of a tenant. What was computed under another one is never found, nor can it be told from what was
            never computed.
        adapter: name of an adapter that the caller applies. Adapters that peft has loaded into the model count with their
            weights, named here or not. A name must never stand for other weights, in a later process neither, where a ladder
            has a disk or a store is loaded: put a version into it.
        media: images and the like behind placeholder tokens, for all rows; `session.media` may grow from turn to turn. A
            call that hands their tensors to the model finds what comes before the first of them. They speak for all tensors
            but ids, mask, `position_ids` and `token_type_ids`; without `media`, a call with such tensors computes everything
            and leaves nothing to be found.
        priorities: which of this session's blocks are evicted first and last.
        partial_reuse: begin with part of a block where its first tokens match. (Exact storage only; copies that block.)
        choices: of `KVCache`.

    Raises:
        ConfigurationError: for priorities outside of 0 to 100, media, salt or adapter of another type, and for a tier: blocks
            that move are not shared.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        salt: str | bytes | None = None,
        adapter: str | None = None,
        media: Sequence[Media | tuple] | None = None,
        priorities: Sequence[Priority | tuple] = (),
        partial_reuse: bool = True,
        **choices,
    ):
        if pool.config is None:
            raise ConfigurationError("a session needs the model's config: BlockPool(model.config, ...).")
        super().__init__(pool.config, pool=pool, **choices)
        if any(group.tier.resident_tokens is not None for group in self.storage.groups):
            raise ConfigurationError(
                "a session cannot have a slower tier: its blocks would move while others read them."
            )
        self.salt, self.adapter, self.partial_reuse = named("salt", salt), named("adapter", adapter), partial_reuse
        self.media = None if media is None else [medium(item) for item in media]
        self.priorities = [checked(Priority(*item)) for item in priorities]
        self.reuse = ReuseCounter()
        self._seen: Identity | None = None  # what it is, where that was just looked at
        self._inputs: bytes | None = b""  # digest of what else the model is given; None: it cannot be told
        self._before_media = False  # whether the model computes the media, and what follows them
        self._from_scratch = False  # whether the model computes the whole prompt whatever is held
        self._namespace: bytes | None = None  # of what is held; None: of nothing that could be held again
        self._root: Root | None = None  # where what is held belongs; None where it is not shared
        self._tails: list[Node] = []  # for each row, or for each that rows were made of, the last block in the index
        self._shown: torch.Tensor | None = None  # ids of all columns, as generate() last had them
        self._media: list[Media] = []  # of the prompt, checked
        self._shown_media: list[Media] = []  # among what is held
        self._published = 0  # columns at the last look for new blocks
        self._keep_enough()

    def _keep_enough(self) -> None:
        """A hit ends with a sealed block: a window has to reach back from there. And what is shared must be where it seems."""
        self.storage.checks_positions = True
        for group in self.storage.groups:
            group.table.keep_beyond_window(self.block_size + group.table.residual)

    # ---- what users call --------------------------------------------------------------------------------------------

    def generate(self, model: torch.nn.Module, input_ids: torch.Tensor | None = None, **inputs):
        """`model.generate(input_ids, **inputs)` with this cache: begins with the longest prefix that is known, and leaves
        prompt and answer to be found. Without `attention_mask`, no column is padding. (Speculative decoding finds nothing:
        generate() then computes the whole prompt itself.)

        Returns:
            what `model.generate` returns.

        Raises:
            CacheInputError: without token ids, with a second cache, with other weights than the pool was filled by.
            UnsupportedError: for an encoder-decoder, whose states depend on more than its own tokens, and for weights on the
                meta device.
            CapacityError: the pool has no room; other sessions are as they were. This one holds what it found.
        """
        if input_ids is None or any(key in inputs for key in CACHE_KEYWORDS) or "inputs_embeds" in inputs:
            raise CacheInputError(
                "session.generate needs input_ids (not inputs_embeds), and is the cache itself: leave out "
                f"{' and '.join(CACHE_KEYWORDS)}."
            )
        mask = inputs.pop("attention_mask", None)
        mask = torch.ones_like(input_ids) if mask is None else mask
        self._see(model)
        self._begin(input_ids, mask, model, inputs)
        self._repeat(model, inputs, len(input_ids))
        watched = "assistant_model" not in inputs  # an assistant may speak other ids
        if watched:
            own = inputs.pop("logits_processor", None) or []
            inputs["logits_processor"] = LogitsProcessorList([*own, _Watch(self)])
        try:
            out = model.generate(input_ids, attention_mask=mask, **inputs, **cache_kwarg(self))
        except BaseException:
            self._know_what_is_held()  # of the prompt that was announced
            raise
        if not watched:
            self.show(out if isinstance(out, torch.Tensor) else out.sequences)
        self.publish()
        return out

    def prepare(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        model: torch.nn.Module | None = None,
    ) -> int:
        """Begin with the longest prefix of a prompt that this session or another of the pool holds; see `KVCache.prepare`.

        `model` is who computes; once the pool has seen it, it may be left out. Until then only the session's own tokens are
        found. What is generated after this by other means than `session.generate` is not entered into the index.

        This is for text alone: nothing here knows what else you give the model (images, `token_type_ids`, adapters by name,
        a mask of your own). Where you give it more than ids, padding mask and their positions, use `session.generate`, or a
        `salt` of its own for whatever it is.

        Returns:
            the number of leading columns that need no computation.
        """
        if model is not None:
            self._see(model)
        return self._begin(input_ids, attention_mask, None, {})

    def publish(self) -> None:
        """Enter the full blocks whose tokens are known into the pool's prefix index. `generate`, `prepare` and `reset` do it
        as well."""
        self._learn()
        self._published = self.storage.columns
        if self._root is None or self.token_ids is None or not self._tails or not self.storage.columns:
            return
        if self.storage.foreign_mask or not self.storage.at_rest() or not self._padding_is_as_told():
            return
        with self.pool.lock:
            self._root = self.pool.prefixes.root(self._root.key, self._root.block_size, self._root.groups)
            made_of = self.storage.batch // len(self.token_ids)
            tails = self.storage.batch // len(self._tails)
            self._tails = [
                self._publish_row(r, self.token_ids[r // made_of], self._tails[r // tails])
                for r in range(self.storage.batch)
            ]

    def pin(self, tokens: int | None = None) -> Pin:
        """Keep the first `tokens` of each row (None: all that it holds), in whole blocks, until the pin is released.

        Raises:
            CacheInputError: when nothing of them is in the index.
        """
        self.publish()
        with self.pool.lock:
            chains = [self._chain(tail, tokens) for tail in self._tails]
            if not any(chains):
                raise CacheInputError(
                    f"there is no full block of {self.block_size} tokens to pin; generate(model, ...) first, or prepare "
                    "with model=... and prefill."
                )
            nodes = [node for chain in chains for node in chain]
            self.pool.prefixes.pin(nodes)
        return Pin(self.pool, nodes, [len(chain) * self.block_size for chain in chains])

    def metrics(self) -> ReuseMetrics:
        """What this session looked up and found, and nothing of others."""
        return self.reuse.metrics()

    def reset(self) -> None:
        """Let go of every block; what is known stays in the pool's index."""
        self.publish()
        super().reset()
        self._namespace = self._root = self._shown = None
        self._tails, self._published = [], 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error) -> None:
        self.reset()

    # ---- who computes -----------------------------------------------------------------------------------------------

    def _see(self, model: torch.nn.Module) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{type(model).__name__} is an encoder-decoder: what its decoder stores depends on the encoder's input, so "
                "prefixes of its own tokens cannot be shared. Use a cache without a session."
            )
        self._seen = self.pool.bind(model)
        self._model = weakref.ref(model)

    def _belongs(self) -> tuple[bytes | None, Root | None]:
        """The namespace of what is computed now, and its tree. None for the tree where nothing can be shared, and for both
        where nothing that is held can be used again either."""
        model = (self._model and self._model()) or self.pool.model
        seen, self._seen = self._seen, None
        if self._inputs is None or depends_on_length(self.config) or (model is not None and places_by_itself(model)):
            return None, None
        identity = None
        if model is not None:
            identity = seen or self.pool.bind(model)  # adapters may have been switched since the last time
        groups, layout = [], []
        for group in self.storage.groups:
            rule, layers = group.retention, [x.layer for x in self.storage.layers if x is not None and x.group is group]
            groups.append(Group(group.store.sealed, rule.window, rule.sinks))
            layout.append(
                (
                    tuple(layers),
                    rule.window,
                    rule.sinks,
                    rule.rebase,
                    group.store.sealed.codec.name,
                    group.table.residual,
                )
            )
        text = self.config.get_text_config(decoder=True)
        namespace = digest(
            weights=identity and identity.weights,
            dtype=identity and str(identity.dtype),
            rotary=json.dumps(getattr(text, "rope_parameters", None), sort_keys=True, default=str),
            layout=tuple(layout),
            block_size=self.block_size,
            loaded_adapters=identity and identity.adapters,
            adapter=named("adapter", self.adapter),
            salt=named("salt", self.salt),
            inputs=self._inputs,
        )
        if identity is None or any(isinstance(layer, LinearAttentionLayer) for layer in self.layers):
            return namespace, None
        return namespace, self.pool.prefixes.root(namespace, self.block_size, groups)

    @property
    def _takes_parts(self) -> bool:
        """Whether a hit may end within a block. (With a lossy codec that block could not be opened again.)"""
        return self.partial_reuse and all(group.store.lossless for group in self.storage.groups)

    def _repeat(self, model: torch.nn.Module, inputs: dict, rows: int) -> None:
        """Have a row for each beam or sample; generate() repeats ids and mask, but not a cache of several rows."""
        repeats = max(setting(model, inputs, name) or 1 for name in ("num_beams", "num_return_sequences"))
        if rows > 1 and repeats > 1 and self.storage.columns:
            self.batch_repeat_interleave(repeats)

    def _begin(self, input_ids, attention_mask, model: torch.nn.Module | None, inputs: dict) -> int:
        """`prepare` for what `model` (None: a pass by hand) is given as `inputs`."""
        self._media = [medium(item) for item in self.media or ()]
        self._inputs, self._before_media = of_call(inputs, self._media)
        self._from_scratch = model is not None and speculates(model, inputs)
        return super().prepare(input_ids, attention_mask)

    # ---- finding ----------------------------------------------------------------------------------------------------

    def _reuse(self, rows: list[np.ndarray], mask: np.ndarray) -> int:
        self.publish()
        with self.pool.lock:
            namespace, root = self._belongs()
            stays = namespace is not None and namespace == self._namespace and not self._from_scratch
            held = self._sealed_whole(self._held_columns(rows, mask), mask) if stays else 0
            if held and not self.storage.can_crop(mask[:, :held].sum(axis=1)):
                held = 0
            columns = self._begin_with(root, rows, mask, held)
            self._namespace, self._root = namespace, root
            self._published, self._shown_media = columns, self._media
            if not columns:
                self._tails = [root] * len(rows) if root else []
            for node in (node for tail in self._tails for node in self._chain(tail)):
                node.uses += 1
            counts = sum(map(len, rows)), int(mask[:, :columns].sum())
            self.reuse.add(*counts)
            self.pool.reuse.add(*counts)
        return columns

    def _begin_with(self, root: Root | None, rows: list[np.ndarray], mask: np.ndarray, held: int) -> int:
        """Hold the first `held` columns, which are held already, or more where the pool knows more; returns how many."""
        below = self._below(root)
        matches = self._matches(root, rows, mask, below)
        found = self._found_columns(matches, mask)
        if found <= held:
            return self._keep_columns(held, mask)
        needs = list(zip(matches, mask[:, :found].sum(axis=1).tolist(), strict=True))
        if below is None or all(match.is_complete(length) for match, length in needs):
            return self._attach(matches, mask, found)
        held = self._keep_columns(held, mask)  # what would be let go of anyway makes room for what comes back
        with self.pool.recalled(root, needs):
            root = self.pool.prefixes.root(root.key, root.block_size, root.groups)
            matches = self._matches(root, rows, mask)
            found = self._found_columns(matches, mask)
            return self._attach(matches, mask, found) if found > held else held

    def _below(self, root: Root | None) -> Below | None:
        """What slower tiers have. In a fresh process what the pages of a layer will look like has to be said first; where
        the model is spread over several devices, its first pass says it."""
        if root is None or self.pool.ladder is None:
            return None
        model, identity = self.pool.model, self.pool.identity
        if len({parameter.device for parameter in model.parameters()}) == 1:
            for layer in filter(None, self.storage.layers):
                if layer.group.store.sealed.pages[layer.index] is None:
                    layer.expect(identity.dtype, identity.device)
        return self.pool.below(root)

    def _held_columns(self, rows: list[np.ndarray], mask: np.ndarray) -> int:
        """The same as far as the media are the same, too."""
        if self.storage.foreign_mask:
            return 0
        before = min((item.start for item in set(self._media) ^ set(self._shown_media)), default=mask.shape[1])
        before = min(before, self._limit(mask))
        return min(super()._held_columns(rows, mask), columns_within(mask, [before] * len(mask)))

    def _limit(self, mask: np.ndarray) -> int:
        """Tokens of a row that may be found: where the model is given the media, those before the first one."""
        if not self._before_media:
            return mask.shape[1]
        return min((item.start for item in self._media), default=0)

    def _matches(
        self, root: Root | None, rows: list[np.ndarray], mask: np.ndarray, below: Below | None = None
    ) -> list[Match]:
        if root is None or self._from_scratch:
            return []
        limit, parts = self._limit(mask), self._takes_parts
        return [self.pool.prefixes.match(root, row[:limit], self._media, parts, below) for row in rows]

    def _found_columns(self, matches: list[Match], mask: np.ndarray) -> int:
        """Leading columns that all rows find, each as every group of layers can give them."""
        if not matches:
            return 0
        lengths = [match.length for match in matches]
        while True:
            columns = self._whole_blocks(columns_within(mask, lengths), mask)
            asked = mask[:, :columns].sum(axis=1)
            lengths = [match.longest(n) for match, n in zip(matches, asked, strict=True)]
            if (asked <= lengths).all():
                return columns

    def _whole_blocks(self, columns: int, mask: np.ndarray) -> int:
        """Where blocks are not taken in part, `columns` less the part with which every row would end: blocks that follow
        it would not begin at a multiple of the block size, where others look for them. (Rows of different lengths do.)"""
        if self._takes_parts:
            return columns
        over = set((mask[:, :columns].sum(axis=1) % self.block_size).tolist())
        over = over.pop() if len(over) == 1 else 0
        return columns - over

    def _sealed_whole(self, columns: int, mask: np.ndarray) -> int:
        """The same where what is held would be cut within a packed block."""
        lengths = mask[:, :columns].sum(axis=1)
        for table in (group.table for group in self.storage.groups if not group.store.lossless):
            sealed = table.first[np.arange(table.rows), table.n_sealed] + table.gap
            if columns and (lengths < sealed).any():
                return self._whole_blocks(columns, mask)
        return columns

    def _attach(self, matches: list[Match], mask: np.ndarray, columns: int) -> int:
        """Let go of what is held and begin with the first `columns` columns of `matches`."""
        lengths = mask[:, :columns].sum(axis=1).tolist()
        rows = []
        for place, _ in enumerate(self.storage.groups):
            kept = [match.kept(place, n) for match, n in zip(matches, lengths, strict=True)]
            rows.append(
                [
                    Attached(match.pages(place, [*sinks, *recent]), (recent.start - len(sinks)) * self.block_size, n)
                    for match, n, (sinks, recent) in zip(matches, lengths, kept, strict=True)
                ]
            )
        self.storage.attach(rows, columns, None if mask[:, :columns].all() else mask[:, :columns].copy())
        self._shown = None
        self._tails = [
            match.nodes[n // self.block_size - 1] if n >= self.block_size else match.root
            for match, n in zip(matches, lengths, strict=True)
        ]
        for tail in self._tails if self.priorities else ():
            for node in self._chain(tail):
                self._prioritise(node)
        return columns

    # ---- entering ---------------------------------------------------------------------------------------------------

    def show(self, input_ids: torch.Tensor) -> None:
        """Be told the ids of all columns that are held; whenever blocks may have become full, they are entered."""
        self._shown = input_ids[:, : self.storage.columns]
        if self._root and self.storage.columns // self.block_size > self._published // self.block_size:
            self.publish()

    def _learn(self) -> None:
        """Take up the ids that generate() has shown."""
        if self._shown is None or not self.storage.at_rest() or len(self._shown) != self.storage.batch:
            return
        shown, valid = self._shown[:, : self.storage.columns].cpu().numpy(), self.storage.valid
        self._shown = None
        if valid is not None:
            self.token_ids = [row[keep[: len(row)]] for row, keep in zip(shown, valid, strict=True)]
        else:
            self.token_ids = list(shown)

    def _publish_row(self, r: int, tokens: np.ndarray, tail: Node) -> Node:
        """Enter row `r`'s blocks behind the last one that is entered; returns the new last one."""
        if not tail.alive or not tail.depth:
            tail = self._root
        tables = [group.table for group in self.storage.groups]
        tokens = tokens[: min(table.sealed_until(r) for table in tables)]
        sealed = [table.sealed_blocks(r, tail.depth) for table in tables]
        for part, there in self._root.cut(tokens, self._shown_media, tail.depth):
            pages = [blocks.get(tail.depth) for blocks in sealed]
            if any(page is None and table.window is None for page, table in zip(pages, tables, strict=True)):
                break
            tail = self.pool.publish(self._root, tail, part, there, pages)
            self._prioritise(tail)
        return tail

    def _prioritise(self, node: Node) -> None:
        first, last = (node.depth - 1) * self.block_size, node.depth * self.block_size
        ranges = [p for p in self.priorities if p.start < last and (p.stop is None or p.stop > first)]
        if ranges:
            highest = max(ranges, key=lambda p: p.level)
            self.pool.prefixes.prioritise(node, highest.level, highest.seconds)

    def _chain(self, tail: Node, tokens: int | None = None) -> list[Node]:
        """The blocks from the first one to `tail`, as far as they hold the first `tokens`."""
        chain = []
        while tail is not None and tail.depth:
            chain.append(tail)
            tail = tail.parent
        chain.reverse()
        return chain if tokens is None else chain[: tokens // self.block_size]

    # ---- saving -----------------------------------------------------------------------------------------------------

    def _known(self) -> tuple[list[np.ndarray] | None, np.ndarray | None]:
        """Ids that say all of what is held: a plain cache, as which it is loaded, goes by nothing else."""
        self.publish()
        if self._inputs != b"" or self.storage.foreign_mask or self.token_ids is None:
            return None, None
        before = min((item.start for item in self._shown_media), default=None)
        return [row[:before] for row in self.token_ids], self.told

    # ---- rows and columns -------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._cut()

    def _keep_columns(self, columns: int, mask: np.ndarray) -> int:
        columns = super()._keep_columns(columns, mask)
        self._cut()
        return columns

    def _cut(self) -> None:
        """Forget what was entered, or shown, of tokens that are no longer held."""
        self._published = min(self._published, self.storage.columns)
        if self._shown is not None:
            self._shown = self._shown[:, : self.storage.columns]
        if not self.storage.columns:
            self._tails, self._shown = [], None
            return
        lengths = self.storage.groups[0].table.length
        copies = self.storage.batch // len(self._tails) if self._tails else 1
        for r, tail in enumerate(self._tails):
            while tail.depth * self.block_size > lengths[r * copies]:
                tail = tail.parent or self._root
            self._tails[r] = tail

    def _know_what_is_held(self) -> None:
        """After a failure: forget the ids of a prompt that were announced and never computed."""
        self.storage.settle()
        if self.token_ids is not None:
            copies = max(1, self.storage.batch // len(self.token_ids))
            self.token_ids = [ids[: self._row_tokens(r * copies)] for r, ids in enumerate(self.token_ids)]
        self._cut()

    def _select(self, indices: torch.Tensor) -> None:
        batch = self.storage.batch
        super()._select(indices)
        rows = indices.detach().cpu().reshape(-1).tolist()
        if batch and self._tails:
            copies = batch // len(self._tails)
            self._tails = [self._tails[r // copies] for r in rows]
        if self._shown is not None:
            self._shown = self._shown[indices.reshape(-1).to(self._shown.device)]

    def _empty_twin(self) -> Session:
        twin = super()._empty_twin()
        twin._tails, twin.reuse = list(self._tails), ReuseCounter()
        twin.media, twin.priorities = self.media and list(self.media), list(self.priorities)
        twin._keep_enough()
        return twin


class _Watch(LogitsProcessor):
    """Shows a session the ids of what its cache holds: generate() has just computed all of them."""

    def __init__(self, session: Session):
        self.session = session

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.session.show(input_ids)
        return scores
