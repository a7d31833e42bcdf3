"""Saved state as one safetensors file: named tensors and what they mean, written whole or not at all, checked before it is used.

Beside safetensors' table of tensors the header has `__metadata__`: `format` and `version` (every other version is refused),
`description` (JSON; `saving.py` and `saved_prefixes.py` say what is in it), and `digest`, the SHA-256 of the header without it.
The last tensor, `checksums`, has a number (`files.checksums`) for each row of every tensor before it: for each index of the first
dimension, or one for a tensor of one dimension. So every bit of the file counts. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem

from . import files
from .errors import IntegrityError, KVCacheError, SavedStateError, TierError
from .kernels.cpu import checksums

FORMAT, VERSION = "hf_kvcache", "1"
CHECKSUMS = "checksums"
MAX_HEADER = 100_000_000  # bytes, as safetensors has it
PART = 1 << 24  # bytes that are read, or written, at a time
DTYPES = {"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
          "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ---- where files are -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(path_or_url: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path_or_url` when all of it is there.

    Raises:
        SavedStateError: it could not be written (a full disk, no such place); what was there before still is.
    """
    fs, path = _place(path_or_url)
    if isinstance(fs, LocalFileSystem):
        files.remove_leftovers(Path(path).parent)
        try:
            with files.replacing(Path(path)) as file:
                yield file
        except TierError:  # the pages that were to be written could not be read: no fault of this file's
            raise
        except OSError as error:
            raise _not_written(path_or_url, error) from error
        return
    with _temporary(path_or_url) as file:
        yield file
        file.flush()
        new = f"{path}.{uuid.uuid4().hex}{files.TEMPORARY}"
        try:
            fs.put_file(file.name, new)
            fs.mv(new, path)
        except Exception as error:  # each file system raises its own
            with contextlib.suppress(Exception):
                fs.rm_file(new)
            raise _not_written(path_or_url, error) from error


@contextlib.contextmanager
def reading(path_or_url: str | os.PathLike) -> Iterator[BinaryIO]:
    """A local file with the bytes of `path_or_url`.

    Raises:
        SavedStateError: there is none, or it could not be read.
    """
    fs, path = _place(path_or_url)
    if isinstance(fs, LocalFileSystem):
        files.remove_leftovers(Path(path).parent)
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise _not_read(path_or_url, error) from error
        with file:
            yield file
        return
    with _temporary(path_or_url) as file:
        try:
            fs.get_file(path, file.name)
        except Exception as error:  # each file system raises its own
            raise _not_read(path_or_url, error) from error
        yield file


def _place(path_or_url: str | os.PathLike) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        return fsspec.core.url_to_fs(os.fspath(path_or_url))
    except Exception as error:  # an unknown protocol, or one whose package is not installed
        raise SavedStateError(
            f"{path_or_url!r} names no place that fsspec can reach: {error}. Use a path, or a URL such as s3://bucket/name "
            "with the package that its protocol needs."
        ) from error


@contextlib.contextmanager
def _temporary(path_or_url: str | os.PathLike) -> Iterator[BinaryIO]:
    """A local file on the way to another place, or from there."""
    folder = Path(tempfile.gettempdir())
    files.remove_leftovers(folder)
    path, file = files.temporary(folder)
    try:
        with file:
            yield file
    except TierError:  # of pages that come from a slower tier or go there: no fault of this file's
        raise
    except OSError as error:
        raise _not_written(path_or_url, error) from error
    finally:
        path.unlink(missing_ok=True)


def _not_written(path_or_url: str | os.PathLike, error: Exception) -> SavedStateError:
    full = "make room, or save elsewhere" if getattr(error, "errno", None) == errno.ENOSPC else "save elsewhere"
    return SavedStateError(
        f"{path_or_url} could not be written ({type(error).__name__}: {error}); what was there before still is, and nothing "
        f"else has changed: {full}."
    )


def _not_read(path_or_url: str | os.PathLike, error: Exception) -> SavedStateError:
    return SavedStateError(f"{path_or_url} could not be read ({type(error).__name__}: {error}).")


