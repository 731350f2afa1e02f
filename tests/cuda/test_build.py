"""What was compiled for GPUs, read without one: machine code, PTX, and what the module needs to be imported."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

import ringcomm
from ringcomm import _C, errors
from tests.support import ROOT
from tests.support.choice import choose
from tests.support.cuda import sass_lint

BUILT = _C.build_info()["cuda"]
# Wide loads of a thread before its first store; those of narrow types take more registers in the ring.
LEAST_IN_FLIGHT = {
    "ring": 4,
    "direct": 8,
    "reduce_known": 8,
    "ring_copy": 4,
    "copy_between_ranks": 4,
    "exchange_parts": 4,
    "send_and_receive": 4,
    "pack": 8,
}
FAULTS = {  # what is planted: (file, from, to, what the lint must say[, of which kernels])
    "release at gpu scope": ("core/sync.h", '"st.release.sys', '"st.release.gpu', "scope narrower|MEMBAR"),
    "release dropped": ("core/sync.h", '"st.release.sys.global', '"st.relaxed.sys.global', "MEMBAR"),
    "acquire dropped": ("core/sync.h", '"ld.acquire.sys', '"ld.relaxed.sys', "no wait acquires"),
    "poll with an acquire": ("core/sync.h", '"ld.relaxed.sys', '"ld.acquire.sys', "acquires at every look"),
    "flags at gpu scope": ("core/sync.h", '"ld.relaxed.sys', '"ld.relaxed.gpu', "scope narrower"),
    "read-only data loads": ("cuda/device/intrinsics.h", '"ld.global.v4', '"ld.global.nc.v4', "read-only cache"),
    "a copy of the arguments": (
        "cuda/device/direct/kernel.h",
        "direct(const __grid_constant__ CallArgs args) {",
        "direct(const __grid_constant__ CallArgs given) {\n  const CallArgs args = given;",
        "local memory",
    ),
    "the workers at the barrier of the block": (
        "cuda/device/link_ends.h",
        "agree_at<kWorkersBarrier>(",
        "agree_at<0>(",
        "barrier of the wrong threads",
        "transfer.cu",
    ),
    "the workers' barrier for the whole block": (
        "cuda/device/intrinsics.h",
        "everyone, %2, %3, mine;",
        "everyone, %2, mine;",
        "barrier of the wrong threads",
        "transfer.cu",
    ),
    "the workers wait for the posting warp": (
        "cuda/device/link_ends.h",
        "if (!works()) return false;",
        "return all_ready() && works();",
        "no barrier of the workers alone",
        "transfer.cu",
    ),
}
# Of the data and of the barriers: the kinds that compile soonest.
SOON = ("a copy of the arguments", "the workers at the barrier of the block")
needs_kernels = pytest.mark.skipif(not BUILT.startswith("built for"), reason=f"needs kernels for GPUs: {BUILT}")


@pytest.fixture(scope="module")
def disassembler() -> None:
    if missing := sass_lint.missing_tools("cuobjdump", "nvdisasm"):
        pytest.skip(missing)


def module() -> Path:
    assert _C.__file__ is not None
    return Path(_C.__file__)


@pytest.fixture(scope="module")
def kernels(disassembler: None) -> list[sass_lint.Kernel]:
    return sass_lint.disassemble(module(), "sm_90")


# ---- the kernels -----------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.timeout(300)
def test_the_kernels_keep_the_rules(kernels: list[sass_lint.Kernel]) -> None:
    assert len(kernels) > 50
    bad = {kernel.name: found for kernel in kernels if (found := sass_lint.lint(kernel))}
    assert not bad, "\n".join(f"{name}: {'; '.join(found)}" for name, found in bad.items())
    in_flight = dict.fromkeys(LEAST_IN_FLIGHT, 99)
    for kernel in kernels:
        name = next(
            (each for each in sorted(in_flight, key=len, reverse=True) if f"{len(each)}{each}" in kernel.name), ""
        )
        wide = sass_lint.loads_in_flight(kernel)
        if name and (wide or name != "pack"):  # a cast to a wider type loads less than 16 bytes at a time
            in_flight[name] = min(in_flight[name], wide)
    few = {
        name: (least, in_flight[name]) for name, least in LEAST_IN_FLIGHT.items() if not least <= in_flight[name] < 99
    }
    assert not few, f"wide loads before a store, at least and found: {few}"


@needs_kernels
@pytest.mark.timeout(120)
def test_no_kernel_has_a_stack(disassembler: None) -> None:
    found = sass_lint.resources(module())
    archs = set(re.findall(r"sm_\w+", BUILT))
    assert {arch for arch, _ in found} == archs
    stacks = {name: used for name, used in found.items() if used["STACK"] or used["LOCAL"]}
    assert not stacks, f"bytes of local memory: {stacks}"
    wide = {name: used["REG"] for name, used in found.items() if used["REG"] > 128}
    assert not wide, f"blocks of 512 threads do not fit: {wide}"


@needs_kernels
@pytest.mark.timeout(120)
def test_the_ptx_knows_no_narrow_scope(disassembler: None) -> None:
    if "PTX" not in BUILT:
        pytest.skip(f"no PTX in this build: {BUILT}")
    assert sass_lint.lint_ptx(sass_lint.run("cuobjdump", "-ptx", module())) == []


@needs_kernels
@pytest.mark.timeout(300)
def test_float8_is_converted_by_instructions_where_there_are_some(kernels: list[sass_lint.Kernel]) -> None:
    if "sm_90" not in BUILT:
        pytest.skip(f"no machine code for sm_90: {BUILT}")
    float8 = [kernel for kernel in kernels if "Float8E4M3" in kernel.name]
    assert float8
    soft = [kernel.name for kernel in float8 if not any("E4M3" in word for word in kernel.words)]
    assert not soft, f"files with these kernels are missing from float8_sources in cmake/cuda.cmake: {soft}"


def find_nvcc() -> str:
    """By the rule of the build."""
    return str(runpy.run_path(str(ROOT / "cmake" / "nvcc.py"))["nvcc"]())


def nvcc() -> str:
    path = find_nvcc()
    if not path:
        pytest.skip("needs nvcc: install CUDA 12.1 or newer")
    return path


def compile_one(csrc: Path, out: Path, source: str = "direct/wide_float.cu") -> sass_lint.Kernel:
    """The direct sum of float32, and the waits that all kernels have; or the one kernel of another file."""
    only = ["-DRINGCOMM_ONLY_DTYPE=kFloat32", "-DRINGCOMM_ONLY_OP=kSum"]
    words = [nvcc(), "-std=c++17", "-O3", "-DNDEBUG", "-fmad=false", "-arch=sm_90", f"-I{csrc}", *only, "-cubin"]
    words += ["-x", "cu", str(csrc / "cuda" / "device" / source), "-o", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (kernel,) = sass_lint.disassemble(out, "sm_90")
    return kernel


@pytest.fixture(scope="module")
def clean(disassembler: None, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the lint says of the source as it is."""
    return sass_lint.lint(compile_one(ROOT / "csrc", tmp_path_factory.mktemp("lint") / "clean.cubin"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", choose(FAULTS, SOON))
def test_planted_faults_are_seen_in_the_machine_code(fault: str, tmp_path: Path, clean: list[str]) -> None:
    """A test of the lint."""
    assert clean == []
    file, before, after, said, *source = FAULTS[fault]
    for folder in ("core", "cuda"):
        shutil.copytree(ROOT / "csrc" / folder, tmp_path / folder)
    text = (tmp_path / file).read_text()
    assert text.count(before) == 1, f"{before} is in {file} {text.count(before)} times"
    (tmp_path / file).write_text(text.replace(before, after))
    bad = sass_lint.lint(compile_one(tmp_path, tmp_path / "fault.cubin", *source))
    assert any(re.search(said, each) for each in bad), f"{fault} went unseen: {bad}"


# ---- without a driver ------------------------------------------------------------------------------------------------


def test_the_module_needs_no_driver_to_be_imported() -> None:
    done = subprocess.run(["ldd", str(module())], capture_output=True, text=True, timeout=60, check=True)
    assert not re.search(r"libcuda|libcudart|libnvidia|libnccl", done.stdout), done.stdout
    program = "import ringcomm; ringcomm.init().close(); print(ringcomm.build_info()['cuda'])"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=hidden)
    assert (done.returncode, done.stdout.strip()) == (0, BUILT), done.stderr


def test_without_a_driver_the_engine_says_so() -> None:
    why = _C.why_no_cuda()
    if not why:
        pytest.skip("this machine has a driver and a device")
    if BUILT.startswith("built for") and not Path("/dev/nvidiactl").exists():
        assert "driver" in why
    with pytest.raises(errors.UnsupportedError) as caught:
        _C.Engine("cuda", 0, 1)
    assert "rank 0" in str(caught.value)
    assert why in str(caught.value)
    with pytest.raises(errors.UnsupportedError):
        ringcomm.init(device="cuda")


# ---- the build itself ------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"needs {name}: pip install {name}")
    return path


def configure(build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    return subprocess.run([*words, *options], capture_output=True, text=True, timeout=100, check=False)


def test_a_missing_nvcc_is_an_error_where_it_was_asked_for(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DRINGCOMM_CUDA=ON", "-DRINGCOMM_NVCC=/nowhere/nvcc")
    assert done.returncode != 0
    assert "RINGCOMM_CUDA=ON, but there is no nvcc at /nowhere/nvcc" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-DRINGCOMM_NVCC=/nowhere/nvcc"], "not built: there is no nvcc at /nowhere/nvcc"),
        (["-DRINGCOMM_NVCC=/bin/false"], "not built: /bin/false did not work"),
        (["-DRINGCOMM_CUDA=OFF"], "not built: RINGCOMM_CUDA was OFF"),
        (["-DRINGCOMM_EMULATE=ON"], "emulated"),
    ],
    ids=["no-nvcc", "broken-nvcc", "off", "emulated"],
)
def test_the_build_says_what_becomes_of_cuda(options: list[str], said: str, tmp_path: Path) -> None:
    done = configure(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert f"CUDA engine: {said}" in done.stdout


def test_nvcc_is_that_of_the_environment_else_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RINGCOMM_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    wheels = [tmp_path / "nvidia" / version / "bin" / "nvcc" for version in ("cu13", "cu14")]
    home = tmp_path / "home" / "bin" / "nvcc"
    for path in (*wheels, home):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    which, places = shutil.which, []
    monkeypatch.setattr(shutil, "which", lambda name, path: places.append(path))  # this machine may have one
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path / name])
    )
    monkeypatch.setenv("PATH", "/somewhere")
    assert find_nvcc() == str(wheels[1])
    assert places == ["/somewhere:/usr/local/cuda/bin"]
    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_nvcc() == str(home)
    monkeypatch.setenv("RINGCOMM_NVCC", "/elsewhere/nvcc")
    assert find_nvcc() == "/elsewhere/nvcc"


