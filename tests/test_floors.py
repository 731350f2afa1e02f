"""Who may use whom: reads #include and import lines, those inside functions and for type checkers too.

csrc/: a folder includes what stands before it in NATIVE_FLOORS, without what FORBIDDEN_INCLUDES names:

| folder | may use |
|---|---|
| core; call, simulation | the C++ standard library |
| runtime; observe; progress | core, the operating system |
| cpu: kernels, group, collectives | core, runtime |
| cuda: device, memory, tuning, streams, launch | core, runtime, the CUDA runtime; kernels (device): core alone |
| hierarchy | core, runtime: it composes an engine and a transport, whatever they are |
| hierarchy/nccl | the interface of transports; the CUDA runtime (cuda/runtime.h, cuda/streams/events.h) |
| bind: module; c10d | core, runtime, hierarchy, pybind11; interfaces and torch |

tests/support/emulator takes the CUDA runtime's place: it may use the C++ standard library and the operating system.

ringcomm/: a folder, or a file beside the folders, imports what stands before it in FLOORS; of a folder that holds
folders, that is the files beside them. No files import one another.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

from tests.support import ROOT
from tests.support.house import (
    circles,
    imported,
    imports_of,
    includes,
    modules_of,
    mutual,
    name_of,
    path_changes,
    tree_of,
)

CSRC = ROOT / "csrc"
NATIVE = [
    path
    for folder in ("csrc", "tests/support/emulator")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".h", ".cpp", ".cu")
]
PYTHON = sorted((ROOT / "ringcomm").rglob("*.py"))

NATIVE_FLOORS = (
    *("core", "core/call", "core/simulation", "runtime", "runtime/observe", "runtime/progress"),
    *("cpu/kernels", "cpu/group", "cpu/collectives", "cpu"),
    *("cuda/runtime", "cuda/device", "cuda/device/direct", "cuda/device/ring"),
    *("cuda/memory", "cuda/tuning", "cuda/streams", "cuda/launch", "cuda"),
    *("hierarchy", "hierarchy/nccl", "bind", "bind/module", "bind/c10d"),
)
"""Folders of csrc/, bottom first; of one that holds folders, the files beside them. cuda/runtime is such files, .h and
.cpp, which all folders of cuda/ use."""
FOREIGN = r"cuda|nccl|pybind11|torch|c10|ATen|Python\.h"
FOREIGN_TO_CUDA = r"cooperative_groups|cub/|thrust/|nccl|pybind11|torch|c10|ATen|Python\.h"
FORBIDDEN_INCLUDES = {
    "core": rf"{FOREIGN}|(runtime|cpu|hierarchy|bind)/|sys/|unistd|fcntl|pthread|time\.h",
    "runtime": rf"{FOREIGN}|(cpu|hierarchy|bind)/",
    "cpu/kernels": rf"{FOREIGN}|(runtime|hierarchy|bind)/|cpu/(?!kernels/)",
    "cpu/group": rf"{FOREIGN}|(hierarchy|bind)/|cpu/(?!group/)",
    "cpu": rf"{FOREIGN}|(hierarchy|bind)/",
    "hierarchy": rf"{FOREIGN}|(cpu|bind)/|hierarchy/nccl/",
    "hierarchy/nccl": r"pybind11|torch|c10|ATen|Python\.h|(cpu|bind)/|hierarchy/(?!nccl|transport)"
    r"|cuda/(?!runtime\.h|streams/events\.h)",
    "cuda/device": rf"{FOREIGN_TO_CUDA}|(runtime|cpu|hierarchy|bind)/|cuda/runtime\.h",
    "cuda": rf"{FOREIGN_TO_CUDA}|(cpu|hierarchy|bind)/",
    "bind": r"torch|c10|ATen|cpu/|cuda",
    "bind/module": r"torch|c10|ATen|cpu/|cuda|bind/c10d/",
    "bind/c10d": r"cpu/|cuda/|cuda_runtime|bind/module/",
    "tests/support/emulator": r"cuda\.h|nccl|pybind11|torch|c10|ATen|Python\.h|(core|runtime|cpu|cuda|hierarchy|bind)/",
}
FLOORS = (
    *("_c10d", "errors", "validation", "terminal", "arrays", "comm", "backend", "replace", "observe"),
    *("modules", "data_parallel/buckets", "data_parallel/model", "data_parallel/optim", "data_parallel"),
    *("tensor_parallel", "pipeline_parallel", "context", "checkpoint"),
    *("tools/bench", "tools/simulate", "tools", "__main__"),
)
"""Folders of ringcomm/ and files beside them, bottom first; of a folder that holds folders, the files beside them."""
APART = {"tensor_parallel", "pipeline_parallel", "context"}
"""Folders that do not know one another: what they share is in comm/mesh.py, modules/ and data_parallel/."""
PRIMITIVES = FLOORS[: FLOORS.index("modules")]
ROOT_NAMES = {"_C", "_c10d", "__version__"}
"""What any floor may import from `ringcomm` itself; the tools use its public names as users do."""
# The only primitives beside arrays/ that import torch or NumPy at all, and then inside functions, or for type checkers,
# unless named in TORCH_AT_IMPORT.
KNOWS_ARRAYS = {
    *("_c10d", "backend", "replace", "comm.communicator", "comm.hosts", "comm.mesh", "comm.process_group"),
    *("comm.rendezvous", "observe.cuda", "observe.info"),
}
TORCH_AT_IMPORT = {"_c10d", "backend"}


MODULES = modules_of(ROOT / "ringcomm")


def native_floor(name: str) -> str:
    """Of a file below csrc/."""
    path = PurePosixPath(name).with_suffix("")
    return next(each.as_posix() for each in (path, *path.parents) if each.as_posix() in NATIVE_FLOORS)


def python_floor(name: str) -> str:
    """Of a module below ringcomm; empty for the package itself."""
    path = PurePosixPath(name.replace(".", "/"))
    return next((each.as_posix() for each in (path, *path.parents) if each.as_posix() in FLOORS), "")


def test_native_files_include_only_what_lies_below() -> None:
    breaches = set[str]()
    for path in NATIVE:
        folders = [folder.as_posix().removeprefix("csrc/") for folder in path.relative_to(ROOT).parents]
        folder = next(folder for folder in folders if folder in FORBIDDEN_INCLUDES)
        named = includes(path)
        wrong = {name for name in named if re.match(FORBIDDEN_INCLUDES[folder], name)}
        if path.is_relative_to(CSRC):
            floor = NATIVE_FLOORS.index(native_floor(path.relative_to(CSRC).as_posix()))
            ours = [name for name in named if (CSRC / name).is_file()]
            wrong |= {name for name in ours if NATIVE_FLOORS.index(native_floor(name)) > floor}
        breaches |= {f"{path.relative_to(ROOT)} includes {name}, which its folder must not know" for name in wrong}
    assert not breaches, "\n".join(sorted(breaches))


def test_every_native_folder_has_a_floor() -> None:
    files = [path.relative_to(CSRC) for path in NATIVE if path.is_relative_to(CSRC)]
    assert {path.parent.as_posix() for path in files} <= {*NATIVE_FLOORS}
    assert {native_floor(path.as_posix()) for path in files} == {*NATIVE_FLOORS}


def test_no_native_files_include_one_another() -> None:
    files = {path.relative_to(CSRC).as_posix(): path for path in NATIVE if path.is_relative_to(CSRC)}
    found = mutual({name: {*includes(path)} & files.keys() for name, path in files.items()})
    assert [sorted(circle) for circle in found] == []


def is_primitive(path: Path) -> bool:
    return name_of(path).split(".")[0] in PRIMITIVES


def test_every_module_has_a_floor() -> None:
    folders = {path.parent.relative_to(ROOT / "ringcomm").as_posix() for path in MODULES.values()}
    assert folders - {"."} <= {*FLOORS}
    assert {python_floor(name) for name in MODULES} == {*FLOORS}


def test_imports_go_down() -> None:
    breaches = set[str]()
    for name in MODULES:
        home = python_floor(name)
        below = {*FLOORS[: FLOORS.index(home) + 1]} - (APART - {home} if home in APART else set())
        above = {used for used in imports_of(MODULES[name], MODULES, ROOT_NAMES) if python_floor(used) not in below}
        if home.startswith("tools"):
            above -= {""}
        breaches |= {f"{name} imports {used or 'ringcomm'}, which is not below it" for used in above}
    assert not breaches, "\n".join(sorted(breaches))


def test_no_files_import_one_another() -> None:
    assert [sorted(circle) for circle in circles(MODULES)] == []


def test_only_the_bridges_know_torch_and_numpy() -> None:
    arrays, breaches = {"torch", "numpy", "cupy"}, []
    for path in filter(is_primitive, PYTHON):
        tree, name = tree_of(path), name_of(path)
        if name not in TORCH_AT_IMPORT and arrays & {each.split(".")[0] for each in imported(tree.body)}:
            breaches.append(f"{name} imports torch or numpy when it is imported")
        if name.split(".")[0] != "arrays" and name not in KNOWS_ARRAYS:
            anywhere = {each.split(".")[0] for each in imported(ast.walk(tree))}
            breaches += [f"{name} imports torch or numpy"] if anywhere & arrays else []
    assert not breaches, "\n".join(breaches)


def test_nobody_else_computes_a_chunk() -> None:
    """The ring's arithmetic on ranks exists once."""
    pattern = re.compile(r"%\s*(world_size|world_size_|self\.world_size|comm\.world_size)\b")
    for path in [*NATIVE, *filter(is_primitive, PYTHON)]:
        if path.name == "schedule.h":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "chunk" in line and "shape" not in line:
                assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number} computes a chunk by itself"


def test_arguments_are_typed() -> None:
    breaches = []
    for path in PYTHON:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [arg.arg for arg in given if arg.annotation is None and arg.arg not in ("self", "cls")]
            breaches += [f"{name_of(path)}: {node.name} leaves {untyped} without a type"] if untyped else []
    assert not breaches, "\n".join(breaches)


OTHERS_TESTS = ROOT / "benchmarks" / "collectives" / "conformance_run.py"
"""It runs test files of torch, which import their neighbours by name."""


def test_no_file_changes_where_python_looks_for_modules() -> None:
    """Tests, benchmarks and their helpers are modules of packages that lie at the root."""
    folders = ("ringcomm", "tests", "benchmarks", "examples", "cmake")
    files = [ROOT / "setup.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    assert {path for path in files if path_changes(path)} == {OTHERS_TESTS}


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_ringcomm_imports_nothing_heavy() -> None:
    heavy = "import sys, ringcomm; print(sorted({'torch', 'numpy', 'cupy', 'rich', 'matplotlib'} & set(sys.modules)))"
    assert run_python(heavy) == "[]"
    assert run_python("import sys, ringcomm; ringcomm.init(); print('torch' in sys.modules)") == "False"