# ---- writing ---------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor to be written: safetensors' name of its dtype, its shape, and a function that gives its rows, a few at a time, as
    uint8 `[n, nbytes]`."""

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[np.ndarray]]

    @classmethod
    def of(cls, tensor: torch.Tensor | np.ndarray) -> Entry:
        """A tensor that is there as a whole."""
        tensor = torch.as_tensor(tensor).detach().cpu().contiguous()
        rows = tensor.reshape(-1).view(torch.uint8).numpy().reshape(_rows(tensor.shape), -1)
        return cls(NAMES[tensor.dtype], tuple(tensor.shape), lambda: [rows])


def _rows(shape: Iterable[int]) -> int:
    shape = tuple(shape)
    return shape[0] if len(shape) > 1 else 1


def write(file: BinaryIO, description: dict, entries: dict[str, Entry]) -> None:
    """Write a file of saved state, without ever holding more of it than `PART` bytes or one entry's part."""
    table, offset = {}, 0
    shapes = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    shapes[CHECKSUMS] = "U64", (sum(_rows(entry.shape) for entry in entries.values()),)
    for name, (dtype, shape) in shapes.items():
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    said = {"format": FORMAT, "version": VERSION, "description": json.dumps(description)}
    said["digest"] = _digest({"__metadata__": said, **table})
    header = json.dumps({"__metadata__": said, **table}).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    sums = [np.zeros(0, np.uint64)]
    for name, entry in entries.items():
        before = len(sums)
        for rows in entry.parts():
            file.write(np.ascontiguousarray(rows).data)
            sums.append(checksums(rows))
        if sum(map(len, sums[before:])) != _rows(entry.shape):
            raise IntegrityError(f"{name} has other rows than its shape {entry.shape} says.")
    file.write(np.concatenate(sums).astype("<u8").tobytes())


def _digest(header: dict) -> str:
    said = {key: value for key, value in header["__metadata__"].items() if key != "digest"}
    return hashlib.sha256(json.dumps({**header, "__metadata__": said}, sort_keys=True).encode()).hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------------


