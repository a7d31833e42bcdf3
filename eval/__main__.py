"""What a cache saves, what it loses, and what it costs in time.

`python -m eval all` measures everything; each suite can be run alone. Results are JSON lines in `OUT/results.jsonl`, to which
`--resume` adds what is missing; `report` makes a page of them. `accelerate launch --multi_gpu -m eval quality` shares samples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from hf_kvcache import named

from . import latency, models, quality, report, retrieval, streaming
from .session import Session

SUITES = {"quality": quality, "retrieval": retrieval, "streaming": streaming, "latency": latency}


def main(argv: list[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, suite in SUITES.items():
        command = commands.add_parser(name, help=suite.__doc__.splitlines()[0], parents=[_common()])
        suite.configure(command)
    commands.add_parser("all", help="every suite in turn, then the report", parents=[_common()])
    report.configure(commands.add_parser("report", help="one page of the results of any number of runs"))
    args = parser.parse_args(argv)
    if args.command == "report":
        report.main(args, Console())
        return
    session = _open(args)
    for name in SUITES if args.command == "all" else [args.command]:
        own = args if args.command == name else _defaults(SUITES[name])
        SUITES[name].main(session, own)
    if args.command == "all" and session.processes.is_main_process:
        report.main(_defaults(report, str(session.results.path), "--out", str(args.out)), Console())


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", help="path or hub id; the demo model if left out")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--caches", help="names, comma-separated; every kind, and the built-in ones that are installed")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", action="store_true", help="keep what OUT/results.jsonl has, measure the rest")
    parser.add_argument("--quick", action="store_true", help="a first look: short contexts, few samples")
    return parser


def _defaults(suite, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suite.configure(parser)
    return parser.parse_args(argv)


def _open(args: argparse.Namespace) -> Session:
    built_in = [name for name in named.BUILT_IN[2:] if named.is_available(name)]
    chosen = args.caches.split(",") if args.caches else [*named.DEFAULT, *built_in]
    for name in chosen:
        named.cache_factory(name)  # a name that is none should not be found out after an hour
    model, tokenizer = models.load(args.model, getattr(torch, args.dtype))
    return Session(model, tokenizer, chosen, args.out / "results.jsonl", Console(stderr=True), args.quick, args.resume)


if __name__ == "__main__":
    main()
