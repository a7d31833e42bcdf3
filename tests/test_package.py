"""What importing the package does, and which way its imports go."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest

import hf_kvcache

ROOT = pathlib.Path(hf_kvcache.__file__).parent
SPEAKS_TRANSFORMERS = (
    "__init__",
    "__main__",
    "attention",
    "cache",
    "cli",
    "commands",
    "contexts",
    "inputs",
    "lm_eval",
    "memory",
    "named",
    "rotary",
    "scoring",
    "session",
    "tuning",
)
MODULES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0].removesuffix(".py") not in SPEAKS_TRANSFORMERS
)


def imports(path: pathlib.Path) -> set[str]:
    """Every module that a file imports, its own package's with their full names."""
    found = set()
    package = [ROOT.name, *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) + 1 - node.level], node.module or ""] if node.level else [node.module]
            )
            found |= {f"{base.rstrip('.')}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_inner_modules_do_not_import_transformers(path):
    outer = (
        "transformers",
        *(f"hf_kvcache.{name}" for name in ("cache", "attention", "rotary", "scoring", "session", "inputs")),
    )
    found = [name for name in imports(path) if (name + ".").startswith(tuple(f"{o}." for o in outer))]
    assert found == (
        ["hf_kvcache.session.Session"] if path.name == "pool.py" else []
    )  # by `pool.session()`, when called


def test_every_inner_module_was_looked_at():
    looked_at = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in MODULES}
    assert {"storage", "blocks", "pool", "prefix", "metrics", "codecs", "kernels", "tiers", "retention"} <= looked_at


def test_importing_only_registers_one_name_twice():
    code = """
import sys
import transformers.cache_utils, transformers.generation.utils, transformers.masking_utils, transformers.modeling_utils
import transformers.models.llama.modeling_llama, transformers.integrations.sdpa_attention

def state():
    # Everything that transformers' modules, their classes and their tables hold.
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "transformers":
            for key, value in list(vars(module).items()):
                found[name, key] = value
                inner = vars(value) if isinstance(value, type) else {key: value}
                for attribute, entry in list(inner.items()):
                    found[name, key, attribute] = entry
                    if type(entry) is dict:
                        found.update({(name, key, attribute, k): v for k, v in entry.items()})
    return found

before = state()
import hf_kvcache
for key, value in state().items():
    # A module may gain names (lazily loaded submodules); classes and tables may gain nothing, and nothing may change.
    new = key not in before and len(key) > 2 and key[:-1] in before
    if new or value is not before.get(key, value):
        print(*key)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    changed = {" ".join(line.split()[1:]) for line in run.stdout.splitlines()}
    assert changed == {
        "AttentionInterface _global_mapping hf_kvcache",
        "AttentionMaskInterface _global_mapping hf_kvcache",
    }


def test_no_cuda_kernel_is_imported_where_there_is_no_device():
    code = """
        import sys, torch
        import hf_kvcache
        from hf_kvcache.kernels import cuda
        from tests.forcing import generate, ours, text
        model = ours()
        generate(model, text(1, 20), hf_kvcache.QuantizedCache(model.config, bits=4, block_size=8, residual=0), 3)
        assert torch.cuda.is_available() or "in use" in cuda.status()
        print([name for name in sys.modules if name.startswith("hf_kvcache.kernels.triton") and not cuda.available()])
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["[]"]
