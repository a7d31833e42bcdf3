"""Which kernels are in use, and why."""

from __future__ import annotations

import argparse
import platform

import torch
import transformers
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..cache import cache_kwarg
from ..codecs import CODECS
from ..kernels import cpu, cuda

HELP = "which kernels are in use, and why"


def configure(parser: argparse.ArgumentParser) -> None:
    """It takes no options."""


def main(args: argparse.Namespace) -> None:
    """Print what this installation uses."""
    table = Table(title=f"hf_kvcache {__version__}", show_header=False)
    table.add_row(
        "python, torch, transformers", f"{platform.python_version()}, {torch.__version__}, {transformers.__version__}"
    )
    table.add_row("keyword for a cache", next(iter(cache_kwarg(None))))
    table.add_row("CPU kernels", cpu.status())
    table.add_row("threads", str(torch.get_num_threads()))
    table.add_row("CUDA kernels", cuda.status())
    table.add_row("codecs", ", ".join(CODECS))
    Console().print(table)