class SavedFile:
    """A file of saved state, its header checked. Of the tensors nothing is in memory until it is asked for.

    Attributes:
        description: what the writer said.
        table: dtype, shape and offsets of every tensor.

    Raises:
        SavedStateError: it is something else, of another version, truncated or damaged.
    """

    def __init__(self, file: BinaryIO, name: str | os.PathLike, kind: str):
        self._file, self.name = file, name
        size = file.seek(0, os.SEEK_END)
        length = int.from_bytes(self._read(0, 8).tobytes(), "little") if size >= 8 else size
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            raise self.refused(f"its {size} bytes are no safetensors file, or a truncated one")
        with self.understanding():
            header = json.loads(self._read(8, length).tobytes())
            said = header["__metadata__"]
            if said["format"] != FORMAT:
                raise self.refused(f"it is {said['format']!r}, not {FORMAT!r}")
            if said["version"] != VERSION:
                raise self.refused(f"its format has version {said['version']!r}, this release reads {VERSION!r}")
            if said["digest"] != _digest(header):
                raise self.refused("the checksum of its header differs")
            self.table = {key: value for key, value in header.items() if key != "__metadata__"}
            self.description = json.loads(said["description"])
            self._data = 8 + length
            self._lay_out(size)
            if self.description["kind"] != kind:
                raise self.refused(f"it holds a {self.description['kind']}, not a {kind}")

    def _lay_out(self, size: int) -> None:
        """Check that the tensors lie one after the other up to the end of the file, and find each one's checksums."""
        end, rows, self._first_row = self._data, 0, {}
        for name, entry in sorted(self.table.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (start, stop) = entry["shape"], entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
                raise ValueError(f"{name} has shape {shape} at {start, stop}")
            if self._data + start != end or stop - start != math.prod(shape) * DTYPES[entry["dtype"]].itemsize:
                raise ValueError(f"{name} does not fit its place")
            end, self._first_row[name], rows = self._data + stop, rows, rows + _rows(shape)
        if end != size:
            raise self.refused(f"it has {size} bytes and should have {end}: it is truncated, or something was added")
        count = self._first_row[CHECKSUMS]
        if rows != count + 1 or self.table[CHECKSUMS]["shape"] != [count] or self.table[CHECKSUMS]["dtype"] != "U64":
            raise ValueError("checksums are not the last tensor, or not as many as there are rows")
        start, stop = self.table[CHECKSUMS]["data_offsets"]
        self._sums = self._read(self._data + start, stop - start).view("<u8")

    def expect(self, name: str, shape: tuple[int | None, ...], dtype: str = "U8") -> dict:
        """The entry of a tensor of this shape (None: any), which has to be there."""
        entry = self.table.get(name)
        if entry is None:
            raise self.refused(f"it has no tensor {name}")
        has, wanted = entry["shape"], list(shape)
        if (
            entry["dtype"] != dtype
            or len(has) != len(wanted)
            or any(n not in (None, m) for n, m in zip(wanted, has, strict=True))
        ):
            raise self.refused(f"{name} is {entry['dtype']} {has} and should be {dtype} {wanted}")
        return entry

    def rows(self, name: str, shape: tuple[int | None, ...], dtype: str = "U8") -> Iterator[np.ndarray]:
        """The rows of a tensor of this shape (None: any), uint8 `[n, nbytes]`, a few at a time and each one checked.

        Raises:
            SavedStateError: there is no such tensor, or it is damaged.
        """
        entry = self.expect(name, shape, dtype)
        start, stop = entry["data_offsets"]
        count = _rows(entry["shape"])
        nbytes = (stop - start) // max(1, count)
        step = max(1, PART // max(1, nbytes))
        for row in range(0, count, step):
            n = min(step, count - row)
            part = self._read(self._data + start + row * nbytes, n * nbytes).reshape(n, nbytes)
            at = self._first_row[name] + row
            wrong = np.nonzero(checksums(part) != self._sums[at : at + n])[0]
            if len(wrong):
                raise self.refused(f"the checksum of {name}, row {row + int(wrong[0])}, differs")
            yield part

    def tensor(self, name: str, shape: tuple[int | None, ...] | None = None, dtype: str | None = None) -> torch.Tensor:
        """A tensor as a whole; see `rows`. Without `shape` and `dtype`, as the file says."""
        if shape is None and name in self.table:
            shape, dtype = tuple(self.table[name]["shape"]), self.table[name]["dtype"]
        parts = [part.reshape(-1) for part in self.rows(name, shape, dtype)]
        out = torch.empty(self.table[name]["shape"], dtype=DTYPES[dtype])
        if out.numel():
            out.view(-1).view(torch.uint8)[:] = torch.from_numpy(np.concatenate(parts))
        return out

    def array(self, name: str, shape: tuple[int | None, ...], dtype: str) -> np.ndarray:
        return self.tensor(name, shape, dtype).numpy()

    def verify(self) -> None:
        """Read everything and check it."""
        for name in self.table.keys() - {CHECKSUMS}:
            for _ in self.rows(name, (None,) * len(self.table[name]["shape"]), self.table[name]["dtype"]):
                pass

    def _read(self, offset: int, count: int) -> np.ndarray:
        """`count` bytes, no fewer."""
        out = np.empty(count, np.uint8)
        left = memoryview(out)
        try:
            self._file.seek(offset)
            while left:
                n = self._file.readinto(left)
                if not n:
                    raise self.refused(f"it ends {len(left)} bytes too early")
                left = left[n:]
        except OSError as error:
            raise _not_read(self.name, error) from error
        return out

    def refused(self, what: str) -> SavedStateError:
        return SavedStateError(
            f"{self.name} cannot be used: {what}. Nothing was changed; save it again, or compute what it held."
        )

    @contextlib.contextmanager
    def understanding(self) -> Iterator[None]:
        """What does not make sense inside is the file's fault."""
        try:
            yield
        except KVCacheError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise self.refused(f"it is damaged, or was not written by us ({type(error).__name__}: {error})") from error
