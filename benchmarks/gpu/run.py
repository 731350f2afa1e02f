"""
Everything that needs a GPU, in one command and under ten minutes: `make gpu`. What takes longer: `make gpu-more`.

    python -m benchmarks.gpu.run [--more] [--only STAGE ...] [--skip STAGE ...] [--seconds 590] [--out FILE]

Stages, the most telling first: facts about the machine; the build for its GPU alone, and a probe of the GPU beside it;
smoke: does each path work at all; the headline of the benchmark; the tests, a process for each file; the rest of the
benchmark; a checker of memory and a profiler, where these programs are; the tests that depend least on the GPU. It
takes what this Python has (no network: torch 2.11 or newer, CMake, Ninja, setuptools, pytest; pybind11 or torch's copy
of it; nvcc); where something is missing, it ends behind the facts and says what to install. RINGCOMM_NCCL names a
libnccl (2.30.3 or newer) to measure beside.

Each stage has a time limit, what is left of the whole bounds it too, and the next one runs whatever came of it. A
process that loses the GPU is followed by another, which goes on behind the place. What is found is in FILE (gpu.json)
as soon as it is found, gpu.md shows it as tables, and what the stages print is in a few .log files beside them. FILE is
in the folder $OUT where that is set, else in benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.document import LOST, ROOT, Document, default_path
from benchmarks.gpu.machine import missing, program

SECONDS = 590.0
LEAST_S = 5.0  # a stage with less time than this is left out
MOST_STARTS = 4  # of a stage that loses its process


@dataclass(frozen=True)
class Stage:
    """A command under a time limit. In its words {seconds} stands for the time that it has."""

    name: str
    limit_s: float
    words: list[str]
    log: str  # stages may share one
    part: str = ""  # of the document, where it notes each piece: what a lost process leaves goes to another one
    needs: str = ""  # a program
    environment: dict[str, str] = field(default_factory=dict)
    beside: Stage | None = None  # runs at the same time


# ---- the stages ------------------------------------------------------------------------------------------------------


def script(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gpu.{name}", *words]


def build(capability: str, out: str) -> Stage:
    """The build leaves the probe its core: the probe times launches."""
    words = ["nice", "-n", "5", sys.executable, "setup.py", "build_ext", "--inplace"]
    told = {"RINGCOMM_CUDA_ARCHS": os.environ.get("RINGCOMM_CUDA_ARCHS") or capability, "RINGCOMM_CUDA": "ON"}
    told |= {"RINGCOMM_NVCC": program("nvcc")}
    probe = Stage("probe", 90, script("probe", capability or "native", "--out", out), "machine")
    return Stage("build", 200, words, "build", environment=told, beside=probe)


def tests(name: str, limit_s: float, marks: str) -> Stage:
    """The tests of one file. A limit is raised as an exception where that can be, and the file's next test runs."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", "-v", "-rs"]
    words += ["--timeout-method=signal", "-m", marks, f"tests/gpu/test_gpu_{name}.py"]
    return Stage(f"tests: {name}", limit_s, words, "tests", part="tests")


def stages(capability: str, out: str) -> list[Stage]:
    """`make gpu`."""
    usual, keep = "not slow and not more", ["--out", out]
    smoke, bench = script("smoke", *keep), script("bench", *keep, "--resume", "--seconds", "{seconds}")
    sanitizer = [program("compute-sanitizer"), "--tool", "memcheck", "--error-exitcode", "9"]
    ncu = [
        program("ncu"),
        "--clock-control",
        "none",
        "--kernel-name",
        "regex:direct|known|ring",
        "--launch-count",
        "6",
    ]
    ncu += [word for name in ("SpeedOfLight", "LaunchStats", "Occupancy") for word in ("--section", name)]
    return [
        build(capability, out),
        Stage("smoke", 60, [*smoke, "--resume"], "smoke", part="smoke"),
        Stage("headline", 100, [*bench, "--only", "headline"], "bench", part="cells"),
        tests("streams", 40, usual),
        tests("stress", 60, usual),
        tests("bits", 80, usual),
        tests("conversions", 20, usual),
        tests("libraries", 90, usual),
        tests("ranks", 60, usual),
        tests("devices", 150, usual),
        tests("memory", 90, usual),
        Stage("benchmark", 140, bench, "bench", part="cells"),
        Stage(
            "sanitizer", 60, [*sanitizer, *smoke, "--few", "--part", "sanitizer"], "tools", needs="compute-sanitizer"
        ),
        Stage("profile", 45, [*ncu, *script("bench", "--profile", *keep)], "tools", needs="ncu"),
        *(tests(name, 100, usual) for name in ("nccl", "parallel", "training")),
    ]


def more_stages(capability: str, out: str) -> list[Stage]:
    """`make gpu-more`."""
    tune = [sys.executable, "-m", "ringcomm", "tune", "all_reduce", "-g", "2,4", "--device", "cuda:0", "-f", "16"]
    tune += ["--threads", "0", "--rounds", "3", "-o", str(Path(out).with_suffix(".tuning"))]
    types = script("bench", "--out", out, "--resume", "--seconds", "{seconds}", "--only", "types")
    return [
        build(capability, out),
        tests("bits", 180, "more"),
        tests("ranks", 120, "more"),
        tests("memory", 60, "more"),
        tests("nccl", 80, "not slow"),
        tests("training", 80, "not slow"),
        tests("parallel", 80, "not slow"),
        Stage("types", 60, types, "bench", part="cells"),
        Stage("tune", 100, tune, "bench", environment={"RINGCOMM_CUDA_APART": "1"}),
    ]