def test_cmake_asks_for_nvcc_by_that_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_NVCC", "/elsewhere/nvcc")
    done = configure(tmp_path, f"-DPython_EXECUTABLE={sys.executable}")
    assert "CUDA engine: not built: there is no nvcc at /elsewhere/nvcc" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_architectures_are_named(tmp_path: Path) -> None:
    path = nvcc()
    archs = {"": "sm_80 sm_90 + PTX 80", "native-dev": "sm_90 + PTX 90", "100;90-real": "sm_90 sm_100 + PTX 90"}
    for asked, said in archs.items():
        done = configure(tmp_path, f"-DRINGCOMM_NVCC={path}", f"-DRINGCOMM_CUDA_ARCHS={asked}")
        assert f"CUDA engine: built for {said} by nvcc" in done.stdout, done.stdout + done.stderr
    done = configure(tmp_path, f"-DRINGCOMM_NVCC={path}", "-DRINGCOMM_CUDA_ARCHS=sm_90")
    assert done.returncode != 0
    assert "got sm_90" in done.stderr


def test_a_build_without_cuda_says_so_when_the_engine_is_asked_for(tmp_path: Path) -> None:
    main = tmp_path / "main.cpp"
    main.write_text("""
#include <iostream>
#include "core/engine.h"
#include "core/error.h"
int main() {
  std::cout << ringcomm::why_no_cuda() << std::endl;
  try {
    ringcomm::make_cuda_engine(3, 4, {});
  } catch (const ringcomm::Error& error) {
    std::cout << error.what() << std::endl;
    return error.code() == ringcomm::ErrorCode::kUnsupported ? 0 : 1;
  }
  return 2;
}
""")
    words = ["c++", "-std=c++17", f"-I{ROOT / 'csrc'}", '-DRINGCOMM_NO_CUDA="no nvcc"', str(main)]
    words += [str(ROOT / "csrc" / "runtime" / "no_cuda.cpp"), "-o", str(tmp_path / "main")]
    subprocess.run(words, check=True, timeout=100)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stdout
    why, error = done.stdout.splitlines()
    assert why.startswith("this build has no CUDA engine: no nvcc;")
    assert error == f"Engine: rank 3 asked for engine 'cuda', but {why}"


def test_torch_carries_a_pybind11_that_serves_where_there_is_no_other() -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("needs torch")
    assert (Path(torch.origin).parent / "include" / "pybind11" / "pybind11.h").is_file()
