"""How much memory a pool may have: what is free beside a loaded model, less what its passes need."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import torch

from .errors import ConfigurationError

PASS = 1024  # tokens of the pass that is measured


def budget(model: torch.nn.Module, fraction: float) -> int:
    """`fraction` of the memory that is free on the model's device, less the peak of a measured pass, in bytes.

    Raises:
        ConfigurationError: for a fraction outside of `(0, 1]`, and when nothing is left.
    """
    if not 0 < fraction <= 1:
        raise ConfigurationError(f"memory_fraction={fraction} must be more than 0 and at most 1 (0.9 is usual).")
    device = next(model.parameters()).device
    needed, free = (
        activations(model),
        free_bytes(device),
    )  # in this order: afterwards torch's own reserve counts as free
    left = int(fraction * free) - needed
    if left <= 0:
        raise ConfigurationError(
            f"{fraction} of the {free} bytes that are free on {device} does not hold the {needed} bytes that a pass needs: "
            "free some memory, use a smaller model, or say capacity_bytes."
        )
    return left


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, what torch keeps in reserve included. On the CPU, what Linux says is available, and the
    limits of the process's control groups (version 2) leave."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([_linux("/proc/meminfo", "MemAvailable"), *_limits_leave()])


def _limits_leave(
    own: pathlib.Path = pathlib.Path("/proc/self/cgroup"), root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Bytes that each control group with a readable limit leaves; files in its cache that are not in use give way."""
    try:
        path = next(line for line in own.read_text().splitlines() if line.startswith("0::")).removeprefix("0::/")
    except (OSError, StopIteration):
        return
    folder = root / path
    while folder.is_relative_to(root):
        try:
            limit, used, stat = ((folder / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
            idle = next(line for line in stat.splitlines() if line.startswith("inactive_file ")).split()[1]
            yield max(0, int(limit) - int(used) + int(idle))
        except (OSError, ValueError, StopIteration):
            pass  # the root has no such files, and a limit may be "max"
        folder = folder.parent


@torch.no_grad()
def activations(model: torch.nn.Module, tokens: int = PASS) -> int:
    """Bytes that a pass of `tokens` tokens without a cache needs at its peak, measured. On the CPU it is the highest that
    the process ever had above what it has now: where it needed more before, too much rather than too little."""
    device = next(model.parameters()).device
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
    ids = torch.zeros((1, min(tokens, longest)), dtype=torch.int64, device=device)
    run = lambda: model(ids, use_cache=False, logits_to_keep=1)  # noqa: E731
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    before = _linux("/proc/self/status", "VmRSS")
    run()
    return max(0, _linux("/proc/self/status", "VmHWM") - before)


def _linux(path: str, field: str) -> int:
    """A number of bytes that Linux tells."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigurationError(f"memory_fraction needs {path}, which is not here: say capacity_bytes.") from error
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024
