"""What every suite needs: a model, the caches to compare, where results go, and the processes that share the work.

Under `accelerate launch` (or torchrun) every process loads the model and measures its share of the samples; `gather` brings
the parts together, and the first process writes. One process is the same with a share of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        results: where records go.
        console: for people, on standard error.
        quick: a smaller protocol, for a first look.
    """

    model: torch.nn.Module
    tokenizer: object
    caches: list[str]
    results: Results
    console: Console
    quick: bool = False

    def __post_init__(self):
        self.processes = PartialState()
        self.run = describe(self.model)

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
        record = Record(suite, cache, protocol, self.run, {})
        for known in self.results.records:
            if known.key == record.key:
                return known
        record = Record(suite, cache, protocol, self.run, work())
        if self.processes.is_main_process:
            self.results.add(record)
        return record

    def progress(self) -> Progress:
        """A progress bar that only the first process draws."""
        return Progress(console=self.console, disable=not self.processes.is_main_process)