# ---- running them ----------------------------------------------------------------------------------------------------


class Runner:
    """Runs stages one after the other, and what one has beside it at the same time."""

    def __init__(self, document: Document, seconds: float) -> None:
        self.document, self.deadline = document, time.monotonic() + seconds
        document.path.parent.mkdir(parents=True, exist_ok=True)
        self.running: set[subprocess.Popen[str]] = set()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "4",
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
            "RINGCOMM_GPU_OUT": str(document.path),  # for the tests
        }

    def run(self, stage: Stage) -> None:
        """Runs one, and keeps what came of it."""
        thread = threading.Thread(target=self.run, args=(stage.beside,)) if stage.beside is not None else None
        if thread is not None:
            thread.start()
        started = time.monotonic()
        try:
            said = self.outcome(stage, started)
        except Exception as error:
            said = f"FAILED: {type(error).__name__}: {error}"
        said = f"{said}, {time.monotonic() - started:.0f} s"
        self.document.put("stages", {stage.name: said})
        self.say(stage, f"== {stage.name}: {said}\n")
        if thread is not None:
            thread.join()

    def outcome(self, stage: Stage, started: float) -> str:
        """What comes of its processes, one after the other as long as they are lost."""
        if stage.needs and not program(stage.needs):
            return f"left out: {stage.needs} was not found"
        lost = 0
        while (left := self.deadline - time.monotonic()) >= LEAST_S and lost < MOST_STARTS:
            left = min(left, max(1.0, started + stage.limit_s - time.monotonic()))
            noted = len(self.document.part(stage.part))
            pid, status = self.process(stage, left)
            if status is None:
                self.document.bury(stage.part, f"{stage.name} was not done within {left:.0f} s")
                return f"FAILED: not done within {left:.0f} s"
            self.document.bury(stage.part, f"the process ended with status {status} within it")
            ended = self.document.part("ended").get(stage.part) == pid
            if stage.part and (status == LOST or (not ended and len(self.document.part(stage.part)) > noted)):
                lost += 1
            elif lost:
                return f"FAILED: after {lost} lost processes another ended with status {status}"
            else:
                return "ok" if status == 0 else f"FAILED with status {status}"
        return f"FAILED: each of {lost} processes was lost" if lost else "left out: the time was up"

    def process(self, stage: Stage, limit_s: float) -> tuple[int, int | None]:
        """Runs the command and everything that it starts; its number and its status, None where it was still running
        at the limit."""
        words = [word.replace("{seconds}", f"{limit_s - min(5, limit_s / 4):.0f}") for word in stage.words]
        self.say(stage, f"\n== {stage.name}, at most {limit_s:.0f} s: {' '.join(words)}\n")
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**self.environment, **stage.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.running.add(process)
        reader = threading.Thread(target=self.pass_on, args=(stage, process), daemon=True)
        reader.start()
        try:
            return process.pid, process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return process.pid, None
        finally:
            self.kill(process)
            reader.join(2)

    def pass_on(self, stage: Stage, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.say(stage, line)

    def say(self, stage: Stage, text: str) -> None:
        """Prints, and appends to the log."""
        print(text, end="", flush=True)
        path = self.document.path
        with open(path.with_name(f"{path.stem}-{stage.log}.log"), "a", encoding="utf-8") as log:
            log.write(text)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Nothing that it started outlives it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)  # one that is stuck in the driver stays
        self.running.discard(process)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Whatever ends this, its stages end too and the tables are written."""
        try:
            yield
        finally:
            for process in list(self.running):
                self.kill(process)
            self.write_tables()

    def write_tables(self) -> None:
        try:
            report.write(self.document.path)
        except Exception as error:
            print(f"the tables could not be written: {type(error).__name__}: {error}", flush=True)


def run_all(more: bool, only: list[str], skip: list[str], runner: Runner) -> int:
    """All stages; 1 where one failed, 2 where those behind the facts lack something."""
    out = str(runner.document.path)
    wanted = [Stage("facts", 40, script("machine", "--out", out), "machine")]
    with runner.ending():
        while wanted:
            stage = wanted.pop(0)
            kind = stage.name.partition(":")[0]
            if kind not in skip and (not only or kind in only):
                runner.run(stage)
                runner.write_tables()
            if stage.name == "facts":
                if (lacks := missing()) and only != ["facts"]:
                    runner.document.put("failed", {"machine": lacks})
                    print(lacks, file=sys.stderr)
                    return 2
                capability = runner.document.part("facts").get("capability", "")
                wanted = (more_stages if more else stages)(capability, out)
    came = runner.document.part("stages")
    print("\n== " + "\n== ".join(f"{name}: {said}" for name, said in came.items()), flush=True)
    return int(any("FAILED" in said for said in came.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more", action="store_true", help="the stages of make gpu-more")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these stages alone; tests: all files")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STAGE", help="stages to leave out")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--out", type=Path, help="gpu.json, wherever it is; gpu-more.json with --more")
    a = parser.parse_args()
    document = Document((a.out or default_path("gpu-more" if a.more else "gpu")).resolve())
    for old in [document.path, *document.path.parent.glob(f"{document.path.stem}-*.log")]:
        old.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit around all: ends the stage too
    return run_all(a.more, a.only, a.skip, Runner(document, a.seconds))


if __name__ == "__main__":
    sys.exit(main())
