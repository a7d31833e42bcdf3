"""Files that are whole or not there, files that vanish with their process, and checksums of what is read back.

A file under work carries a lock that the operating system drops with its owner, however that ends: what is unlocked and not yet
renamed is a leftover of a dead process, and `remove_leftovers` takes it away.
"""

from __future__ import annotations

import contextlib
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


def temporary(folder: Path, name: str = "") -> tuple[Path, BinaryIO]:
    """A new locked file of this process in `folder`, open to be written and read."""
    while True:
        path = folder / f"{name}.{uuid.uuid4().hex}{TEMPORARY}"
        file = open(path, "x+b")  # noqa: SIM115 - whoever asked for it closes it
        if _lock(file) and path.exists():
            return path, file
        file.close()  # somebody took it for a leftover before it was locked


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end of the block, on disk, in one step. After an error, or where
    the process dies, `path` is as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, file = temporary(path.parent, path.name)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
        _sync_folder(path.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the temporary files in `folder` whose process is no longer there; returns them."""
    gone = []
    for path in folder.glob(f"*{TEMPORARY}"):
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if _lock(file):
                path.unlink()
                gone.append(path)
    return gone


def _lock(file: BinaryIO) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _sync_folder(folder: Path) -> None:
    """Have the new name on disk as well, where folders can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
