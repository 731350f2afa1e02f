"""Builds the native modules with CMake and Ninja: `_C` always, `_c10d` where torch can be imported. Asks for no GPU.

In the environment:

| variable | default | |
|---|---|---|
| ``RINGCOMM_CUDA`` | AUTO | CUDA kernels. AUTO: if there is an nvcc; ON: there must be one; OFF |
| ``RINGCOMM_NVCC`` | what cmake/nvcc.py finds | path of the nvcc |
| ``RINGCOMM_CUDA_ARCHS`` | ``80,90`` | machine code for these, and PTX of the first; ``native-dev``: 90 alone |
| ``RINGCOMM_TORCH_DIRS`` | | for a wheel (`make wheel`): folders of several torch packages, with : between |
| ``RINGCOMM_ONLY`` | | a single pair, such as ``float32:sum`` |
| ``RINGCOMM_BUILD_TYPE``, ``RINGCOMM_JOBS`` | Release, all cores | |
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77  # older ones cannot read pyproject.toml, and do not say that they are too old
if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
    raise SystemExit(
        f"ringcomm needs setuptools {OLDEST_SETUPTOOLS} or newer to build and finds {setuptools.__version__}; "
        f"install it with: pip install 'setuptools>={OLDEST_SETUPTOOLS}'"
    )


def wheel_torches() -> dict[str, tuple[str, str]]:
    """For a wheel: the modules to build, such as ``_c10d_2_13``, each with the version and the folder of its torch."""
    found = {}
    for folder in filter(None, os.environ.get("RINGCOMM_TORCH_DIRS", "").split(os.pathsep)):
        text = Path(folder, "version.py").read_text(encoding="utf-8")
        version = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", text)
        if version is None:
            raise SystemExit(f"RINGCOMM_TORCH_DIRS: {folder}/version.py has no version; pass folders of torch packages")
        found[f"_c10d_{version[2]}_{version[3]}"] = (version[1], folder)
    return found


def long_description() -> str:
    """README.md for a package index, which has none of the repository's files: without pictures of them, and with the
    text alone of links to them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n+", "", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def tool(name: str) -> str:
    """Path of a build tool that stands beside this Python or on PATH."""
    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None:
        raise SystemExit(f"ringcomm needs {name} to build and finds none; install it with: pip install {name}")
    return path


def torch_options() -> tuple[list[str], str]:
    """CMake options for `_c10d`, and one line that says what will be built; no options if torch does not serve."""
    if torches := wheel_torches():
        pairs = ";".join(f"{module}={folder}" for module, (_, folder) in torches.items())
        versions = ", ".join(version for version, _ in torches.values())
        return ["-DRINGCOMM_TORCH_DIR=", f"-DRINGCOMM_TORCH_DIRS={pairs}"], f"built against torch {versions}"
    if importlib.util.find_spec("torch") is None:
        return [], "not built: torch is not importable here; install torch, then pip install --no-build-isolation ."
    import torch

    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < OLDEST_TORCH:
        return [], f"not built: torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}"
    if not torch.distributed.is_available():
        return [], f"not built: torch {torch.__version__} comes without torch.distributed"
    folder = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    options = [f"-DRINGCOMM_TORCH_DIR={folder}", "-DRINGCOMM_TORCH_DIRS=", f"-DRINGCOMM_CXX11_ABI={abi}"]
    return options, f"built against torch {torch.__version__}"


