"""Builds the CPU kernels; all else about the package is in pyproject.toml."""

from __future__ import annotations

import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LOST = """\
the CPU kernels of hf_kvcache were not built:
    {error}
The package works without them, but quantized and paged decoding on the CPU is then several times slower.
To have them, install a C++17 compiler (GCC or Clang) and install hf_kvcache again."""


class BuildLibrary(build_ext):
    """Builds plain shared libraries with a C interface, for ctypes: no Python headers, one file for every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        # The usual name, `_cpu.cpython-311-x86_64-linux-gnu.so`, ties a library to one Python: ours is `_cpu.so`.
        return os.path.join(*fullname.split(".")) + (".dll" if os.name == "nt" else ".so")

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols  # the default adds PyInit__cpu, which there is not

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # no compiler raises other classes than a failing one
            self.warn(LOST.format(error=error))


setup(
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "hf_kvcache.kernels._cpu",
            ["hf_kvcache/kernels/cpu.cpp"],
            language="c++",
            # Portable on purpose (no -march=native: wheels travel), and exact (no -ffast-math: infinities mask scores).
            extra_compile_args=["-O3", "-std=c++17", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,  # an install without it succeeds
        )
    ],
)
