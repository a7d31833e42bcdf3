"""The command line: `hf-kvcache COMMAND`, also `python -m hf_kvcache COMMAND`. What stops a command is said in a sentence,
with exit code 2."""

from __future__ import annotations

import argparse
import sys

from . import __version__
from .commands import diagnose, doctor, plan, tune
from .errors import KVCacheError

# A command is a module with `HELP`, `configure(parser)` and `main(args)`, which returns the exit code (None is 0).
COMMANDS = {"doctor": doctor, "plan": plan, "diagnose": diagnose, "tune": tune}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; without a command, print the help."""
    parser = argparse.ArgumentParser(
        prog="hf-kvcache", description="Caches for Transformers: what is in use, what fits."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        command.configure(commands.add_parser(name, help=command.HELP, description=command.__doc__))
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return COMMANDS[args.command].main(args) or 0
    except KVCacheError as error:
        print(f"hf-kvcache {args.command}: {error}", file=sys.stderr)
        return 2
