"""Requests that join and leave: what they hold together, step by step.

In every step each running request gains a token. Waiting requests are admitted first come, first served, when there is a place
and the longest that they will get fits beside the longest that the others will get: nobody is stopped halfway. Their prompt is
prefilled in the step in which they are admitted. Between two such events nothing is decided, so it is computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .footprint import Footprint
from .workload import Request, Workload, step_of

STRIDE = 4096  # steps computed at once, at most


@dataclass(frozen=True)
class Simulation:
    """What a workload does to a pool. `percentiles` are over steps: `(p50, p95, peak)`.

    Attributes:
        steps, finished, refused: steps in all, requests served, and requests that would never fit.
        tokens: of the requests that run, prompt and answer so far.
        held, slots: positions stored, and slots of the blocks that store them, as a pool's metrics count them (once for each
            group of layers).
        waste: share of the slots that hold nothing, over all steps.
        device: bytes, states and staging buffers included; `host` and `disk`, bytes of a slower tier.
        running, waiting: requests.
        occupancy: share of the capacity; None without one.
        wait: steps until requests were admitted.
    """

    steps: int
    finished: int
    refused: int
    tokens: tuple[int, int, int]
    held: tuple[int, int, int]
    slots: tuple[int, int, int]
    waste: float
    device: tuple[int, int, int]
    host: tuple[int, int, int]
    disk: tuple[int, int, int]
    running: tuple[int, int, int]
    waiting: tuple[int, int, int]
    occupancy: tuple[float, float, float] | None
    wait: tuple[int, int, int]


class _Log:
    """Series of numbers per step."""

    def __init__(self, *names: str):
        self.parts: dict[str, list[np.ndarray]] = {name: [] for name in names}

    def add(self, **series: np.ndarray) -> None:
        for name, values in series.items():
            self.parts[name].append(np.asarray(values))

    def percentiles(self, name: str) -> tuple[int, int, int]:
        values = self.series(name)
        return (
            tuple(int(np.percentile(values, q, method="higher")) for q in (50, 95, 100)) if len(values) else (0, 0, 0)
        )

    def series(self, name: str) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *self.parts[name]])


def simulate(
    footprint: Footprint,
    workload: Workload,
    *,
    capacity: int | None = None,
    users: int | None = None,
    state_bytes: int = 0,
) -> Simulation:
    """Run a workload through a cache's footprint.

    Args:
        capacity: bytes on the device for caches; None for as much as it takes.
        users: requests that may run at once; None for as many as fit.
        state_bytes: of each request, whatever its length.
    """
    longest = max(map(_longest, workload.requests))
    table = footprint.held(np.arange(longest + 1))
    needed = np.maximum.accumulate(table.needed) + state_bytes  # by the time a request has this many tokens
    requests = [r for r in workload.requests if capacity is None or needed[_longest(r)] <= capacity]
    arrivals = np.array([step_of(request, workload) for request in requests], np.int64)
    log = _Log("tokens", "held", "slots", "device", "host", "disk", "running", "waiting", "wait")
    lengths, left, shares = (np.zeros(0, np.int64) for _ in range(3))  # of the requests that run
    head, now = 0, 0
    while head < len(requests) or len(lengths):
        while head < len(requests) and arrivals[head] <= now and (users is None or len(lengths) < users):
            request, share = requests[head], int(needed[_longest(requests[head])])
            if capacity is not None and shares.sum() + share > capacity:
                break
            lengths, left = np.append(lengths, request.prompt), np.append(left, request.answer)
            shares = np.append(shares, share)
            log.add(wait=[now - arrivals[head]])
            head += 1
        coming = arrivals[np.searchsorted(arrivals, now, side="right") :][:1]
        if not len(lengths):
            now = int(coming[0])
            continue
        count = int(min(left.min(), STRIDE, *(coming - now)))  # until a request ends or another arrives
        grid = lengths[:, None] + np.arange(count)
        together = table.together(grid)
        log.add(
            tokens=grid.sum(axis=0),
            held=together.tokens,
            slots=together.slots,
            device=together.needed + len(lengths) * state_bytes,
            host=together.host,
            disk=together.disk,
            running=np.full(count, len(lengths)),
            waiting=np.searchsorted(arrivals, np.arange(now, now + count), side="right") - head,
        )
        lengths, left, now = lengths + count, left - count, now + count
        lengths, left, shares = (numbers[left > 0] for numbers in (lengths, left, shares))
    held, slots = log.series("held").sum(), log.series("slots").sum()
    device = log.percentiles("device")
    others = ("tokens", "held", "slots", "host", "disk", "running", "waiting", "wait")
    return Simulation(
        steps=now,
        finished=len(requests),
        refused=len(workload.requests) - len(requests),
        waste=float(1 - held / slots) if slots else 0.0,
        occupancy=None if capacity is None else tuple(b / max(1, capacity) for b in device),
        device=device,
        **{name: log.percentiles(name) for name in others},
    )


def _longest(request: Request) -> int:
    """Tokens that a cache holds at a request's end: its last token is never fed back."""
    return request.prompt + request.answer - 1
