"""Which lever a pool's problem asks for, why, and what it would gain; and when KV memory is not what binds."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .. import memory
from ..memory import Diagnosis

HELP = "which lever matches what a pool's metrics show, and what it would gain"


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("metrics", help="a pool's metrics as Prometheus text, or a trace: JSON lines, one sample each")
    parser.add_argument("--model", required=True, help="hub id, config.json, or a folder with one")
    parser.add_argument("--cache", default="paged", help="the cache in use, by name (default: %(default)s)")
    parser.add_argument("--request-tokens", help="tokens of a typical request, where nothing says it")
    parser.add_argument("--device-memory", help="24GiB: also weigh the weights")
    parser.add_argument("--dtype", help="bf16, fp16 or fp32; the config's where not given")
    parser.add_argument("--weights", default="auto", help="auto, bf16, fp16, fp32, 8bit or 4bit")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> None:
    """Read, diagnose, print."""
    found = memory.diagnose(
        memory.read_observation(args.metrics),
        args.model,
        cache=args.cache,
        request_tokens=args.request_tokens and memory.parse_tokens(args.request_tokens),
        device_memory=args.device_memory and memory.parse_bytes(args.device_memory),
        dtype=memory.dtype_for(args.dtype),
        weights=args.weights,
    )
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        show(found, Console())


def show(found: Diagnosis, console: Console) -> None:
    """Print a diagnosis."""
    short = {
        True: "short",
        False: "not short",
        None: "short or not: nothing here tells (no limit, no failures counted)",
    }
    console.print(f"KV memory is {short[found.binds]}.", highlight=False)
    for sentence in found.elsewhere:
        console.print(sentence, highlight=False)
    if not found.findings:
        console.print("No lever matches what was observed.")
        return
    table = Table(
        title="Levers that match, the largest gain first", box=SIMPLE_HEAD, pad_edge=False, title_justify="left"
    )
    table.add_column("lever")
    table.add_column("gain", justify="right")
    table.add_column("what, why, and its price")
    for finding in found.findings:
        sizes = f"{memory.show_bytes(finding.bytes_before)} to {memory.show_bytes(finding.bytes_after)} a request"
        cache = f" ({finding.cache})" if finding.cache else ""
        text = f"{finding.change}{cache}: {sizes}.\nWhy: {finding.why}.\nPrice: {finding.price}."
        table.add_row(finding.lever, f"{finding.gain:.1f}x", text)
    console.print(table, highlight=False)
