"""Hooks of mkdocs and griffe for the documentation site (mkdocs.yml).

The site has the repository's own Markdown files under their own paths, so the links between them are the same there and
on a code host. The API pages come from the list of public names, their text from the docstrings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "benchmarks/README.md",
    "benchmarks/results/*",
    "release/pages.css",
    "release/matrix.py",
    "examples/rpc.py",
    "examples/slurm.sh",
    "examples/survive.py",
    "examples/train_gpt.py",
)
"""The files that are on the site; a link to any other is an error."""
NOTEBOOK = "examples/four_ranks.ipynb"
API = {
    "communicators": ("Communicators", ("comm", "_C")),
    "errors": ("Errors", ("errors",)),
    "data_parallel": ("Data parallelism", ("data_parallel", "modules")),
    "tensor_parallel": ("Tensor parallelism", ("tensor_parallel",)),
    "pipeline_parallel": ("Pipeline parallelism", ("pipeline_parallel",)),
    "context_parallel": ("Context parallelism", ("context",)),
    "mesh": ("Meshes", ("comm.mesh",)),
    "checkpoint": ("Checkpoints", ("checkpoint",)),
    "observe": ("Metrics, records, traces", ("observe",)),
    "simulate": ("Simulator", ("tools",)),
}
"""Each page of the API: its title, and the folders or modules of ``ringcomm`` whose public names it shows."""


@cache
def public_names() -> dict[str, str]:
    """Returns the full path of each public name."""
    lines = (ROOT / "ringcomm" / "__init__.pyi").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line.startswith("from ")]
    return {name: f"{home}.{name}" for _, home, _, _, _, name in words}


# ---- mkdocs ------------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the files of each pattern of the navigation."""
    config.nav = _expanded(config.nav)
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(below) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_expanded(below) for below in entry]
    if entry == "api/*.md":
        return [f"api/{page}.md" for page in API]
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(entry)) if "*" in entry else entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by those that are shown, under their paths in the repository, and adds pages."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(
        {path for pattern in SHOWN for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".log"}
    ):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    pages = {f"api/{page}.md": _api_page(*about) for page, about in API.items()}
    pages[NOTEBOOK.replace(".ipynb", ".md")] = _notebook_page(ROOT / NOTEBOOK)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def _api_page(title: str, floors: tuple[str, ...]) -> str:
    names = [name for name, path in public_names().items() if _floor(path) in floors]
    names.sort(key=lambda name: (_is_module(public_names()[name]), floors.index(_floor(public_names()[name]))))
    return f"# {title}\n\n" + "\n\n".join(map(_api_entry, names))


def _floor(path: str) -> str:
    """Returns the innermost folder or module of API that has a public name."""
    below = f"{path.removeprefix('ringcomm.')}."
    known = (floor for _, floors in API.values() for floor in floors)
    return max((floor for floor in known if below.startswith(f"{floor}.")), key=len, default="")


def _api_entry(name: str) -> str:
    """Returns the directive for a name. A module whose members are public names themselves is shown without them."""
    inside = [path for path in public_names().values() if path.rpartition(".")[0] == public_names()[name]]
    return f"::: ringcomm.{name}" + ("\n    options:\n      members: false" if len(inside) > 1 else "")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Makes the names of the API links, and links the notebook's page in the place of its file."""
    prose_and_code = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(prose_and_code), 2):
        linked = _CALL.sub(_call_link, prose_and_code[i])
        prose_and_code[i] = linked.replace(f"{Path(NOTEBOOK).name})", f"{Path(NOTEBOOK).stem}.md)")
    return "".join(prose_and_code)


_CALL = re.compile(r"(?<!\[)`(ringcomm|comm)\.(\w+)(?:\([^`]*\))?`(?!\])")


def _call_link(found: re.Match[str]) -> str:
    home, name = found[1], found[2]
    if home == "comm":
        return f"[{found[0]}][ringcomm.Communicator.{name}]" if name in _methods() else found[0]
    return f"[{found[0]}][ringcomm.{name}]" if name in public_names() else found[0]


@cache
def _methods() -> set[str]:
    source = (ROOT / "ringcomm" / "comm" / "communicator.py").read_text(encoding="utf-8")
    return set(re.findall(r"^    def ([a-z]\w*)\(", source, re.MULTILINE))


def _is_module(path: str) -> bool:
    at = ROOT.joinpath(*path.split("."))
    return at.is_dir() or at.with_suffix(".py").is_file()


def _notebook_page(path: Path) -> str:
    """Returns a notebook as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed}```")
    return "\n\n".join(parts)


# ---- griffe ------------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"((?:Args|Attributes|Shapes|Dtypes|Order|Cost|Returns|Raises|Source)(?:, [a-z]+)*):(?:\s+(.*))?")
_ENTRY = re.compile(r"    ([*\w]+(?:, [*\w]+)*): (.*)")
_NAME = re.compile(r"``.*?``|`([\w.]+)`|\b[A-Z]\w+Error\b")


class Docstrings(griffe.Extension):
    """Turns the sections of docstrings into Markdown, and the names of what the site shows into links."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(_markdown(obj.docstring.value, obj))


def _markdown(text: str, obj: griffe.Object) -> Iterator[str]:
    section = ""
    for line in text.split("\n"):
        if found := _SECTION.fullmatch(line):
            section = found[1]
            yield f"\n**{section}:** {_linked(found[2] or '', obj)}\n"[: None if found[2] is None else -1]
        elif section in ("Args", "Attributes") and (entry := _ENTRY.fullmatch(line)):
            yield f"- `{entry[1]}`: {_linked(entry[2], obj)}"
        elif section and line.startswith("    "):
            yield f"    {_linked(line.strip(), obj)}"
        else:
            section = section if not line else ""
            yield line if line.startswith("    ") else _linked(line, obj)


def _linked(text: str, obj: griffe.Object) -> str:
    return _NAME.sub(lambda found: _link(found, obj), text)


def _link(found: re.Match[str], obj: griffe.Object) -> str:
    name = (found[1] or found[0]).removeprefix("ringcomm.")
    if name.split(".")[0] in public_names() and name.count(".") < 2:
        return f"[`{name}`][ringcomm.{name}]"
    home = obj if obj.is_class or obj.is_module else obj.parent
    if home is None or not (home.is_class or home.path in public_names().values()) or name not in home.members:
        return found[0]
    member = home.members[name]
    has_entry = name in (home.exports or ()) if member.is_alias else member.has_docstring and not member.is_module
    return f"[`{name}`][{home.path}.{name}]" if has_entry else found[0]
