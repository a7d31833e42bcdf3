"""Requests as they come: read from a trace, or drawn from log-normal lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ConfigurationError

LATEST = 1_000_000_000  # seconds of an arrival: 30 years; beyond, a date in other units
MANY = 1 << 26  # of tokens on average, of requests, of requests in a second
WIDEST = 10  # spread of the logarithm: far beyond any that was seen


class Request(NamedTuple):
    """Tokens of a prompt and of its answer, and when it comes, in seconds; None for as soon as there is a place."""

    prompt: int
    answer: int
    arrival: float | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival; `name` says where they are from. `step_seconds` is how long the one token takes
    that every running request gains in a step."""

    name: str
    requests: tuple[Request, ...]
    step_seconds: float = 0.05

    def check(self, limit: int | None) -> None:
        """Whether a model takes all of it.

        Raises:
            ConfigurationError: a request is longer than `limit` tokens.
        """
        longest = max(self.requests, key=lambda r: r.prompt + r.answer)
        if limit is not None and longest.prompt + longest.answer > limit:
            raise ConfigurationError(
                f"{self.name}: a request of {longest.prompt:,} + {longest.answer:,} tokens is beyond the model's "
                f"{limit:,} positions: leave it out, or shorten it."
            )


def read_trace(path: str | Path) -> Workload:
    """A workload from JSON lines with `prompt_tokens`, `output_tokens` and, in all of them or in none, `arrival` (seconds).

    Raises:
        ConfigurationError: naming the line and the field that is not as it must be.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the trace {path} cannot be read ({error}): give a file of JSON lines.") from None
    requests = [_request(f"{path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigurationError(f"the trace {path} has no requests: give one JSON object per line.")
    timed = [request.arrival is not None for request in requests]
    if any(timed) and not all(timed):
        raise ConfigurationError(
            f"{path}, line {timed.index(not timed[0]) + 1}: field arrival is in some lines only: give it in all or in none."
        )
    if all(timed):
        requests.sort(key=lambda request: request.arrival)
    return Workload(str(path), tuple(requests))


def _request(where: str, line: str) -> Request:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not JSON ({error}): write one object per line.") from None
    if not isinstance(record, dict):
        raise ConfigurationError(f"{where} holds no object: write prompt_tokens and output_tokens.")
    counts = []
    for name in ("prompt_tokens", "output_tokens"):
        value = record.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{where}: field {name} is {value!r} and must be a whole number of at least 1.")
        counts.append(value)
    arrival = record.get("arrival")
    number = isinstance(arrival, (int, float)) and not isinstance(arrival, bool)
    if arrival is not None and not (number and 0 <= arrival <= LATEST):
        raise ConfigurationError(
            f"{where}: field arrival is {arrival!r} and must be seconds of at least 0 and at most {LATEST:,}."
        )
    return Request(*counts, arrival)


def lognormal(
    mean: float,
    sigma: float,
    *,
    answer_mean: float = 256,
    answer_sigma: float = 0.7,
    count: int = 500,
    limit: int | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> Workload:
    """`count` requests whose prompts and answers have log-normal lengths with these means (tokens) and spreads of the logarithm.

    Args:
        limit: of prompt and answer together; longer prompts are cut to it, as a server does.
        rate: requests per second of a Poisson process; None has each place taken again as soon as it is free.

    Raises:
        ConfigurationError: for a mean or a rate that is not positive, a negative spread, and for what is no number or too large.
    """
    for name, value in (
        ("mean", mean),
        ("answer_mean", answer_mean),
        ("count", count),
        ("rate", 1 if rate is None else rate),
    ):
        if not 0 < value <= MANY:
            raise ConfigurationError(f"{name}={value} must be more than 0 and at most {MANY:,}.")
    for name, value in (("sigma", sigma), ("answer_sigma", answer_sigma)):
        if not 0 <= value <= WIDEST:
            raise ConfigurationError(f"{name}={value} must be at least 0 and at most {WIDEST} (0.7 is usual).")
    generator = np.random.default_rng(seed)
    draw = lambda mean, sigma: np.exp(generator.normal(np.log(mean) - sigma**2 / 2, sigma, count))  # noqa: E731
    answers = np.clip(draw(answer_mean, answer_sigma).round(), 1, limit and max(1, limit // 2)).astype(int)
    prompts = np.clip(draw(mean, sigma).round(), 1, limit and limit - answers).astype(int)
    arrivals = [None] * count if rate is None else np.cumsum(generator.exponential(1 / rate, count)).tolist()
    requests = tuple(map(Request, prompts.tolist(), answers.tolist(), arrivals))
    return Workload(f"log-normal lengths, mean {mean:g} + {answer_mean:g}", requests)


def step_of(request: Request, workload: Workload) -> int:
    """The step in which a request arrives."""
    return 0 if request.arrival is None else int(request.arrival / workload.step_seconds)
