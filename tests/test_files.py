"""Files that are whole or not there, and checksums that notice every flipped bit."""

import errno
import multiprocessing
import os
import signal

import numpy as np
import pytest

from hf_kvcache import ConfigurationError, files
from hf_kvcache.tiers.blobs import DiskBlobs


def broken(number: int):
    def call(*arguments):
        raise OSError(number, errno.errorcode[number])

    return call


def _die_while_writing(path, began):
    with files.replacing(path) as file:
        file.write(b"half")
        file.flush()
        began.set()
        signal.pause()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "sub" / "x.bin"
    with files.replacing(path) as file:
        file.write(b"one")
    with pytest.raises(RuntimeError), files.replacing(path) as file:
        file.write(b"another")
        raise RuntimeError
    assert path.read_bytes() == b"one"
    with files.replacing(path, durable=False) as file:
        file.write(b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["x.bin"]


def test_files_are_their_users_alone(tmp_path):
    """Whatever the umask: saved files, blobs, and what is on its way (spill files, copies of files elsewhere)."""
    umask = os.umask(0)
    try:
        new, file = files.temporary(tmp_path)
        file.close()
        with files.replacing(tmp_path / "x") as file:
            file.write(b"a text")
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o077 for path in (new, tmp_path / "x")] == [0, 0]


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path):
    context = multiprocessing.get_context("spawn")
    began = context.Event()
    process = context.Process(target=_die_while_writing, args=(tmp_path / "x.bin", began))
    process.start()
    assert began.wait(60)
    mine, file = files.temporary(tmp_path)
    assert files.remove_leftovers(tmp_path) == []  # both at work
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (gone,) = files.remove_leftovers(tmp_path)
    assert gone != mine and mine.exists() and not (tmp_path / "x.bin").exists()
    file.close()
    assert files.remove_leftovers(tmp_path) == [mine]


@pytest.mark.skipif(files.fcntl is None, reason="needs flock")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    """Files are saved there, nobody takes those at work for leftovers, and what only one may use is refused."""
    monkeypatch.setattr(files.fcntl, "flock", broken(number))
    path = tmp_path / "x.bin"
    with files.replacing(path) as file:
        file.write(b"whole")
        assert files.remove_leftovers(tmp_path) == []
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="no locks"):
        files.claim(tmp_path / "lock")
    with pytest.raises(ConfigurationError, match=r"cannot be used.*no locks"):
        DiskBlobs(tmp_path / "folder", 100)


@pytest.mark.skipif(files.fcntl is None, reason="needs flock")
def test_an_error_while_locking_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", broken(errno.EIO))
    with pytest.raises(OSError, match="EIO"), files.replacing(tmp_path / "x.bin"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_closed_before_it_is_renamed_where_that_needs_it(tmp_path, monkeypatch):
    replace, closed = os.replace, []
    with files.replacing(tmp_path / "x") as file:
        file.write(b"one")
        monkeypatch.setattr(files, "fcntl", None)
        monkeypatch.setattr(os, "replace", lambda *names: closed.append(file.closed) or replace(*names))
    assert closed == [True] and (tmp_path / "x").read_bytes() == b"one"


def test_a_claim_is_one_owners_until_it_is_closed(tmp_path):
    mine = files.claim(tmp_path / "lock")
    assert files.claim(tmp_path / "lock") is None
    mine.close()
    files.claim(tmp_path / "lock").close()


@pytest.mark.parametrize("nbytes", [1, 64, 4099])
def test_every_flipped_bit_and_every_swap_of_words_changes_a_checksum(nbytes):
    rng = np.random.default_rng(0)
    row = rng.integers(0, 256, nbytes, dtype=np.uint8)
    flipped = np.stack(
        [row, *(np.where(np.arange(nbytes) == i // 8, row ^ (1 << i % 8), row) for i in range(8 * min(nbytes, 128)))]
    )
    sums = files.checksums(flipped.astype(np.uint8))
    assert len(np.unique(sums)) == len(sums)
    if nbytes > 8:
        swapped = row.copy()
        swapped[:4], swapped[4:8] = row[4:8], row[:4]
        assert files.checksums(swapped[None]) != sums[0]
    assert files.checksums(np.zeros((1, nbytes), np.uint8)) != files.checksums(np.zeros((1, nbytes + 1), np.uint8))
