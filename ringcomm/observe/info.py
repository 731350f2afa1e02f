"""`ringcomm doctor`: shows the features that were built, whether each is usable on this machine, and if not, why."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import textwrap
from dataclasses import asdict

from ringcomm import _C, __version__
from ringcomm.comm.nccl import facts as nccl_facts
from ringcomm.errors import REINSTALL
from ringcomm.observe import cuda
from ringcomm.observe.cuda import Fact
from ringcomm.terminal import columns


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _build() -> list[Fact]:
    info = dict(_C.build_info())
    return [
        Fact("build", "ringcomm", None, f"{__version__}, Python {platform.python_version()}, {platform.machine()}"),
        Fact("build", "compiler", None, f"{info.get('compiler', '?')}, {info.get('build_type', '?')}"),
        *(Fact("build", key, None, str(info[key])) for key in ("instruction_sets", "only") if key in info),
        cuda.build(),
        Fact("build", "dtypes", None, ", ".join(_C.DTYPES)),
        Fact("build", "reductions", None, ", ".join(_C.REDUCE_OPS)),
    ]


def _engines() -> list[Fact]:
    found = []
    try:
        engine = _C.Engine("cpu", 0, 1, 1000)
        engine.connect([engine.handle()])
        facts = engine.describe()
        engine.close()
        found.append(
            Fact("engines", "cpu", True, ", ".join(f"{key} {facts[key]}" for key in ("isa", "order") if key in facts))
        )
    except RuntimeError as error:
        found.append(Fact("engines", "cpu", False, str(error)))
    found.append(cuda.engine())
    found.append(Fact("engines", "nccl", *nccl_facts()))
    return found


def _backend() -> Fact:
    name = "torch.distributed 'ringcomm'"
    torch_version = _torch_version()
    if torch_version is None:
        return Fact("torch", name, False, "torch is not installed; pip install torch, then ringcomm again")
    try:
        import torch  # noqa: F401  its libraries must be there first

        from ringcomm import _c10d
    except ImportError as error:
        return Fact("torch", name, False, f"does not load beside torch {torch_version}: {error}; {REINSTALL}")
    built_for = _c10d.built_for
    fits = built_for.split(".")[:2] == torch_version.split(".")[:2]  # a patch release changes no interface
    text = f"built for torch {built_for}, torch {torch_version} is installed"
    return Fact("torch", name, fits, text if fits else f"{text}; {REINSTALL}")


def _gloo() -> list[Fact]:
    """Returns a warning about a torch whose Gloo has the receive check of before pytorch/gloo#509, else nothing."""
    version = _torch_version()
    if version is None or tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (2, 14):
        return []
    text = (
        f"torch {version} checks received sizes wrongly (pytorch/gloo#509), so whoever can connect to a rank can write "
        "into its memory; use torch 2.14 or newer, or a trusted network"
    )
    return [Fact("torch", "gloo between hosts", None, text)]


def _memory_limit() -> str:
    """Returns the limit of shared memory: the machine's, or the control group's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue
    return f"{total / (1 << 30):.1f} GiB"


def _shared_memory() -> Fact:
    """Checks the CPU engine's memory: an anonymous file that peers open through /proc."""
    try:
        fd = os.memfd_create("ringcomm-info", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        return Fact(
            "machine", "shared memory", False, f"memfd_create is refused ({error}); Linux 3.17 or newer is needed"
        )
    try:
        os.truncate(fd, 4096)
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
    except OSError as error:
        return Fact(
            "machine", "shared memory", False, f"/proc/<pid>/fd cannot be opened ({error}); ranks as threads still work"
        )
    finally:
        os.close(fd)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Fact(
        "machine",
        "shared memory",
        True,
        f"memfd, bounded by memory ({_memory_limit()}), {files} open files; /dev/shm is not used",
    )


def _machine() -> list[Fact]:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count()
    return [
        Fact("machine", "system", None, f"{platform.platform()}, {_distribution()}"),
        Fact("machine", "processor", None, processor()),
        Fact("machine", "cores", None, f"{usable} usable of {present}"),
        _shared_memory(),
        *(Fact("machine", name, None, value) for name, value in sorted(os.environ.items()) if _matters(name)),
    ]


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "of an unknown distribution"


def processor() -> str:
    """Returns the processor's name as the system has it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _matters(variable: str) -> bool:
    """Whether an environment variable may change what ringcomm does."""
    return variable.startswith(("RINGCOMM_", "NCCL_", "GLOO_")) or variable in (
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
    )


_PACKAGES = {"pynvml": "nvidia-ml-py"}  # packages whose names differ from their modules'


def _extras() -> list[Fact]:
    needed = {
        "matplotlib": "bench --plot; pip install 'ringcomm[plot]'",
        "pynvml": "the topology of several GPUs; pip install nvidia-ml-py",
        "rich": "tables and progress; pip install rich",
    }
    found = []
    for module, what in needed.items():
        there = importlib.util.find_spec(module) is not None
        version = importlib.metadata.version(_PACKAGES.get(module, module)) if there else ""
        found.append(Fact("extras", module, there, version if there else f"not installed, needed by {what}"))
    return found


def facts() -> list[Fact]:
    """
    Returns everything that `ringcomm doctor` prints.

    Returns: facts in the order of their sections. Creates no communicator and leaves nothing behind.
    """
    return [*_build(), *_engines(), *cuda.devices(), _backend(), *_gloo(), *cuda.libraries(), *_machine(), *_extras()]


def text(found: list[Fact]) -> str:
    """Returns the facts as plain lines, one section after another, for a terminal of any width."""
    width = columns()
    indent = 33 if width >= 100 else 6
    lines, section = [], ""
    for fact in found:
        if fact.section != section:
            section = fact.section
            lines.append(section)
        mark = {None: " ", True: "+", False: "-"}[fact.usable]
        name = f"{fact.name:<28s}" if indent > 6 else f"{fact.name}:"
        line = f"  {mark} {name} {fact.text}"
        lines += textwrap.wrap(line, width, subsequent_indent=" " * indent, replace_whitespace=False)
    return "\n".join([*lines, "", "+ usable   - not usable"])


def main(as_json: bool = False) -> int:
    """Prints the facts. Returns: 0 if the CPU engine is usable, else 1."""
    found = facts()
    if as_json:
        print(json.dumps([asdict(fact) for fact in found], indent=1))
    else:
        print(f"```\n{text(found)}\n```\nTo report a bug, paste this, your command and its output.")
    return int(not any(fact.usable for fact in found if fact.name == "cpu"))
