"""Tensor parallelism: two processes, each with half of the heads, give the tokens that they give with the built-in cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .architectures import build

ROOT = Path(__file__).parents[1]
WORKER = """
import sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache
import hf_kvcache
from hf_kvcache import cache_kwarg, named

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", attn_implementation="hf_kvcache").eval()
ids = torch.randint(2, 90, (2, 60), generator=torch.Generator().manual_seed(0))

def generate(cache):
    options = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **cache_kwarg(cache), **options).tolist()

expected = generate(DynamicCache(config=model.config))
for name in ("paged", "offloaded:16", "window:100+2"):
    cache = named.cache_factory(name)(model.config)
    assert generate(cache) == expected, name
    assert cache.layers[0].storage.geometry.kv_heads * 2 == model.config.num_key_value_heads
    cache.check_integrity()
"""


@pytest.mark.slow
def test_tensor_parallel_generation_equals_the_built_in_caches(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    build("llama").save_pretrained(tmp_path / "model")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--tee", "3"]
    done = subprocess.run(
        [*launch, str(worker), str(tmp_path / "model")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
