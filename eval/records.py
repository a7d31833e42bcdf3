"""Results as JSON lines: one record per suite, cache and point of its protocol, each with all that it takes to judge it.

A run appends what it measures to `results.jsonl`; `--resume` leaves out what is there already. `python -m eval report` merges
any number of such files.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers

import hf_kvcache

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        suite: `quality`, `retrieval`, `streaming` or `latency`.
        cache: its name (`hf_kvcache/named.py`).
        protocol: what was asked for: context, steps, seed and so on; with suite, cache and model it identifies a record.
        run: where it was measured (`describe`): model, dtype, commit, device, versions, date.
        metrics: what came out.
    """

    suite: str
    cache: str
    protocol: dict
    run: dict
    metrics: dict
    schema: int = SCHEMA

    @property
    def key(self) -> str:
        return json.dumps(
            [self.suite, self.cache, self.protocol, *(self.run[k] for k in ("model", "dtype", "device"))],
            sort_keys=True,
        )


class Results:
    """Records in a file, one JSON object a line."""

    def __init__(self, path: Path, resume: bool = False, writes: bool = True):
        self.path = path
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not resume:
                path.write_text("")
        self.records = load([path]) if resume and path.exists() else []

    def add(self, record: Record) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self.records.append(record)


def load(paths: Iterable[Path]) -> list[Record]:
    """The records of all files; of records with one key the last one counts.

    Raises:
        ValueError: for a schema that this version does not read.
    """
    records: dict[str, Record] = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            fields = json.loads(line)
            if fields.get("schema") != SCHEMA:
                raise ValueError(f"{path}:{number} has schema {fields.get('schema')!r}; this version reads {SCHEMA}.")
            record = Record(**fields)
            records.pop(record.key, None)
            records[record.key] = record
    return list(records.values())


def describe(model) -> dict:
    """The part of a record that says where it was measured."""
    return {
        "model": model.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "hf_kvcache": hf_kvcache.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if x.startswith("model name")] if (
        cpuinfo.exists()
    ) else []  # fmt: skip
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, with `+` where files differ from it; None outside of a checkout."""
    root = Path(__file__).parents[1]
    run = lambda *args: subprocess.run(["git", "-C", root, *args], capture_output=True, text=True)  # noqa: E731
    try:
        head = run("rev-parse", "--short", "HEAD")
    except FileNotFoundError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if run("status", "--porcelain", "-uno").stdout.strip() else "")
