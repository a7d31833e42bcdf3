"""Get the English prose that the evaluations read: four Canterbury texts and, if asked, six novels by Jane Austen.

All of it is in the public domain, but none is copied into this repository. The Canterbury texts are test data of the
`brotli` source package on PyPI; the novels are in Debian's package `r-cran-janeaustenr`. Where neither can be had,
Python's own help texts serve, with a warning, because results on them compare with nothing.

    python scripts/fetch_eval_data.py            # prints a table, then the folder
    python scripts/fetch_eval_data.py --austen   # the novels too; needs apt-get (no root, nothing is installed)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator

from rich.markup import escape

from fetching import FetchError, cache_folder, check_sha256, console, download, last_lines, sha256, step

BROTLI = "brotli==1.2.1"
DEBIAN = "r-cran-janeaustenr"
NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"

# sha256 of each text as it lies in the cache folder: UTF-8, "\n" line ends. A name is a file name without ".txt".
CANTERBURY = {
    "alice29": "99e53cbb0aeb274344a254733db996ca2d05d5fcd10fc0ca02d6966f2b2bc961",
    "asyoulik": "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc",
    "lcet10": "938e69e61b3411d8a9e2e630f4265000d810f3dbf66bac58cac19493753526ec",
    "plrabn12": "6bcb53189dccd5ac3fb1d1368df63fe6231bfed5cdef545330452955193327fc",
}
AUSTEN = {
    "emma": "7c67b5985c6d0de1efaeb5d342d52cb82c38083c40e2295129e30e87ee690ebe",
    "mansfield_park": "98bc90519cdf4ef663ad7de2734bb529435ef24f7abbde6bb1a50898871dafe9",
    "northanger_abbey": "51f91bbe0517db8e65cff009b097ce0a1836124c4e0532ac19e6c0cad982abed",
    "persuasion": "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a",
    "pride_and_prejudice": "dfc684d4f857fa938268f9ab9c5567b64bd0691251eca959644adeabe6287a4d",
    "sense_and_sensibility": "105e1651fe93bed7130078578efd31e0c557d68667ba672ddc876f735b30fe09",
}
FALLBACK = "python_topics"


def texts_folder() -> pathlib.Path:
    return cache_folder("texts")


def texts(progress: bool = True, austen: bool = False) -> dict[str, str]:
    """Texts by name: the Canterbury ones, and the novels if they are here or asked for, all checked by sha256.

    Never fails for want of a network: what is left then is whatever was fetched before, or Python's help texts.
    """
    console.quiet = not progress
    wanted = [(CANTERBURY, fetch_canterbury)] + ([(AUSTEN, fetch_austen)] if austen else [])
    for names, fetch in wanted:
        try:
            if not all(is_good(name) for name in names):
                fetch(texts_folder())
        except FetchError as error:
            warn(str(error))
    found = {name: text_file(name).read_text("utf-8") for name in (*CANTERBURY, *AUSTEN) if is_good(name)}
    if not found:
        warn("Using Python's help texts instead: good for a smoke test, but results on them compare with nothing.")
        found[FALLBACK] = python_topics()
    return found


def warn(message: str) -> None:
    console.quiet = False  # a warning is no progress: it is shown always
    console.print(f"[yellow]![/] {escape(message)}")


def text_file(name: str) -> pathlib.Path:
    return texts_folder() / f"{name}.txt"


def is_good(name: str) -> bool:
    path = text_file(name)
    return path.is_file() and sha256(path) == (CANTERBURY | AUSTEN)[name]


def store(name: str, text: str, folder: pathlib.Path) -> None:
    """Check `text` and put it in `folder` in one step, so that a reader sees all of it or nothing."""
    data = text.encode()
    way_out = "The source package was damaged or changed: try again, or try another package index."
    check_sha256(name, hashlib.sha256(data).hexdigest(), (CANTERBURY | AUSTEN)[name], way_out)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}.{os.getpid()}"
    part.write_bytes(data)
    os.replace(part, folder / f"{name}.txt")


def fetch_canterbury(folder: pathlib.Path) -> None:
    with step("Downloading the Canterbury texts, 7 MB"), tempfile.TemporaryDirectory() as work:
        # pip looks at a source package's metadata before it keeps it. Its build requirements may well be wheels,
        # so only brotli itself is asked for as source: `:all:` would build setuptools first.
        sdist = download(BROTLI, pathlib.Path(work), "--no-binary", "brotli")
        with tarfile.open(sdist) as archive:
            for name in CANTERBURY:
                member = archive.extractfile(f"brotli-1.2.1/tests/testdata/{name}.txt")
                store(name, clean(member.read()), folder)


def clean(raw: bytes) -> str:
    """DOS text to ours: "\\r\\n" line ends, and a Ctrl-Z that marks the end of the file."""
    return raw.decode("ascii").replace("\r\n", "\n").replace("\x1a", "")


def fetch_austen(folder: pathlib.Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FetchError(f"The novels come in the Debian package {DEBIAN} and this machine has no apt-get: skipped.")
    with step("Downloading Jane Austen's novels, 1.6 MB"), tempfile.TemporaryDirectory() as work:
        # Downloading and unpacking needs neither root nor R, and leaves the system as it is.
        run(["apt-get", "download", "--quiet", DEBIAN], work)
        (package,) = pathlib.Path(work).glob("*.deb")
        run(["dpkg-deb", "-x", package.name, "."], work)
        vectors = r_string_vectors((pathlib.Path(work) / NOVELS).read_bytes())
        # The data set is sorted by novel, in the order of the table above.
        for name, lines in zip(AUSTEN, vectors, strict=True):
            store(name, "\n".join(lines) + "\n", folder)


def run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = last_lines(done.stderr)
        raise FetchError(f"`{' '.join(command)}` failed:\n{reason}\nIs the network up, and `apt-get update` done once?")


def r_string_vectors(rdb: bytes) -> Iterator[list[str]]:
    """The character vectors in an R lazy-load database: blobs of a 4-byte raw length and that much, zlib-compressed."""
    while rdb:
        (size,) = struct.unpack_from(">I", rdb)
        inflate = zlib.decompressobj()
        blob = inflate.decompress(rdb[4:])
        if len(blob) != size:
            raise FetchError(f"damaged R database: a blob of {size} bytes has {len(blob)}")
        yield r_strings(blob)
        rdb = inflate.unused_data


def r_strings(blob: bytes) -> list[str]:
    """One serialized character vector (R Internals, "Serialization Formats"): big-endian XDR, STRSXP of CHARSXP."""
    string_vector, string = 16, 9  # SEXP types, in the low byte of an item's flags
    magic, version = struct.unpack_from(">2si", blob)
    if magic != b"X\n" or version not in (2, 3):
        raise FetchError(f"not an R object in XDR format, version 2 or 3: {magic!r}, version {version}")
    at = 14  # magic, format version, version of the writer, oldest version that reads it
    if version == 3:  # it adds the name of the native encoding
        at += 4 + struct.unpack_from(">i", blob, at)[0]
    flags, count = struct.unpack_from(">Ii", blob, at)
    at += 8
    if flags & 0xFF != string_vector:
        raise FetchError(f"expected a character vector (type {string_vector}) in the R database, found {flags & 0xFF}")
    lines = []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", blob, at)
        at += 8
        if flags & 0xFF != string:
            raise FetchError(f"expected a string (type {string}) in the R database, found type {flags & 0xFF}")
        length = max(length, 0)  # -1 is NA
        lines.append(blob[at : at + length].decode())
        at += length
    return lines


def python_topics() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def show(found: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("text", "characters", "sha256", title="Evaluation texts")
    table.columns[1].justify = "right"
    for name, text in found.items():
        table.add_row(name, f"{len(text):,}", hashlib.sha256(text.encode()).hexdigest()[:12])
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--austen", action="store_true", help="also get six novels from Debian's package index")
    parser.add_argument("--quiet", action="store_true", help="print the table and the folder only")
    arguments = parser.parse_args()
    found = texts(progress=not arguments.quiet, austen=arguments.austen)
    show(found)
    print(texts_folder())
    if arguments.austen and not AUSTEN.keys() <= found.keys():
        sys.exit(1)


if __name__ == "__main__":
    main()
