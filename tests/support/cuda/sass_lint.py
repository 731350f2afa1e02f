"""
Reads the machine code and PTX of compiled kernels: what no run on an emulated GPU can see.

    python -m tests.support.cuda.sass_lint FILE...  # objects, cubins or the installed _C: what is wrong with them

Needs cuobjdump and nvdisasm (``pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm``), no GPU. Written for sm_80 and
sm_90 as nvcc 13 makes them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
POLL = re.compile(r"LDG?\.E\.64\.STRONG\.SYS$")
POST = re.compile(r"STG?\.E\.64\.STRONG\.SYS$")
BARRIER = re.compile(r"BAR\.\S+ 0x([0-9a-f]+), (R\d+, )?")  # with what it is given: its number, how many threads
POSTING_WARP = re.compile(r"\d(ring|ring_copy|send_and_receive)(I\w+|E)")
PTX_WORD = re.compile(r"\b(?:ld|st|membar|fence|atom|red)\.[a-z0-9_.]+")
PTX_FORBIDDEN = re.compile(r"\.nc\b|\.cta\b|\.gpu\b|\.cluster\b|\.local\b|^membar|^fence")


def tool(name: str) -> str | None:
    """Path of a tool of the CUDA toolkit: of PATH, of CUDA_HOME, or of a wheel."""
    homes = [os.path.join(home, "bin") for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    wheels = importlib.util.find_spec("nvidia")
    folders = [
        str(path)
        for each in (wheels.submodule_search_locations or [] if wheels else [])
        for path in sorted(Path(each).glob("cu*/bin"))
    ]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *homes, *folders]))


def missing_tools(*names: str) -> str:
    """Empty, or what to install."""
    missing = [name for name in names if tool(name) is None]
    return (
        f"needs {' and '.join(missing)}: pip install {' '.join('nvidia-cuda-' + name for name in missing)}"
        if missing
        else ""
    )


def run(name: str, *words: str | Path) -> str:
    path = tool(name)
    assert path is not None, missing_tools(name)
    beside = os.pathsep.join([os.path.dirname(tool("nvdisasm") or ""), os.environ.get("PATH", "")])
    command = [path, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": beside})
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-2000:]}"
    return done.stdout


@dataclass
class Kernel:
    name: str
    arch: str
    ops: list[str] = field(default_factory=list)  # with operands
    address: list[int] = field(default_factory=list)

    @functools.cached_property
    def words(self) -> list[str]:
        """The operations without their operands."""
        return [op.split(None, 1)[0] for op in self.ops]


def disassemble(path: Path, arch: str, functions: list[str] | None = None) -> list[Kernel]:
    """The kernels of a file for one architecture, such as sm_90; `functions`: the mangled names that are wanted."""
    chosen = ["-fun", ",".join(functions)] if functions else []
    found: list[Kernel] = []
    for line in run("cuobjdump", "-sass", "-arch", arch, *chosen, path).splitlines():
        if "Function :" in line:
            found.append(Kernel(line.partition("Function :")[2].strip(), arch))
        elif found and ";" in line and (match := INSTRUCTION.match(line)):
            found[-1].address.append(int(match[1], 16))
            found[-1].ops.append((match[2] + match[3]).strip())
    return found


def resources(path: Path) -> dict[tuple[str, str], dict[str, int]]:
    """(arch, kernel) -> REG, STACK, SHARED, LOCAL ... of all kernels of a file."""
    found, arch, name = {}, "", ""
    for line in run("cuobjdump", "-res-usage", path).splitlines():
        if match := re.search(r"arch = (sm_\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            found[arch, name] = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
    return found


def loops(kernel: Kernel) -> list[tuple[int, int]]:
    """(first, last) instruction of what lies between a backward branch and its target."""
    at = {address: i for i, address in enumerate(kernel.address)}
    found = []
    for i, op in enumerate(kernel.ops):
        target = re.search(r"0x([0-9a-f]+)$", op) if op.startswith("BRA") else None
        if target and int(target[1], 16) in at and at[int(target[1], 16)] <= i:
            found.append((at[int(target[1], 16)], i))
    return found


def loads_in_flight(kernel: Kernel) -> int:
    """The longest run of wide loads before a store: of 16 bytes, or of 8 where the other side has 16."""
    longest = run_length = 0
    for word in kernel.words:
        if word in ("LDG.E.128", "LDG.E.64"):
            run_length += 1
        elif word.startswith("STG.E") and "STRONG" not in word:
            longest, run_length = max(longest, run_length), 0
    return longest


def lint(kernel: Kernel) -> list[str]:
    """What is wrong with the machine code of a kernel."""
    words, bad = kernel.words, []
    kinds = Counter(words)  # tens of thousands of instructions are of some hundred kinds
    if count := sum(kinds[word] for word in kinds if word.startswith(("LDL", "STL"))):
        bad.append(f"local memory: {count} loads and stores")
    cached = {word for word in kinds if ".CONSTANT" in word}
    # the once-only word of a rank is among blocks of its own device
    narrow = {w for w in kinds if re.search(r"STRONG\.(GPU|SM|CTA)", w) and not re.match(r"ATOMG?\.E\.CAS\.64", w)}
    posts = {word for word in kinds if POST.match(word)}
    for i, word in enumerate(words):
        if word in cached:
            bad.append(f"data through the read-only cache: {kernel.ops[i]}")
        if word in narrow:
            bad.append(f"scope narrower than the system: {kernel.ops[i]}")
        if word in posts and not any(before.startswith("MEMBAR.ALL.SYS") for before in words[max(0, i - 6) : i]):
            bad.append(f"a flag is stored without a MEMBAR.ALL.SYS before it: {kernel.ops[i]}")
    at_barriers = (BARRIER.match(op) for op in kernel.ops if op.startswith("BAR"))
    barriers = {(int(match[1], 16), bool(match[2])) for match in at_barriers if match}
    if (0, True) in barriers or any(number and not counted for number, counted in barriers):
        bad.append(f"a barrier of the wrong threads: (number, with a count) {sorted(barriers)}")
    if POSTING_WARP.search(kernel.name) and (1, True) not in barriers:
        bad.append("no barrier of the workers alone: they wait for the fence of the posting warp")
    # packets carry their flags with them: oneshot looks at no others but those that stop it
    polls = {word for word in kinds if POLL.match(word)}
    if polls and "oneshot" not in kernel.name and "CCTL.IVALL" not in kinds:
        bad.append("no wait acquires: there is no CCTL.IVALL")
    for first, last in loops(kernel):
        body = words[first : last + 1]
        works = any(word.startswith(("BAR.", "LDG.E.128", "STG.E.128")) for word in body)
        if not polls.isdisjoint(body) and not works and "CCTL.IVALL" in body:
            bad.append("a wait acquires at every look: CCTL.IVALL inside its loop")
    return bad


def lint_ptx(text: str) -> list[str]:
    """What is wrong with PTX."""
    words = Counter(PTX_WORD.findall(text))
    return [f"PTX: {count} x {word}" for word, count in sorted(words.items()) if PTX_FORBIDDEN.search(word)]


def main() -> int:
    status = 0
    for path in map(Path, sys.argv[1:]):
        for kernel in disassemble(path, "sm_90"):
            bad = lint(kernel)
            status |= bool(bad)
            print(f"{kernel.name}: {loads_in_flight(kernel)} loads in flight; {'; '.join(bad) or 'ok'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