def pybind11_include() -> str:
    """Headers of pybind11: its own package's, or the copy that torch carries."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return pybind11.get_include()
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        copy = Path(torch.origin).parent / "include"
        if (copy / "pybind11" / "pybind11.h").is_file():
            return str(copy)
    raise SystemExit("ringcomm needs pybind11 to build and finds none; install it with: pip install pybind11")


def cuda_options() -> list[str]:
    archs = os.environ.get("RINGCOMM_CUDA_ARCHS", "").replace(",", ";")
    return [
        f"-DRINGCOMM_CUDA={os.environ.get('RINGCOMM_CUDA', 'AUTO').upper()}",
        f"-DRINGCOMM_NVCC={os.environ.get('RINGCOMM_NVCC', '')}",
        f"-DRINGCOMM_CUDA_ARCHS={archs}",
    ]


class CMakeBuild(build_ext):
    """One CMake build makes both modules; they land beside the package's Python files."""

    def build_extensions(self) -> None:
        options, c10d = torch_options()
        # Kept between builds, apart for each Python and for with and without torch. The wheels of all Pythons share
        # one: the core, most of the work, is compiled once, and only what Python's headers reach anew.
        kind = f"{sys.implementation.cache_tag}-{'torch' if options else 'plain'}"
        build = ROOT / "build" / ("wheel" if wheel_torches() else kind)
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            tool("cmake"),
            *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('RINGCOMM_BUILD_TYPE', 'Release')}",
            "-U_Python_*",  # what CMake found for the Python of an earlier wheel
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DRINGCOMM_BUILD_PYTHON=ON",
            f"-DRINGCOMM_PYBIND11_INCLUDE={pybind11_include()}",
            *cuda_options(),
            f"-DRINGCOMM_VERSION={self.distribution.get_version()}",
            f"-DRINGCOMM_ONLY={os.environ.get('RINGCOMM_ONLY', '')}",
            *(options or ["-DRINGCOMM_TORCH_DIR=", "-DRINGCOMM_TORCH_DIRS="]),
        ]
        cuda = self.configure(configure)
        self.remove_single()
        for extension in self.extensions:
            name = extension.name.rpartition(".")[2]
            target = Path(self.get_ext_fullpath(extension.name)).resolve()
            target.unlink(missing_ok=True)  # never write into a file that a running process has mapped
            if name == "_c10d" and not options:
                continue
            try:
                seconds = self.build_module(name, build, target)
                if name == "_C" and "built for" in cuda:
                    cuda = f"{cuda}, {seconds:.0f} s with the rest of _C"
            except subprocess.CalledProcessError:
                if name != "_c10d":  # a wheel has all that it was asked for
                    raise
                c10d = "not built: it does not compile against this torch, see above; all the rest works without it"
        self.extensions = [each for each in self.extensions if Path(self.get_ext_fullpath(each.name)).exists()]
        self.summary(c10d, cuda)

    def copy_extensions_to_source(self) -> None:
        """For an editable installation, into this folder."""
        self.remove_single()
        super().copy_extensions_to_source()

    def remove_single(self) -> None:
        """Removes an older build's `_c10d`: Python would import it in place of _c10d.py, which chooses one by torch."""
        if wheel_torches():
            Path(self.get_ext_fullpath("ringcomm._c10d")).unlink(missing_ok=True)

    def configure(self, words: list[str]) -> str:
        """Runs CMake; what it says about the CUDA engine."""
        said = []
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                said.append(line)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, words)
        return next(line.partition("CUDA engine: ")[2].strip() for line in said if "CUDA engine: " in line)

    def build_module(self, name: str, build: Path, target: Path) -> float:
        """Builds one module and puts it where setuptools wants it; the seconds it took."""
        started = time.monotonic()
        jobs = os.environ.get("RINGCOMM_JOBS") or str(self.parallel or os.cpu_count() or 1)
        subprocess.run([tool("cmake"), "--build", str(build), "--parallel", jobs, "--target", name], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / (name + target.name[target.name.index(".") :]), target)
        return time.monotonic() - started

    def summary(self, c10d: str, cuda: str) -> None:
        """Prints what this build can do."""
        lines = [
            f"ringcomm {self.distribution.get_version()} for Python {sys.version.split()[0]}",
            f"  _C      built: CPU engine{', CUDA engine' if 'built for' in cuda else ''}",
            f"  _c10d   {c10d}",
            f"  CUDA    {cuda}",
        ]
        print("\n".join(lines), flush=True)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension("ringcomm._C", sources=[]),
        *(Extension(f"ringcomm.{module}", sources=[]) for module in wheel_torches()),
        *([] if wheel_torches() else [Extension("ringcomm._c10d", sources=[], optional=True)]),
    ],
    cmdclass={"build_ext": CMakeBuild},
)
