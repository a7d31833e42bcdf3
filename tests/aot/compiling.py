"""Compile Triton kernels ahead of time, on a machine without a GPU, and read what the machine code says of their speed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

from triton import compile, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Report(NamedTuple):
    """Registers of a thread, bytes it spills, bytes of shared memory, warp instructions of the main loop for one warp."""

    registers: int
    spilled: int
    shared: int
    instructions: int


def compiled(kernel, types: dict[str, str], constants: dict[str, Any], arch: int, warps: int, stages: int) -> Report:
    """`kernel` for compute capability `arch` (90 is 9.0). `types` of the arguments that are not in `constants`, such as
    `*fp16`, `i32`, `fp32`; addresses, and integers written `i32:16`, are taken to be multiples of 16."""
    signature = {name: types[name].removesuffix(":16") if name in types else "constexpr" for name in kernel.arg_names}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or kind.endswith(":16")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    binary = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, code = (_dump(option, file.name) for option in ("--dump-resource-usage", "-sass"))
    number = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    spilled = int(number["STACK"]) + int(number["LOCAL"])
    return Report(int(number["REG"]), spilled, binary.metadata.shared, _longest_loop(code))


def _dump(option: str, path: str) -> str:
    run = subprocess.run([knobs.nvidia.cuobjdump.path, option, path], capture_output=True, text=True, check=True)
    return run.stdout


_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_]+)([^;]*);", re.M)


def _longest_loop(sass: str) -> int:
    """Instructions from the target of a backward branch to the branch, in the longest loop."""
    addresses, longest = [], 0
    for address, opcode, operands in _INSTRUCTION.findall(sass):
        addresses.append(int(address, 16))
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode == "BRA" else None
        if target and int(target[1], 16) < addresses[-1]:
            longest = max(longest, sum(x >= int(target[1], 16) for x in addresses))
    return longest
