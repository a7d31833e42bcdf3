"""Planning of memory: what a model, a device and a workload allow, before anything runs. Needs no GPU and no weights.

`plan` answers in dataclasses, `simulate` runs a workload through a cache's footprint, `verify` compares predictions with what
is allocated here, `diagnose` says which lever a running pool needs.
"""

from __future__ import annotations

from .answer import Budget, CachePlan, Plan
from .budget import dtype_for
from .diagnosis import Diagnosis, Finding, diagnose
from .layers import LayerKind
from .observation import Observation, read_observation
from .planner import CACHES, Planner, plan
from .simulator import Simulation, simulate
from .units import parse_bytes, parse_tokens, show_bytes
from .verify import Check, verify
from .workload import Request, Workload, lognormal, read_trace

__all__ = [
    "CACHES",
    "Budget",
    "CachePlan",
    "Check",
    "Diagnosis",
    "Finding",
    "LayerKind",
    "Observation",
    "Plan",
    "Planner",
    "Request",
    "Simulation",
    "Workload",
    "diagnose",
    "dtype_for",
    "lognormal",
    "parse_bytes",
    "parse_tokens",
    "plan",
    "read_observation",
    "read_trace",
    "show_bytes",
    "simulate",
    "verify",
]
