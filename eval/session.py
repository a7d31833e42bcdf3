"""What every suite needs: a model, the caches to compare, where results go, and the processes that share the work.

Under torchrun or `accelerate launch --multi_gpu` (with or without GPUs: its `--cpu` starts one process) every process loads
the model and measures its share of the samples; `gather` brings the parts together, and the first process writes. One
process is the same with a share of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import Progress

from .records import Record, Results, describe

T = TypeVar("T")


@dataclass
class Session:
    """One run of a suite.

    Attributes:
        model, tokenizer: attending to our pages (`models.load`).
        caches: names (`hf_kvcache/named.py`) to measure.
        path: the file that records go to.
        console: for people, on standard error.
        quick: a smaller protocol, for a first look.
        resume: keep the records that the file has, and measure the rest.
    """

    model: torch.nn.Module
    tokenizer: object
    caches: list[str]
    path: Path
    console: Console
    quick: bool = False
    resume: bool = False

    def __post_init__(self):
        self.processes = PartialState(cpu=not torch.cuda.is_available())
        self.results = Results(self.path, self.resume, writes=self.processes.is_main_process)
        self.processes.wait_for_everyone()
        self.run = describe(self.model) | {"processes": self.processes.num_processes}

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of `items`: every n-th of them."""
        return list(items[self.processes.process_index :: self.processes.num_processes])

    def gather(self, mine: Sequence[T]) -> list[T]:
        """What all processes have, in the order that `share` dealt it out from."""
        if self.processes.num_processes == 1:
            return list(mine)
        parts = gather_object([list(mine)])
        longest = max(len(part) for part in parts)
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def measure(self, suite: str, cache: str, protocol: dict, work: Callable[[], dict]) -> Record:
        """The record of `work()`, from an earlier run where there is one; written by the first process."""
        known = self.known(suite, cache, protocol)
        if known is not None:
            return known
        record = Record(suite, cache, protocol, self.run, work())
        if self.processes.is_main_process:
            self.results.add(record)
        return record

    def known(self, suite: str, cache: str, protocol: dict) -> Record | None:
        """What was measured before of just this."""
        key = Record(suite, cache, protocol, self.run, {}).key
        return next((record for record in self.results.records if record.key == key), None)

    def progress(self) -> Progress:
        """A progress bar that only the first process draws."""
        return Progress(console=self.console, disable=not self.processes.is_main_process)
