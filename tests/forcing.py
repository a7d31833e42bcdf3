"""Teacher forcing: the logits of a given text, through a cache in passes of any length, and without a cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

import hf_kvcache
from eval import models
from hf_kvcache import cache_kwarg

from .architectures import VOCABULARY, build

# The demo model, on our attention, and its tokenizer: the same for all tests of a process.
demo_model = functools.cache(models.load)


def text(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[rows, columns]`."""
    return torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))


def padding(rows: int, columns: int, *missing: int) -> torch.Tensor:
    """An attention mask `[rows, columns]` with `missing[r]` columns of padding at the start of row `r`."""
    return (torch.arange(columns) >= torch.tensor(missing or [0] * rows)[:, None]).long()


def ours(name: str = "llama", dtype: torch.dtype = torch.float32, **changes) -> torch.nn.Module:
    """A tiny model on our attention."""
    return hf_kvcache.enable(build(name, dtype, **changes))


def generate(model, ids: torch.Tensor, cache, new: int) -> list[list[int]]:
    """`new` greedy tokens of every row of `ids`, after them."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_kwarg(cache),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return out[:, ids.shape[1] :].tolist()


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids as generate() makes them from a padding mask."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def forced(model, cache, ids, passes: Sequence[int] | None = None, mask=None) -> torch.Tensor:
    """Logits `[rows, columns, vocabulary]` of `ids` on top of what `cache` holds, in passes of the given lengths (or all
    at once). `mask` covers what is cached as well."""
    start, held, parts = 0, cache.get_seq_length(), []
    for length in passes or [ids.shape[1]]:
        options = {}
        if mask is not None:
            end = held + start + length
            options = {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, end - length : end]}
        parts.append(model(ids[:, start : start + length], **options, **cache_kwarg(cache)).logits)
        start += length
    assert start == ids.shape[1]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def uncached(model, ids, mask=None, sees: tuple[int, int] | None = None) -> torch.Tensor:
    """The same without a cache, on eager attention; with `sees` as `(window, sinks)`, through a mask that says so."""
    before, options = model.config._attn_implementation, {"use_cache": False}
    mask = torch.ones_like(ids) if mask is None else mask
    where = positions(mask)
    query, key = where[:, :, None], where[:, None]
    visible = (torch.tril(torch.ones(2 * ids.shape[1:])).bool() & mask[:, None].bool())[:, None]
    if sees is not None:
        visible &= ((key > query - sees[0]) | (key < sees[1]))[:, None]
    dtype = next(model.parameters()).dtype
    additive = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    model.set_attn_implementation("eager")
    options["attention_mask"] = mask if sees is None else additive
    try:
        return model(ids, position_ids=where, **options).logits
    finally:
        model.set_attn_implementation(before)


def error(ours: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """Root mean square of the difference over that of the reference, columns of padding left out."""
    if mask is not None:
        kept = mask[:, -ours.shape[1] :].bool()
        ours, reference = ours[kept], reference[kept]
    return float((ours - reference).norm() / reference.norm())
