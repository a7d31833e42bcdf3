"""Models and texts for evaluations: the demo model, or any path or hub id."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvcache

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import fetch_demo_model
import fetch_eval_data


def load(name: str | None = None, dtype: torch.dtype = torch.float32):
    """`(model, tokenizer)` for a path or hub id, or the demo model for None; the model attends to our pages."""
    source = name or fetch_demo_model.fetch()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    return hf_kvcache.enable(model), tokenizer


def texts() -> dict[str, str]:
    """Real English prose by name; see `scripts/fetch_eval_data.py`."""
    return fetch_eval_data.texts()
