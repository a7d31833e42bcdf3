"""Files that are whole or not there, files that vanish with their process, and checksums of what is read back.

A file under work carries a lock that the operating system drops with its owner, however that ends: what is unlocked and not yet
renamed is a leftover of a dead process, and `remove_leftovers` takes it away. (On a file system without locks, as some network
mounts are, files are made without, and leftovers stay.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

try:
    import fcntl
except ImportError:  # Windows: a file that is open there cannot be removed, which serves as well
    fcntl = None

TEMPORARY = ".hfkv-tmp"
RUN = 1 << 20  # bytes read or written at a time


def checksums(rows: np.ndarray) -> np.ndarray:
    """`[n]` uint64: a checksum of each row of `rows` (uint8, `[n, nbytes]`), of its length and of every bit in its place.

    The 32-bit words of a row (zeros fill the last one up) are multiplied by odd numbers and summed modulo 2 ** 64: what differs
    in one word never has the same sum. Made to notice damage, not forgery.
    """
    nbytes = rows.shape[1]
    if nbytes % 4:
        rows = np.pad(rows, ((0, 0), (0, -nbytes % 4)))
    words = np.ascontiguousarray(rows).view("<u4")
    weights = (np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    with np.errstate(over="ignore"):
        sums = np.einsum("ij,j->i", words, weights | np.uint64(1), dtype=np.uint64, casting="unsafe")
        return sums + np.uint64(nbytes)


def runs(offsets: np.ndarray, nbytes: int) -> list[tuple[int, int]]:
    """`[start, stop)` of rows of `nbytes` bytes that follow one another in a file, none longer than `RUN` bytes."""
    longest, found, start = max(1, RUN // nbytes), [], 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or i - start == longest or offsets[i] != offsets[i - 1] + nbytes:
            found.append((start, i))
            start = i
    return found


def read_rows(descriptor: int, offsets: np.ndarray, sums: np.ndarray, rows: np.ndarray) -> tuple[int, str] | None:
    """Fill `rows` (uint8 `[n, nbytes]`) from `offsets` (`[n]`) of a file and compare with their checksums (`[n]`); the first
    row that is not right, and why, or None. (`kernels/cpu.py` has the same in one native call.)"""
    nbytes = rows.shape[1]
    for start, stop in runs(offsets, nbytes):
        data, offset = memoryview(rows[start:stop]).cast("B"), int(offsets[start])
        while len(data):
            row = stop - 1 - (len(data) - 1) // nbytes
            try:
                count = os.preadv(descriptor, [data], offset)
            except OSError as error:
                return row, str(error.strerror)
            if count == 0:
                return row, f"the file ends {len(data)} bytes early"
            data, offset = data[count:], offset + count
        wrong = np.nonzero(checksums(rows[start:stop]) != sums[start:stop])[0]
        if len(wrong):
            return start + int(wrong[0]), "they are not what was written (another checksum)"
    return None


def temporary(folder: Path, name: str = "") -> tuple[Path, BinaryIO]:
    """A new locked file of this process in `folder`, open to be written and read. Nobody but its user may: it is to hold texts,
    and the folder of temporary files is everybody's."""
    while True:
        path = folder / f"{name}.{uuid.uuid4().hex}{TEMPORARY}"
        file = open(path, "x+b", opener=_private)  # noqa: SIM115 - whoever asked for it closes it
        try:
            kept = _lock(file) is not False and path.exists()
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        if kept:
            return path, file
        file.close()  # somebody took it for a leftover before it was locked


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end of the block, in one step. After an error, or where the
    process dies, `path` is as it was before; with `durable` also where the machine does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, file = temporary(path.parent, path.name)
    try:
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows renames no open file. Elsewhere it stays open, and so locked, until it has its name
            os.replace(new, path)
        if durable:
            _sync_folder(path.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def claim(path: Path) -> BinaryIO | None:
    """A file that stands for something only one may use: locked until it is closed, None where somebody else has it.

    Raises:
        OSError: it cannot be made, or the file system has no locks.
    """
    file, locked = open(path, "a+b"), None  # noqa: SIM115 - whoever asked for it closes it
    try:
        locked = _lock(file)
    finally:
        if not locked:
            file.close()
    if locked is None:
        raise OSError(errno.ENOLCK, "its file system has no locks", str(path))
    return file if locked else None


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the temporary files in `folder` whose process is no longer there; returns them."""
    gone = []
    for path in folder.glob(f"*{TEMPORARY}"):
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if _lock(file):
                path.unlink()
                gone.append(path)
    return gone


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _lock(file: BinaryIO) -> bool | None:
    """Whether a file is locked for us now; None where its file system has no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            return None
        raise


def _sync_folder(folder: Path) -> None:
    """Have the new name on disk as well, where folders can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
