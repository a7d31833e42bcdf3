"""What every kernel reads: pages at addresses, and a table that says which of them a query may see.

A row's storage is a list of **entries**, oldest first. An entry is a block: a page id and the *stored index* of its
first position. Stored indices count the positions that are kept (`0 .. kept - 1`); where retention dropped positions
they differ from positions in the text, and only the planner knows. Entries `[entry_begin, n_sealed)` are pages of the
layer's codec, `[n_sealed, entry_end)` pages in the model's dtype. An entry may hold fewer positions than its page has
slots: it ends where the next one begins, and slots beyond that hold anything, NaN included.

Query `i` of row `b` sees the stored indices `[0, sinks)` and `[begin[b, i], end[b, i])`, each index once, as far as the
view's entries cover them. With `rope` given, the sinks outside of `[begin, end)` see the query rotated by those angles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..codecs.base import Codec, Geometry, PageLayout


@dataclass
class Pages:
    """The pages of one layer in one store.

    `slabs` are uint8 tensors `[pages, layout.nbytes]`; page `i` is row `row[i]` of slab `slab[i]`, at byte address
    `addresses[i]` (all three numpy arrays, indexed by page id; addresses are int64). What stands for a slab in a file is
    indexed like one (`cold.py`), and addresses are places in the file: its pages are for `raw` and `put_raw`, not for kernels.
    """

    codec: Codec
    geometry: Geometry
    layout: PageLayout
    order: str
    slabs: list[torch.Tensor]
    slab: np.ndarray
    row: np.ndarray
    addresses: np.ndarray

    def raw(self, ids: np.ndarray) -> torch.Tensor:
        """A copy of the bytes of pages `ids`: uint8 `[len(ids), layout.nbytes]`, where the pages are."""
        parts, places = [], []
        for slab, rows, place in self._by_slab(ids):
            parts.append(_words(slab)[rows].view(torch.uint8))
            places.append(place)
        if len(parts) == 1:
            return parts[0]
        pages = torch.cat(parts) if parts else torch.empty((0, self.layout.nbytes), dtype=torch.uint8)
        return pages[torch.from_numpy(np.argsort(np.concatenate([np.zeros(0, np.int64), *places]))).to(pages.device)]

    def put_raw(self, ids: np.ndarray, pages: torch.Tensor) -> None:
        """Store bytes (as of `raw`, on any device) into pages `ids`."""
        for slab, rows, place in self._by_slab(ids):
            part = pages if len(place) == len(pages) else pages[torch.from_numpy(place).to(pages.device)]
            _words(slab)[rows] = _words(part.to(slab.device))

    def in_file(self, ids: np.ndarray) -> np.ndarray:
        """`[len(ids)]` which of these pages are in a file."""
        return np.array([not isinstance(slab, torch.Tensor) for slab in self.slabs], bool)[self.slab[ids]]

    def over(self, buffer: torch.Tensor) -> Pages:
        """Pages of this kind that are the rows of `buffer` (uint8 `[n, layout.nbytes]`), with ids from 0 on."""
        n = len(buffer)
        addresses = buffer.data_ptr() + np.arange(n, dtype=np.int64) * self.layout.nbytes
        return replace(
            self, slabs=[buffer], slab=np.zeros(n, np.int32), row=np.arange(n, dtype=np.int32), addresses=addresses
        )

    def _by_slab(self, ids: np.ndarray):
        """Each slab that holds some of `ids`, its rows, and their places in `ids`."""
        for number in np.unique(self.slab[ids]):
            place = np.nonzero(self.slab[ids] == number)[0]
            slab = self.slabs[number]
            yield slab, torch.from_numpy(self.row[ids[place]].astype(np.int64)).to(slab.device), place

    def gather(self, ids: np.ndarray) -> dict[str, torch.Tensor]:
        """A copy of the fields of pages `ids`: `[len(ids), *shape]` each."""
        return self.layout.views(self.raw(ids))

    def scatter(self, ids: np.ndarray, fields: dict[str, torch.Tensor]) -> None:
        """Store `fields` (`[len(ids), *shape]` each, on any device) into pages `ids`."""
        for slab, rows, place in self._by_slab(ids):
            for name, view in self.layout.views(slab).items():
                view[rows] = fields[name][torch.from_numpy(place)].to(view.device, view.dtype)

    def decode(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[len(ids), kv_heads, block_size, dim]` of pages `ids` in float32."""
        return self.codec.decode(self.gather(ids), self.geometry, self.order)


def _words(pages: torch.Tensor) -> torch.Tensor:
    """The same bytes, eight at a time: indexing costs by the element, and a page is a whole number of cache lines."""
    return pages.view(torch.int64)


@dataclass
class Rotation:
    """Angles that turn a query back to its position inside the cache: `cos` and `sin` `[batch, q_len, rotary_dim / 2]`
    in float32; `interleaved` says whether channel pairs are `(2j, 2j + 1)` or `(j, j + rotary_dim / 2)`."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def apply(self, q: torch.Tensor) -> torch.Tensor:
        """`q` `[batch, heads, q_len, dim]` with its first `rotary_dim` channels rotated, in float32."""
        half = self.cos.shape[-1]
        cos, sin = self.cos[:, None], self.sin[:, None]
        rotated, rest = q[..., : 2 * half].float(), q[..., 2 * half :].float()
        if self.interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = rotated[..., :half], rotated[..., half:]
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned, rest), dim=-1)


@dataclass
class View:
    """What a decode kernel attends to; see the module for the meaning. All arrays are C-contiguous int32.

    `ids` `[batch, stride]`, `first` `[batch, stride + 1]`, `entry_begin`, `n_sealed`, `entry_end` `[batch]`,
    `begin`, `end` `[batch, q_len]`.
    """

    ids: np.ndarray
    first: np.ndarray
    entry_begin: np.ndarray
    n_sealed: np.ndarray
    entry_end: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    sinks: int = 0
    rope: Rotation | None = None

    def narrowed(self, entry_begin: np.ndarray, entry_end: np.ndarray) -> View:
        """The same queries over fewer entries."""
        return replace(self, entry_begin=entry_begin, entry_end=entry_end)
