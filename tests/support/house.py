"""Reads the source tree (imports, includes, classes, lines) and counts how much of it a reader meets.

    python -m tests.support.house                       # this working tree
    python -m tests.support.house HEAD~20 .             # a column for each commit or folder

tests/test_floors.py uses the same functions. "Files between loss.backward() and a peer's memory" are, in Python, those
that run in a backward pass at stage 2, which needs a folder with built modules; and, in C++, those that docs/design.md
names in its path of a gradient.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path

from tests.support import ROOT

NATIVE = (".h", ".cpp", ".cu", ".c")
COLUMNS = 120
CHANGES_THE_PATH = re.compile(
    r"\bsys\.path(\[.*?\])?(\s*\+?=[^=]|\.(append|clear|extend|insert|pop|remove)\b)|\bsyspath_prepend"
)

# ---- what a file says --------------------------------------------------------------------------------------------


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Full names of what is imported: a module, or a name in one."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def name_of(path: Path) -> str:
    """A module's name below `ringcomm`; empty for the package itself."""
    parts = path.with_suffix("").parts
    below = parts[len(parts) - parts[::-1].index("ringcomm") :]
    return ".".join(below).removesuffix("__init__").rstrip(".")


def modules_of(package: Path) -> dict[str, Path]:
    """The files of the package `ringcomm`, without its own `__init__`, by their names below it."""
    return {name_of(path): path for path in sorted(package.rglob("*.py")) if name_of(path)}


def imports_of(path: Path, modules: Collection[str], root_names: Collection[str] = ()) -> set[str]:
    """Modules of `ringcomm` that a file imports anywhere, by their names below it.

    Args:
        root_names: what the package itself has, which does not count.
    """
    used = set()
    for name in imported(ast.walk(tree_of(path))):
        inside = name.removeprefix("ringcomm").lstrip(".")
        if name.split(".")[0] == "ringcomm" and inside not in root_names:
            used.add(inside if inside in modules else inside.rpartition(".")[0])
    return used


def circles(modules: Mapping[str, Path]) -> list[set[str]]:
    """Modules that import one another, each with all others in its set."""
    return mutual({name: imports_of(path, modules) & modules.keys() for name, path in modules.items()})


def mutual(edges: Mapping[str, Collection[str]]) -> list[set[str]]:
    """Nodes of a graph that reach one another, each with all others in its set."""
    reached = {name: {name} for name in edges}
    while True:
        wider = {name: seen.union(*(edges[each] for each in seen)) for name, seen in reached.items()}
        if wider == reached:
            break
        reached = wider
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in edges}
    return [{*circle} for circle in found if len(circle) > 1]


def classes(path: Path) -> list[ast.ClassDef]:
    """All of a Python file, inner ones too."""
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]


def native_types(path: Path) -> int:
    """How many classes, structs, unions and enums with a name a C++ file defines."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return len(re.findall(r"\b(?:class|struct|union|enum(?:\s+class)?)\s+\w+[^;{}()<>]*\{", code))


def attributes(kind: ast.ClassDef) -> set[str]:
    """What a class stores in its objects. A frozen dataclass has none: it is a list of values."""
    if any("frozen=True" in ast.unparse(each) for each in kind.decorator_list):
        return set()
    found = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return found | {name for owner, name in _stores(kind) if owner == "self"}


def _stores(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Assigned attributes: the variable in front of the dot, empty if it is none, and the name behind it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.value.id if isinstance(node.value, ast.Name) else "", node.attr


def class_assignments(tree: ast.AST) -> int:
    return sum(name == "__class__" for _, name in _stores(tree))


def path_changes(path: Path) -> int:
    """How many statements of a Python file change where Python looks for modules, those in its strings included."""
    return len(CHANGES_THE_PATH.findall(path.read_text()))


def pinned(tree: ast.AST) -> set[str]:
    """Names of attributes that ringcomm keeps on objects of the user, or on their classes."""
    attrs = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in attrs | words if re.fullmatch(r"_ringcomm\w*", name)}


# ---- the path of a gradient --------------------------------------------------------------------------------------


def path_of_backward() -> list[str]:
    """Files of the package `ringcomm`, as imported, that run in a backward pass at stage 2, in the order of their first
    call; on the CPU engine, in the third step."""
    import torch

    import ringcomm

    package, found = Path(ringcomm.__file__).parent, dict[str, None]()

    def see(frame: object, event: str, _: object) -> None:
        file = frame.f_code.co_filename  # type: ignore[attr-defined]
        if event == "call" and Path(file).is_relative_to(package):
            found.setdefault(Path(file).relative_to(package.parent).as_posix())

    def rank(comm: ringcomm.Communicator) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ringcomm.shard(model, optimizer, 2, comm, units=torch.nn.Linear, bucket_cap_mb=0.001)
        for step in range(3):
            loss = model(torch.ones(2, 64)).sum()
            sys.setprofile(see if step == 2 and comm.rank == 0 else None)
            loss.backward()
            sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()

    ringcomm.run_ranks(rank, 2)
    return list(found)


def documented_path(root: Path) -> list[str]:
    """Files that docs/design.md names between ``loss.backward()`` and ``optimizer.step()``."""
    page = root / "docs" / "design.md"
    text = page.read_text() if page.exists() else ""
    section = re.search(r"^## The (?:path|route) of a gradient\n(.*?)^optimizer\.step", text, re.DOTALL | re.MULTILINE)
    if section is None:
        return []
    intro, _, block = section[1].partition("```")
    home = re.search(r"`(ringcomm/\w+/)`", intro)
    found = dict[str, None]()
    for name in re.findall(r"[\w/]+\.(?:py|h|cpp|cu)\b", block):
        folder = "" if name.startswith("csrc/") else "ringcomm/" if "/" in name else home[1] if home else ""
        found.setdefault(folder + name)
    return list(found)


def _gradient_files(root: Path) -> str:
    documented = documented_path(root)
    native = [name for name in documented if name.startswith("csrc/")]
    if not [*(root / "ringcomm").glob("_C*.so")]:
        return f"{len(documented)} in docs/design.md (not built)"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", __file__, "--backward"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        return f"{len(documented)} in docs/design.md (does not run)"
    python = done.stdout.split()
    return f"{len(python) + len(native)} ({len(python)} Python, {len(native)} C++)"


# ---- the figures -------------------------------------------------------------------------------------------------


def files(folder: Path, *suffixes: str) -> list[Path]:
    """Files below a folder with one of these suffixes, without what was built or installed there."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "build", "__pycache__")))
        found += [Path(here, name) for name in sorted(names) if name.endswith(suffixes)]
    return found


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def is_emulator(path: Path) -> bool:
    return "emulator" in path.parts


