"""Who may use whom: reads #include and import lines, on dependencies only.

| floor | holds | may use |
|---|---|---|
| 0 | csrc/core | the C++ standard library |
| 1 | csrc/cpu; csrc/cuda, csrc/nccl | floor 0, the operating system; and the CUDA runtime, with the driver's types |
| 1 | csrc/hosts | floor 0: it composes an engine and a wire, whatever they are |
| 1 | csrc/cuda/emulator | the C++ standard library and the operating system: it takes the CUDA runtime's place |
| 2 | csrc/bind/module.cpp; csrc/bind/c10d_* | floors 0 and 1 and pybind11; the interface of floor 0 and torch |
| 3 | the primitives in ringcomm/ | `_C`, `_c10d`, one another |
| 4 | training (ringcomm/parallel, and on it tensor, pipeline, context), bench, cli | floor 3 |
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE = sorted(path for suffix in (".h", ".cpp", ".cu") for path in (ROOT / "csrc").rglob(f"*{suffix}"))
PYTHON = sorted((ROOT / "ringcomm").rglob("*.py"))

FORBIDDEN_INCLUDES = {
    "core": r"cuda|nccl|pybind11|torch|c10|ATen|Python\.h|cpu/|bind/",
    "cpu": r"cuda|nccl|pybind11|torch|c10|ATen|Python\.h|bind/",
    "hosts": r"cuda|nccl|pybind11|torch|c10|ATen|Python\.h|cpu/|bind/",
    "nccl": r"pybind11|torch|c10|ATen|Python\.h|cpu/|bind/|hosts/|cuda/",
    "cuda": r"cooperative_groups|cub/|thrust/|nccl|pybind11|torch|c10|ATen|Python\.h|bind/|cpu/",
    "emulator": r"cuda\.h|nccl|pybind11|torch|c10|ATen|Python\.h|bind/|cpu/|core/|cuda/(?!emulator/)",
}
FLOOR_3 = {
    *("__init__", "arguments", "backend", "buckets", "calls", "collective_lists", "collectives", "communicator"),
    *("devices", "driver", "endpoint", "errors", "hosts", "interop", "launch", "libraries", "nccl", "process_group"),
    *("profiling", "record", "record_view", "rendezvous", "schedule", "sealed", "timeline", "work"),
}
# The only primitives that import torch or NumPy at all, and then inside functions unless named in TORCH_AT_IMPORT.
KNOWS_ARRAYS = {
    *("backend", "buckets", "collectives", "hosts", "interop", "libraries", "process_group", "rendezvous"),
}
TORCH_AT_IMPORT = {"backend"}


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def imports(nodes: list[ast.stmt] | ast.Module, deep: bool) -> set[str]:
    """Modules that are imported at the top (or, deep, anywhere), leaving out what only type checkers see."""
    found: set[str] = set()
    body = nodes.body if isinstance(nodes, ast.Module) else nodes
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for each in ast.walk(node) if deep else [node]:
            if isinstance(each, ast.Import):
                found |= {alias.name for alias in each.names}
            elif isinstance(each, ast.ImportFrom) and each.module:
                found |= {each.module} | {f"{each.module}.{alias.name}" for alias in each.names}
    return found


def module_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_native_files_include_only_what_lies_below(path: Path) -> None:
    floor = path.parent.name
    if floor in FORBIDDEN_INCLUDES:
        breaches = [name for name in includes(path) if re.match(FORBIDDEN_INCLUDES[floor], name)]
    elif path.name.startswith("c10d_"):
        breaches = [name for name in includes(path) if re.match(r"cpu/|cuda/|cuda_runtime", name)]
    else:
        breaches = [name for name in includes(path) if re.match(r"torch|c10|ATen|cpu/|cuda", name)]
    assert not breaches, f"{path.relative_to(ROOT)} includes {breaches}, which its floor must not know"


def is_primitive(path: Path) -> bool:
    return path.parent == ROOT / "ringcomm" and path.stem in FLOOR_3


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_primitives_do_not_know_what_is_built_on_them(path: Path) -> None:
    if not is_primitive(path):
        return
    above = {other.stem for other in PYTHON if other.parent == ROOT / "ringcomm"} - FLOOR_3
    above |= {other.parent.name for other in PYTHON} - {"ringcomm"}
    used = {name.split(".")[1] for name in imports(module_of(path), deep=True) if name.startswith("ringcomm.")}
    assert not used & above, f"{path.name} imports {sorted(used & above)} from a higher floor"


# Packages of floor 4 that do not know one another: what they share is in ringcomm/parallel and ringcomm/mesh.py.
APART = ("tensor", "pipeline", "context")


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_ways_of_training_do_not_know_one_another(path: Path) -> None:
    home = path.parent.name
    if home not in (*APART, "parallel"):
        return
    used = {name.split(".")[1] for name in imports(module_of(path), deep=True) if name.startswith("ringcomm.")}
    assert not used & {*APART} - {home}, f"{home}/{path.name} imports {sorted(used & {*APART} - {home})}"


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_only_the_bridges_know_torch_and_numpy(path: Path) -> None:
    if not is_primitive(path):
        return
    at_import = {name.split(".")[0] for name in imports(module_of(path), deep=False)}
    anywhere = {name.split(".")[0] for name in imports(module_of(path), deep=True)}
    if path.stem not in TORCH_AT_IMPORT:
        assert not at_import & {"torch", "numpy", "cupy"}, f"{path.name} imports torch or numpy when it is imported"
    if path.stem not in KNOWS_ARRAYS:
        assert not anywhere & {"torch", "numpy", "cupy"}, f"{path.name} imports torch or numpy"


def test_nobody_else_computes_a_chunk() -> None:
    """The ring's arithmetic on ranks exists once."""
    pattern = re.compile(r"%\s*(world_size|world_size_|self\.world_size|comm\.world_size)\b")
    for path in [*NATIVE, *filter(is_primitive, PYTHON)]:
        if path.name == "schedule.h":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "chunk" in line and "shape" not in line:
                assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number} computes a chunk by itself"


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_arguments_are_typed(path: Path) -> None:
    for node in ast.walk(module_of(path)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [arg.arg for arg in given if arg.annotation is None and arg.arg not in ("self", "cls")]
        assert not untyped, f"{path.name}: {node.name} leaves {untyped} without a type"


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_ringcomm_imports_nothing_heavy() -> None:
    heavy = "import sys, ringcomm; print(sorted({'torch', 'numpy', 'cupy', 'rich', 'matplotlib'} & set(sys.modules)))"
    assert run_python(heavy) == "[]"
    assert run_python("import sys, ringcomm; ringcomm.init(); print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("order", ["import ringcomm, torch", "import torch, ringcomm"])
def test_the_backend_registers_itself_in_either_order(order: str) -> None:
    program = f"{order}; import torch.distributed as dist; print('ringcomm' in dist.Backend.backend_list)"
    assert run_python(program) == "True"
