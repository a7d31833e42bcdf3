"""Two models that generate at once, each in a thread of its own: the kernels and torch share one pool of workers."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_kvcache import BlockPool, PagedCache, named

from .forcing import generate, ours, text

NEW = 40


@pytest.fixture
def two_torch_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def at_once(*jobs) -> list:
    """The results of all jobs, started together."""
    results, start = [None] * len(jobs), threading.Barrier(len(jobs))

    def run(i: int) -> None:
        start.wait()
        results[i] = jobs[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("names", [("paged", "paged"), ("int4/residual=8", "window:64+4"), ("offloaded:32", "int8")])
def test_two_models_in_two_threads_give_what_they_give_alone(two_torch_threads, names):
    models = [ours("llama"), ours("gemma2")]
    jobs = [
        # Long enough that the kernels wake other threads.
        lambda m=model, n=name, s=seed: generate(m, text(2, 600, seed=s), named.cache_factory(n)(m.config), NEW)
        for seed, (model, name) in enumerate(zip(models, names, strict=True))
    ]
    alone = [job() for job in jobs]
    for _ in range(3):
        assert at_once(*jobs) == alone


def test_two_threads_share_a_pool(two_torch_threads):
    model = ours()
    pool = BlockPool(model.config)
    texts = [text(1, 300, seed=s) for s in range(2)]
    alone = [generate(model, ids, PagedCache(model.config), NEW) for ids in texts]
    assert (
        at_once(*[lambda ids=ids: generate(model, ids, PagedCache(model.config, pool=pool), NEW) for ids in texts])
        == alone
    )
    pool.check_integrity()
