"""Plans as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .answer import CachePlan, Plan
from .units import show_bytes
from .verify import Check


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan: layers, budget, caches, what is inside a request, the simulated workload, notes."""
    limit = f"up to {plan.limit:,} tokens" if plan.limit else "any length"
    size = f"{plan.parameters / 1e9:,.2f} billion parameters"
    shards = f", one of {plan.shards} devices" if plan.shards > 1 else ""
    console.print(f"{plan.model}: {size}, {plan.dtype}, {limit}{shards}", highlight=False, soft_wrap=False)
    tables = [_layers(plan), _budget(plan), _caches(plan), _inside(plan)]
    if plan.caches and plan.caches[0].simulation is not None:
        tables.append(_workload(plan))
    for table in tables:
        console.print(table, highlight=False)
    for note in plan.notes:
        console.print(note, highlight=False)


def show_checks(checks: Sequence[Check], console: Console) -> None:
    """Print what was predicted and what is, cache by cache."""
    if not checks:
        return
    rows: dict[str, list[Check]] = {}
    for check in checks:
        rows.setdefault(check.cache, []).append(check)
    table = _table(
        "Predicted and allocated here (bytes of the longest)", "cache", "lengths", "stored", "allocated", "agrees"
    )
    for name, row in rows.items():
        wrong = [check for check in row if not check.agrees]
        stored, allocated = (show_bytes(getattr(row[-1], field)) for field in ("stored", "allocated"))
        lengths = ", ".join(str(check.tokens) for check in row)
        verdict = "to the byte" if not wrong else f"no: at {', '.join(str(check.tokens) for check in wrong)}"
        table.add_row(name, lengths, stored, allocated, verdict)
    console.print(table, highlight=False)


def _layers(plan: Plan) -> Table:
    title = f"Layers, as a plain cache keeps them (a request of {plan.context:,} tokens)"
    table = _table(title, "type", "layers", "heads", "K + V", "window", "a token", "a request")
    for kind in plan.layers:
        window = f"{kind.window:,}" if kind.window else ""
        table.add_row(
            kind.kind,
            str(kind.layers),
            str(kind.kv_heads or ""),
            f"{kind.k_dim} + {kind.v_dim}" if kind.kv_heads else "",
            window,
            f"{kind.token_bytes:,} B" if kind.token_bytes else "",
            show_bytes(kind.request_bytes),
        )
    return table


def _budget(plan: Plan) -> Table:
    budget = plan.budget
    table = _table("Memory of one device", "", "bytes", "")
    rows = [
        ("device", budget.device, ""),
        ("margin", budget.margin, "fragmentation, slabs that grow ahead"),
        ("weights", budget.weights, ""),
        ("runtime", budget.runtime, "assumed"),
        ("activations", budget.activations, f"a pass of {budget.pass_tokens:,} tokens"),
        ("logits", budget.logits, f"of {plan.requests} rows"),
        ("left for caches", budget.pools, "" if budget.pools else "nothing is left: the model does not fit"),
    ]
    for name, size, note in rows:
        if size is not None and (budget.device is not None or name != "margin"):
            table.add_row(name, show_bytes(size), note)
    return table


def _caches(plan: Plan) -> Table:
    bound = f"{plan.requests} x {plan.context:,}"
    table = _table(f"Caches ({bound} tokens)", "cache", "a token", "a request", "bound", "fits", "requests", "context")
    for cache in plan.caches:
        table.add_row(
            cache.name,
            show_bytes(cache.token_bytes),
            show_bytes(cache.request_bytes),
            show_bytes(cache.bound_bytes),
            {True: "yes", False: "no", None: "?"}[cache.fits],
            _or_unknown(cache.requests),
            _or_unknown(cache.context) + (" max" if cache.capped else ""),
        )
    table.caption = (
        "bound: every request at the full context at once. requests: how many fit\n"
        f"at {plan.context:,} tokens each. context: the longest for {plan.requests} at once.\n"
        "dynamic: with the copy of a layer's keys that each of its steps makes."
    )
    return table


def _inside(plan: Plan) -> Table:
    fields = {"host": "host_bytes", "disk": "disk_bytes", "scales": "scale_bytes", "tail": "tail_bytes"}
    fields |= {"empty": "rounding_bytes"}
    if not any(cache.disk_bytes for cache in plan.caches):
        del fields["disk"]
    table = _table("Inside a request: scales of codes, exact tail, empty slots", "cache", "block", "device", *fields)
    for cache in plan.caches:
        parts = [getattr(cache, field) for field in fields.values()]
        block = str(cache.block_size or "")
        table.add_row(cache.name, block, show_bytes(cache.request_bytes), *(show_bytes(x) if x else "" for x in parts))
    return table


def _workload(plan: Plan) -> Table:
    first = plan.caches[0].simulation
    title = f"Simulated: {first.finished} requests, {first.steps:,} steps (p50/p95/peak; bytes on the device)"
    table = _table(title, "cache", "running", "tokens", "empty", "p95", "peak", "bound", "pool")
    for cache in plan.caches:
        table.add_row(cache.name, *_simulated(cache))
    table.caption = "bound: the peak as a share of all requests at the full context. pool: of what is left for caches."
    return table


def _simulated(cache: CachePlan) -> list[str]:
    one = cache.simulation
    full = "" if one.occupancy is None else f"{one.occupancy[2]:.0%}"
    if one.refused:
        full += f", {one.refused} refused"
    return [
        "/".join(map(str, one.running)),
        "/".join(map(_short, one.tokens)),
        f"{one.waste:.1%}",
        *map(show_bytes, one.device[1:]),
        f"{one.device[2] / cache.bound_bytes:.0%}" if cache.bound_bytes else "",
        full,
    ]


def _short(count: int) -> str:
    return str(count) if count < 1024 else f"{count / 1024:.{0 if count >= 10240 else 1}f}k"


def _or_unknown(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _table(title: str, first: str, *others: str) -> Table:
    """Two spaces between columns, and names of caches in full."""
    settings = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    table = Table(title=title, title_justify="left", caption_justify="left", **settings)
    table.add_column(first, overflow="fold", min_width=14)
    for name in others:
        table.add_column(name, justify="left" if name in ("", "lengths", "agrees") else "right", overflow="fold")
    return table