def long_lines(path: Path) -> int:
    """How many lines of prose in a Markdown file are over the limit: no code, and no row of a table, which cannot be
    broken."""
    text = re.sub(rb"^( *```).*?^\1", b"", path.read_bytes(), flags=re.DOTALL | re.MULTILINE)
    return sum(len(line) > COLUMNS and not line.lstrip().startswith(b"|") for line in text.splitlines())


def _lines_of_source(root: Path) -> str:
    native = [path for path in files(root / "csrc", *NATIVE) if not is_emulator(path.relative_to(root))]
    return f"{lines([*files(root / 'ringcomm', '.py'), *native]):,}"


def _types(root: Path) -> str:
    native = [path for path in files(root / "csrc", *NATIVE) if not is_emulator(path.relative_to(root))]
    python = sum(len(classes(path)) for path in files(root / "ringcomm", ".py"))
    return f"{python} / {sum(map(native_types, native))}"


def _circles(root: Path) -> str:
    found = circles(modules_of(root / "ringcomm"))
    return f"{len(found)} (largest {max(map(len, found))} files)" if found else "0"


def _folders(root: Path) -> str:
    counts = Counter(path.parent for path in files(root, ".py", ".pyi", *NATIVE))
    largest, count = max(counts.items(), key=lambda each: each[1])
    return f"{len([*(root / 'ringcomm').glob('*.py')])}; {count} files ({largest.relative_to(root)}/)"


def _liberties(root: Path) -> str:
    trees = [tree_of(path) for path in files(root / "ringcomm", ".py")]
    names = set[str]().union(*map(pinned, trees))
    changes = sum(map(path_changes, files(root, ".py")))
    return f"{changes}; {sum(map(class_assignments, trees))}; {len(names)}"


def _most_attributes(root: Path) -> str:
    kinds = [kind for path in files(root / "ringcomm", ".py") for kind in classes(path)]
    most = max(kinds, key=lambda kind: len(attributes(kind)))
    return f"{len(attributes(most))} ({most.name})"


def _prose(root: Path) -> str:
    pages = [path for path in files(root, ".md") if "results" not in path.parts]
    return f"{lines([root / 'README.md'])}; {sum(map(long_lines, pages))}"


def _lines_of_tests(root: Path) -> str:
    tests = files(root / "tests", ".py", *NATIVE)
    emulator = [path for path in files(root, *NATIVE) if is_emulator(path.relative_to(root))]
    return f"{lines({*tests, *emulator}):,}"


FIGURES: dict[str, Callable[[Path], str]] = {
    "source lines: `ringcomm/` and `csrc/` without the emulator": _lines_of_source,
    "Python classes / native types": _types,
    "files between `loss.backward()` at stage 2 and a peer's memory": _gradient_files,
    "import circles, all imports counted": _circles,
    "modules at the top of `ringcomm/`; largest folder": _folders,
    "`sys.path` changes; `__class__` assignments; attributes pinned on users' objects": _liberties,
    "most attributes of a class": _most_attributes,
    f"README lines; prose lines over {COLUMNS} columns": _prose,
    "test lines with the emulator": _lines_of_tests,
}


def table(trees: Mapping[str, Path]) -> str:
    """The figures of each tree as a Markdown table."""
    rows = [f"| | {' | '.join(trees)} |", f"|---|{'--:|' * len(trees)}"]
    rows += [f"| {name} | {' | '.join(count(root) for root in trees.values())} |" for name, count in FIGURES.items()]
    return "\n".join(rows)


def unpacked(commit: str, folder: Path) -> Path:
    """The tree of a commit, in a new folder."""
    at = folder / commit.replace("/", "_")
    words = ["git", "-C", str(ROOT), "archive", commit]
    done = subprocess.run(words, capture_output=True, timeout=60, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"house: got {commit!r}, expected a commit or a folder; git says: {done.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(at, filter="data")
    return at


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("trees", nargs="*", metavar="TREE", help="commits, or folders (the working tree)")
    p.add_argument("--backward", action="store_true", help="prints the Python files that a backward pass runs through")
    a = p.parse_args()
    if a.backward:
        print("\n".join(path_of_backward()))
        return
    with tempfile.TemporaryDirectory() as folder:
        names = a.trees or [str(ROOT)]
        trees = {name: Path(name).resolve() if Path(name).is_dir() else unpacked(name, Path(folder)) for name in names}
        print(table({"working tree" if root == ROOT else name: root for name, root in trees.items()}))


if __name__ == "__main__":
    main()
