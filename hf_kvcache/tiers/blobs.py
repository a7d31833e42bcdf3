"""Where blocks wait that the device gave up: blobs by name, within a budget, the least recently used given up first.

What a blob says is the ladder's business (`ladder.py`); here it is bytes. A blob may be loaded once `complete_store` has
returned, and stays from `prepare_load` to `complete_load`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np

from .. import files
from ..errors import ConfigurationError, IntegrityError
from ..metrics import TierMetrics

logger = logging.getLogger(__name__)


class Blobs(ABC):
    """Blobs (uint8 arrays) by name.

    Args:
        budget: bytes that they may take up in all.

    Attributes:
        sizes: bytes of each blob, least recently used first.
        used: their sum.
    """

    name: str

    def __init__(self, budget: int):
        self.budget, self.used = budget, 0
        self.sizes: OrderedDict[str, int] = OrderedDict()
        self._loading: Counter[str] = Counter()
        self.stores = self.restores = self.evictions = self.failures = 0

    @abstractmethod
    def _write(self, name: str, blob: np.ndarray) -> None:
        """Keep a blob, whole or not at all."""

    @abstractmethod
    def _read(self, name: str, nbytes: int) -> np.ndarray:
        """The bytes of a blob, or an error where there are fewer."""

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Give a blob's bytes back. That they are gone already is no error."""

    def lookup(self, name: str) -> bool:
        """Whether a blob can be loaded. Changes nothing."""
        return name in self.sizes

    def touch(self, name: str) -> None:
        """A blob was of use."""
        self.sizes.move_to_end(name)

    def prepare_load(self, name: str) -> None:
        """Keep a blob until as many `complete_load`."""
        self._loading[name] += 1

    def load(self, name: str) -> np.ndarray:
        """A blob's bytes, not to be written to.

        Raises:
            OSError: they cannot be read.
        """
        self.touch(name)
        return self._read(name, self.sizes[name])

    def complete_load(self, name: str) -> None:
        self._loading[name] -= 1
        if not self._loading[name]:
            del self._loading[name]

    def prepare_store(self, nbytes: int) -> list[str] | None:
        """The blobs that must go before one of `nbytes` fits; None where it would not fit even then."""
        short, gone = self.used + nbytes - self.budget, []
        for name, size in self.sizes.items() if short > 0 else ():
            if short <= 0:
                break
            if name not in self._loading:
                gone.append(name)
                short -= size
        return gone if short <= 0 else None

    def complete_store(self, name: str, blob: np.ndarray) -> None:
        """Take a blob in, for which there is room now.

        Raises:
            OSError, MemoryError: it could not be stored; nothing has changed.
        """
        self._write(name, blob)
        self.sizes[name] = blob.nbytes
        self.used += blob.nbytes
        self.stores += 1

    def evict(self, name: str) -> None:
        """Give a blob up.

        Raises:
            OSError: its bytes cannot be given back; it stays.
        """
        self._remove(name)
        self._forget(name)
        self.evictions += 1

    def drop(self, name: str) -> None:
        """Forget a blob that is good for nothing, whether or not its bytes can be given back."""
        with contextlib.suppress(OSError):
            self._remove(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.used -= self.sizes.pop(name)

    def close(self) -> None:
        """Hold nothing any more. What outlives the process stays where it is, for others to find."""
        self.sizes.clear()
        self.used = 0

    def metrics(self) -> TierMetrics:
        return TierMetrics(len(self.sizes), self.used, self.stores, self.restores, self.evictions, self.failures)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when the bytes do not add up, or are more than the budget."""
        held = sum(self.sizes.values())
        if not self.used == held <= self.budget:
            raise IntegrityError(f"{self.name}: {self.used} of {self.budget} bytes are counted, {held} held.")
        if any(count < 1 for count in self._loading.values()):
            raise IntegrityError(f"{self.name}: loads were completed that were not begun.")


class HostBlobs(Blobs):
    """Blobs in host memory, in the arrays in which they come: whoever made them (`ladder.py`) has pinned them."""

    name = "host"

    def __init__(self, budget: int):
        super().__init__(budget)
        self._blobs: dict[str, np.ndarray] = {}

    def _write(self, name: str, blob: np.ndarray) -> None:
        self._blobs[name] = blob

    def _read(self, name: str, nbytes: int) -> np.ndarray:
        return self._blobs[name]

    def _remove(self, name: str) -> None:
        self._blobs.pop(name, None)

    def close(self) -> None:
        super().close()
        self._blobs.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
        if {name: blob.nbytes for name, blob in self._blobs.items()} != self.sizes:
            raise IntegrityError("host: what is held is not what is counted.")


BLOB = ".hfkv-blob"
LOCK = "in-use.lock"


class DiskBlobs(Blobs):
    """Blobs in a folder, one file each, which the next process finds again.

    A file is whole or not there (`files.py`). It is not forced to the disk: what a machine loses when it fails shows in the
    checksum, and costs a recomputation. The folder is one process's until `close()`, or until that process ends; to a process
    that is forked off it is empty, and has no room.

    Args:
        folder: made where it is missing, for this user alone: blobs hold token ids as they are.
        budget: bytes of all files; at the start the oldest beyond it are removed.

    Raises:
        ConfigurationError: another process (or another ladder of this one) uses the folder, or it cannot be used at all.
    """

    name = "disk"

    def __init__(self, folder: Path, budget: int):
        super().__init__(budget)
        self.folder, self._process = folder, os.getpid()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._claim = files.claim(folder / LOCK)
            if self._claim is not None:
                files.remove_leftovers(folder)
                self._find()
        except OSError as error:
            raise ConfigurationError(f"disk_path={str(folder)!r} cannot be used: {error}.") from error
        if self._claim is None:
            raise ConfigurationError(
                f"disk_path={str(folder)!r} is in use by another ladder: close() that one, share it between the pools of one "
                "process, or give each process a folder of its own."
            )

    def _find(self) -> None:
        """Enter what an earlier process has left, as far as names tell: contents are looked at when they are needed."""
        found, foreign = [], []
        for entry in os.scandir(self.folder):
            if entry.name == LOCK or entry.name.endswith(files.TEMPORARY):
                continue
            if re.fullmatch(r"[0-9a-f]{64}-\d+-[0-9a-f]{16}" + re.escape(BLOB), entry.name) and entry.is_file():
                status = entry.stat()
                found.append((status.st_mtime_ns, entry.name.removesuffix(BLOB), status.st_size))
            else:
                foreign.append(entry.name)
        if foreign:
            logger.warning(f"{self.folder}: {len(foreign)} entries are no blobs ({foreign[0]!r}, ...) and are ignored.")
        self.sizes.update({name: size for _, name, size in sorted(found)})
        self.used = sum(self.sizes.values())
        while self.used > self.budget:
            self.evict(next(iter(self.sizes)))

    def _is_ours(self) -> bool:
        return os.getpid() == self._process

    def lookup(self, name: str) -> bool:
        return self._is_ours() and super().lookup(name)

    def prepare_store(self, nbytes: int) -> list[str] | None:
        return super().prepare_store(nbytes) if self._is_ours() else None

    def _path(self, name: str) -> Path:
        return self.folder / (name + BLOB)

    def _write(self, name: str, blob: np.ndarray) -> None:
        with files.replacing(self._path(name), durable=False) as file:
            file.write(memoryview(blob))

    def _read(self, name: str, nbytes: int) -> np.ndarray:
        blob = np.empty(nbytes, np.uint8)
        with open(self._path(name), "rb") as file:
            if file.readinto(memoryview(blob)) != nbytes:
                raise OSError(f"{self._path(name)} ends before its {nbytes} bytes.")
        return blob

    def _remove(self, name: str) -> None:
        if self._is_ours():
            self._path(name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        """Also for the next process, which goes by the files' times."""
        super().touch(name)
        with contextlib.suppress(OSError):
            os.utime(self._path(name))

    def close(self) -> None:
        super().close()
        self._claim.close()
