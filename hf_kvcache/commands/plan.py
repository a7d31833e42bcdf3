"""Does it fit, how many requests, which cache: memory of a model on a device, counted from its config."""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch
from rich.console import Console

from .. import memory
from ..errors import ConfigurationError
from ..memory.tables import show_checks, show_plan

ANSWERS = "256,0.7"
HELP = "does it fit, how many requests, which cache: without a GPU and without weights"


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options. Sizes are written 24GiB or 24GB, tokens 32768 or 32k (32 x 1024)."""
    parser.add_argument("--model", required=True, help="hub id, config.json, or a folder with one")
    parser.add_argument("--device-memory", help="of one device, as 24GiB or 24GB")
    parser.add_argument("--context", help="tokens of a request, prompt and answer, as 32768 or 32k (k is 1024)")
    parser.add_argument("--requests", type=int, default=1, help="requests at once (default: %(default)s)")
    parser.add_argument(
        "--cache", default=",".join(memory.CACHES), help="names, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="devices that share the model (tensor parallel)")
    parser.add_argument(
        "--weights", default="auto", help="auto, bf16, fp16, fp32, 8bit or 4bit (default: the config's)"
    )
    parser.add_argument("--dtype", help="of weights, keys and values: bf16, fp16 or fp32 (default: the config's)")
    parser.add_argument("--prefill", metavar="TOKENS", help="tokens of a pass, where prompts are prefilled in chunks")
    parser.add_argument(
        "--encoder-tokens", metavar="TOKENS", help="of an encoder's text (default: as many as --context)"
    )
    parser.add_argument(
        "--memory-fraction", type=float, default=0.9, help="of the device to plan with (default: %(default)s)"
    )
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--trace", help="requests to simulate: JSON lines with prompt_tokens, output_tokens[, arrival]"
    )
    lengths.add_argument(
        "--lengths", metavar="MEAN,SIGMA", help="simulate log-normal prompts of this mean and log spread"
    )
    parser.add_argument("--answers", metavar="MEAN,SIGMA", help=f"answers with --lengths (default: {ANSWERS})")
    parser.add_argument(
        "--rate", type=float, help="with --lengths: requests per second (default: a place is never empty)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw memory against context")
    parser.add_argument(
        "--verify", action="store_true", help="also fill small caches here; exit code 1 where bytes differ"
    )


def main(args: argparse.Namespace) -> int:
    """Plan, print, and where asked for draw and verify."""
    caches = [name.strip() for name in args.cache.split(",") if name.strip()]
    dtype, context = memory.dtype_for(args.dtype), _tokens(args.context)
    planner = memory.Planner(
        args.model,
        caches=caches,
        dtype=dtype,
        weights=args.weights,
        shards=args.tp,
        memory_fraction=args.memory_fraction,
        pass_tokens=_tokens(args.prefill),
        encoder_tokens=_tokens(args.encoder_tokens),
    )
    device_memory = None if args.device_memory is None else memory.parse_bytes(args.device_memory)
    answer = planner.plan(device_memory, context, args.requests, _workload(args, planner.model.limit))
    checks = _verify(args.model, caches, dtype) if args.verify else ()
    if args.json:
        print(json.dumps(dataclasses.asdict(answer) | {"checks": [dataclasses.asdict(c) for c in checks]}, indent=2))
    else:
        show_plan(answer, Console())
        show_checks(checks, Console())
    if args.plot:
        from ..memory.draw import draw

        draw(planner, args.plot, requests=args.requests, context=answer.context, device_memory=device_memory)
    return 0 if all(check.agrees for check in checks) else 1


def _verify(model: str, caches: list[str], dtype: torch.dtype | None) -> list[memory.Check]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return memory.verify(model, [name for name in caches if name != "dynamic"], dtype=dtype, device=device)


def _tokens(text: str | None) -> int | None:
    return None if text is None else memory.parse_tokens(text)


def _workload(args: argparse.Namespace, limit: int | None) -> memory.Workload | None:
    if args.lengths is None:
        for option in ("answers", "rate"):
            if getattr(args, option) is not None:
                raise ConfigurationError(
                    f"--{option} belongs to --lengths, which is not given: add it, or leave --{option} out."
                )
        return None if args.trace is None else memory.read_trace(args.trace)
    (mean, sigma), answers = _pair("--lengths", args.lengths), _pair("--answers", args.answers or ANSWERS)
    spread = dict(zip(("answer_mean", "answer_sigma"), answers, strict=True))
    return memory.lognormal(mean, sigma, **spread, limit=limit, rate=args.rate)


def _pair(option: str, text: str) -> tuple[float, float]:
    try:
        mean, sigma = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"{option} {text!r} is not MEAN,SIGMA: write 4000,0.8.") from None
    return mean, sigma
