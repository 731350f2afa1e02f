"""Measures what signatures, call sites and records of calls cost in the smallest all_reduces of 2 processes, called
from Python.

    python -m benchmarks.overhead.signatures [--turns 81] [--rounds 8] [--write]

Builds of this source take turns: one without the lines of csrc/cpu/collectives/slot_stream.cpp that send, compare and
log signatures (their contents are still prepared), one with them, one that also looks up each call's place in the
user's code, and one with the flight recorder, too, which is the unchanged package. Needs the build/ of an installation
from this folder.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.overhead.builds import ROOT, Build, end, in_turns, machine, ratio, times

RESULT = ROOT / "benchmarks" / "results" / "signatures.md"
SIZES = {8: 200, 1024: 200}  # bytes: calls per turn
LINES = (  # of slot_stream.cpp
    "  group.begin_call(call, signature_);\n",
    "    header->signature = signature_;\n",
    "  if (!(header_of(peer).signature == signature_)) group_.report_mismatch();\n",
    "  if (num_checked_ + 1 < group_.world_size()) group_.compare_calls();",
    "  progress_.history = signature_.hash();\n",
)
PLACE = "const char* python_site() {\n"
NINJA = [sys.executable, "-m", "ninja", "-C"]
Edit = Callable[[str], str]


def without_signatures(stage: str) -> str:
    for line in LINES:
        if stage.count(line) != 1:
            sys.exit(f"signatures.py: expected once {line.strip()!r} in slot_stream.cpp, got {stage.count(line)}")
        stage = stage.replace(line, "")
    return stage


def without_places(site: str) -> str:
    if site.count(PLACE) != 1:
        sys.exit(f"signatures.py: expected once {PLACE.strip()!r} in site.cpp, got {site.count(PLACE)}")
    return site.replace(PLACE, PLACE + '  return "";\n')


def once(pattern: str, by: str, text: str) -> str:
    changed, times_found = re.subn(pattern, by, text)
    if times_found != 1:
        sys.exit(f"signatures.py: expected once {pattern} in {text}, got {times_found}")
    return changed


def built() -> Path:
    """Returns the folder of the installation, which must be of these sources."""
    libraries = sorted(ROOT.glob("build/*/libringcomm_core.a"), key=lambda path: path.stat().st_mtime)
    if not libraries:
        sys.exit("signatures.py: expected build/*/libringcomm_core.a, got none; install ringcomm from this folder")
    build = libraries[-1].parent
    # Does nothing if the build is current.
    subprocess.run([*NINJA, str(build), "_C"], stdout=subprocess.DEVNULL, check=True)
    modules = [next(folder.glob("_C.*.so")).read_bytes() for folder in (build, ROOT / "ringcomm")]
    if modules[0] != modules[1]:
        sys.exit("signatures.py: expected an installation of these sources, got an older one; install it again")
    return build


def changed_build(folder: Path, edits: dict[str, Edit]) -> Path:
    """Returns a folder with a package whose _C is built from these changed sources; everything else is from the
    installation."""
    build, package = built(), folder / "ringcomm"
    words = [*NINJA, str(build), "-t", "commands", "_C"]
    commands = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    shutil.copytree(ROOT / "ringcomm", package)
    link, objects = once(r"-o (_C\S+)", rf"-o {package}/\1", commands[-1]), []
    for name, edit in edits.items():
        source, copy, output = ROOT / name, folder / Path(name).name, folder / f"{Path(name).stem}.o"
        copy.write_text(edit(source.read_text()))
        compile_it = next(command for command in commands if command.endswith(f"-c {source}"))
        compile_it = once(r"-MD -MT \S+ -MF \S+ -o \S+ -c \S+", f"-o {output} -c {copy}", compile_it)
        subprocess.run(compile_it, shell=True, cwd=build, check=True)
        # An unchanged library's object is left out by the linker itself.
        link = re.sub(rf"\S+/{re.escape(name)}\.o", "", link)
        objects.append(str(output))
    link = link.replace(" libringcomm_core.a", f" {' '.join(objects)} libringcomm_core.a", 1)
    subprocess.run(link, shell=True, cwd=build, check=True)
    return folder


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=81, help="of each round")
    parser.add_argument("--rounds", type=int, default=8, help="each with new processes: where memory lies matters")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.relative_to(ROOT)}")
    a = parser.parse_args()
    us: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        places: dict[str, Edit] = {"csrc/bind/module/site.cpp": without_places}
        (folder / "bare").mkdir()
        (folder / "signed").mkdir()
        bare = changed_build(folder / "bare", {"csrc/cpu/collectives/slot_stream.cpp": without_signatures, **places})
        signed = changed_build(folder / "signed", places)
        for number in range(a.rounds):
            builds = {
                "without": Build(f"without {number}", bare, "processes", made, RINGCOMM_RECORD="0"),
                "signatures": Build(f"signatures {number}", signed, "processes", made, RINGCOMM_RECORD="0"),
                "and places": Build(f"places {number}", ROOT, "processes", made, RINGCOMM_RECORD="0"),
                "and records": Build(f"records {number}", ROOT, "processes", made),
            }
            for nbytes, calls in SIZES.items():
                new = in_turns([(name, build, False) for name, build in builds.items()], nbytes, calls, a.turns)
                for name in new:
                    us.setdefault((nbytes, name), []).extend(new[name])
            end(builds.values())
    table = [
        f"| {nbytes} | {name} | {times(us[nbytes, name])} | {ratio(us[nbytes, name], us[nbytes, 'without'])} |"
        for nbytes, name in us
    ]
    text = "\n".join(
        (
            "# What signatures and records cost\n",
            "all_reduce of 2 processes, float32, called from Python: microseconds of a call, median of "
            f"{a.rounds} x {a.turns} turns / their fastest tenth, and within a turn the ratio to that without "
            f"signatures, median [quartiles]. {machine()}\n",
            f"`python -m benchmarks.overhead.signatures --turns {a.turns} --rounds {a.rounds}`\n",
            "| bytes | | µs | ratio |\n|---|---|---|---|",
            *table,
            "",
        )
    )
    print(text)
    if a.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
