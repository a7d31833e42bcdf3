"""Caches that find what others of their pool have computed: turns of a chat, requests with one system prompt, branches.

A session matches a prompt with the pool's prefix index (`prefix.py`), begins with the blocks that are there, and enters its
own full blocks as they are sealed, those of the answer too.
"""

from __future__ import annotations

import hashlib
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
from .metrics import ReuseCounter, ReuseMetrics
from .pool import BlockPool
from .prefix import Group, Match, Media, Node, Priority, Root, digest
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
    for the layers, `salt`, `adapter`, and the media within it.

    Args:
        pool: the pool.
        salt: a secret of a tenant. What was computed under another one is never found, nor can it be told from what was
            never computed.
        adapter: name of an adapter that the caller applies. Adapters that peft has loaded into the model count with their
            weights, named here or not.
        media: images and the like behind placeholder tokens, for all rows; `session.media` may grow from turn to turn.
            Without it, tensors that the model is given besides ids and mask count as a whole.
        priorities: which of this session's blocks are evicted first and last.
        partial_reuse: begin with part of a block where its first tokens match. (Exact storage only; copies that block.)
        choices: of `KVCache`.

    Raises:
        ConfigurationError: for priorities outside of 0 to 100, and for a tier: blocks that move are not shared.
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
        self.salt, self.adapter, self.partial_reuse = salt, adapter, partial_reuse
        self.media = None if media is None else list(media)
        self.priorities = [_checked(Priority(*item)) for item in priorities]
        self.reuse = ReuseCounter()
        self._model: weakref.ref | None = None
        self._seen: Identity | None = None  # what it is, where that was just looked at
        self._inputs = b""  # digest of what else the model is given
        self._from_scratch = False  # whether the model computes the whole prompt whatever is held
        self._root: Root | None = None  # where what is held belongs
        self._tails: list[Node] = []  # for each row, or for each that rows were made of, the last block in the index
        self._shown: torch.Tensor | None = None  # ids of all columns, as generate() last had them
        self._shown_media: list[Media] = []  # among what is held
        self._published = 0  # columns at the last look for new blocks
        self._keep_enough()

    def _keep_enough(self) -> None:
        """A hit ends with a sealed block: a window has to reach back from there."""
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
            UnsupportedError: for an encoder-decoder, whose states depend on more than its own tokens.
            CapacityError: the pool has no room; other sessions are as they were.
        """
        if input_ids is None or any(key in inputs for key in CACHE_KEYWORDS) or "inputs_embeds" in inputs:
            raise CacheInputError(
                "session.generate needs input_ids (not inputs_embeds), and is the cache itself: leave out "
                f"{' and '.join(CACHE_KEYWORDS)}."
            )
        mask = inputs.pop("attention_mask", None)
        mask = torch.ones_like(input_ids) if mask is None else mask
        self._see(model)
        self._begin(input_ids, mask, self._digest(inputs), _speculates(model, inputs))
        self._repeat(model, inputs, len(input_ids))
        watched = "assistant_model" not in inputs  # an assistant may speak other ids
        if watched:
            own = inputs.pop("logits_processor", None) or []
            inputs["logits_processor"] = LogitsProcessorList([*own, _Watch(self)])
        out = model.generate(input_ids, attention_mask=mask, **inputs, **cache_kwarg(self))
        if not watched:
            self._shown = out if isinstance(out, torch.Tensor) else out.sequences
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

        Returns:
            the number of leading columns that need no computation.
        """
        if model is not None:
            self._see(model)
        return self._begin(input_ids, attention_mask, b"", False)

    def publish(self) -> None:
        """Enter the full blocks whose tokens are known into the pool's prefix index. `generate`, `prepare` and `reset` do it
        as well."""
        self._learn()
        if self._root is None or self.token_ids is None or not self._tails or not self.storage.columns:
            return
        if not self.storage.at_rest() or not self._padding_is_as_told():
            return
        with self.pool.lock:
            self._root = self.pool.prefixes.root(self._root.key, self._root.block_size, self._root.groups)
            made_of = self.storage.batch // len(self.token_ids)
            tails = self.storage.batch // len(self._tails)
            self._tails = [
                self._publish_row(r, self.token_ids[r // made_of], self._tails[r // tails])
                for r in range(self.storage.batch)
            ]
        self._published = self.storage.columns

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
        self._root, self._tails, self._shown, self._published = None, [], None, 0

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

    def _namespace(self) -> Root | None:
        """Where blocks belong that are computed now; None where none can be shared."""
        model = (self._model and self._model()) or self.pool.model
        seen, self._seen = self._seen, None
        recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in self.layers)
        if model is None or recurrent or depends_on_length(self.config):
            return None
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
            weights=identity.weights,
            dtype=str(identity.dtype),
            rotary=json.dumps(getattr(text, "rope_parameters", None), sort_keys=True, default=str),
            layout=tuple(layout),
            block_size=self.block_size,
            loaded_adapters=identity.adapters,
            adapter=self.adapter,
            salt=self.salt,
            inputs=self._inputs,
        )
        return self.pool.prefixes.root(namespace, self.block_size, groups)

    @property
    def _takes_parts(self) -> bool:
        """Whether a hit may end within a block. (With a lossy codec that block could not be opened again.)"""
        return self.partial_reuse and all(group.store.lossless for group in self.storage.groups)

    def _digest(self, inputs: dict) -> bytes:
        """Of every tensor that the model is given beside ids and mask. Declared media speak for theirs."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        if self.media is not None:
            tensors = {name: value for name, value in tensors.items() if name == "position_ids"}
        found = hashlib.sha256()
        for name, value in sorted(tensors.items()):
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found.update(digest(name=name, shape=tuple(value.shape), dtype=str(value.dtype), data=data))
        return found.digest() if tensors else b""

    def _repeat(self, model: torch.nn.Module, inputs: dict, rows: int) -> None:
        """Have a row for each beam or sample; generate() repeats ids and mask, but not a cache of several rows."""
        config = inputs.get("generation_config") or model.generation_config
        get = lambda name: inputs.get(name) or getattr(config, name, None) or 1  # noqa: E731
        repeats = max(get("num_beams"), get("num_return_sequences"))
        if rows > 1 and repeats > 1 and self.storage.columns:
            self.batch_repeat_interleave(repeats)

    def _begin(self, input_ids, attention_mask, inputs: bytes, from_scratch: bool) -> int:
        """`prepare` for a model that is also given what `inputs` is the digest of, and perhaps computes the whole prompt
        whatever is held."""
        self._inputs, self._from_scratch = inputs, from_scratch
        return super().prepare(input_ids, attention_mask)

    # ---- finding ----------------------------------------------------------------------------------------------------

    def _reuse(self, rows: list[np.ndarray], mask: np.ndarray) -> int:
        self.publish()
        with self.pool.lock:
            root = self._namespace()
            stays = (root and root.key) == (self._root and self._root.key) and not self._from_scratch
            held = self._sealed_whole(self._held_columns(rows, mask), mask) if stays else 0
            media = [Media(*item) for item in self.media or ()]
            if held and not self.storage.can_crop(mask[:, :held].sum(axis=1)):
                held = 0
            matches = self._matches(root, rows, media)
            found = self._found_columns(matches, mask)
            columns = self._attach(matches, mask, found) if found > held else self._keep_columns(held, mask)
            self._root, self._published, self._shown_media = root, columns, media
            if not columns:
                self._tails = [root] * len(rows) if root else []
            counts = sum(map(len, rows)), int(mask[:, :columns].sum())
            self.reuse.add(*counts)
            self.pool.reuse.add(*counts)
        return columns

    def _held_columns(self, rows: list[np.ndarray], mask: np.ndarray) -> int:
        """The same as far as the media are the same, too."""
        changed = {Media(*item) for item in self.media or ()} ^ set(self._shown_media)
        before = min((item.start for item in changed), default=mask.shape[1])
        return min(super()._held_columns(rows, mask), columns_within(mask, [before] * len(mask)))

    def _matches(self, root: Root | None, rows: list[np.ndarray], media: list[Media]) -> list[Match]:
        if root is None or self._from_scratch:
            return []
        return [self.pool.prefixes.match(root, row, media, self._takes_parts) for row in rows]

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
        self._shown = input_ids
        if self.storage.columns // self.block_size > self._published // self.block_size or not self._published:
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

    # ---- rows and columns -------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._cut()

    def _keep_columns(self, columns: int, mask: np.ndarray) -> int:
        columns = super()._keep_columns(columns, mask)
        self._cut()
        return columns

    def _cut(self) -> None:
        """Forget what was entered of tokens that are no longer held."""
        if not self.storage.columns:
            self._tails, self._shown = [], None
            return
        lengths = self.storage.groups[0].table.length
        copies = self.storage.batch // len(self._tails) if self._tails else 1
        for r, tail in enumerate(self._tails):
            while tail.depth * self.block_size > lengths[r * copies]:
                tail = tail.parent or self._root
            self._tails[r] = tail

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
        twin._keep_enough()
        return twin


class _Watch(LogitsProcessor):
    """Shows a session the ids of what its cache holds: generate() has just computed all of them."""

    def __init__(self, session: Session):
        self.session = session

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.session.show(input_ids)
        return scores


def _speculates(model: torch.nn.Module, inputs: dict) -> bool:
    """Whether generate() will have drafts checked: it then begins with the whole prompt, whatever a cache holds."""
    config = inputs.get("generation_config") or model.generation_config
    names = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
    return any(inputs.get(name) or getattr(config, name, None) for name in names)


def _checked(priority: Priority) -> Priority:
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
