"""What `plan` answers: frozen dataclasses, in bytes and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .layers import LayerKind
from .simulator import Simulation


@dataclass(frozen=True)
class Budget:
    """Where the memory of one device goes, in bytes.

    Attributes:
        device: what there is; None where nothing was said of it, and `pools` then is None too.
        margin: left alone, for fragmentation and slabs that grow ahead.
        weights, runtime, activations, logits: see `budget.py`; activations of one pass of `pass_tokens` tokens.
        pools: what is left for caches.
    """

    device: int | None
    margin: int
    weights: int
    runtime: int
    activations: int
    logits: int
    pass_tokens: int
    pools: int | None


@dataclass(frozen=True)
class CachePlan:
    """One cache on this budget.

    Attributes:
        name: as on the command line, or as it was given.
        block_size: positions; 0 for a plain cache.
        token_bytes: that a request grows by with each token at the plan's context, blocks averaged.
        request_bytes: of a request at the plan's context on the device, with its states, and with the buffers to which a slower
            tier's blocks are brought back. Beside it `host_bytes` and `disk_bytes`, where it is alone.
        scale_bytes, tail_bytes, rounding_bytes: parts of a request: scales and zero points of the codes, the newest tokens that a
            lossy codec leaves exact, slots without a token.
        bound_bytes: of all requests at the plan's context at once. That is a bound: requests seldom are all at their longest.
        fits: whether that bound leaves every other need in the budget; None without a device.
        requests: that fit at the plan's context, all of them at once.
        context: the longest that fits for the plan's number of requests; `capped` where the model allows no more.
        simulation: what real lengths make of it; None without a workload.
    """

    name: str
    block_size: int
    token_bytes: float
    request_bytes: int
    host_bytes: int
    disk_bytes: int
    scale_bytes: int
    tail_bytes: int
    rounding_bytes: int
    bound_bytes: int
    fits: bool | None
    requests: int | None
    context: int | None
    capped: bool
    simulation: Simulation | None


@dataclass(frozen=True)
class Plan:
    """The answer of `plan`: bytes are those of one device.

    Attributes:
        model, dtype, limit: the model's name, dtype of keys and values, and tokens that its positions allow.
        parameters: of the whole model.
        context, requests, shards: what was planned for.
        layers, budget, caches: the parts.
        notes: what is estimated, assumed, or left out.
    """

    model: str
    dtype: str
    limit: int | None
    parameters: int
    context: int
    requests: int
    shards: int
    layers: tuple[LayerKind, ...]
    budget: Budget
    caches: tuple[CachePlan, ...]
    notes: tuple[str, ...]
