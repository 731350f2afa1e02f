"""Runs torch's own distributed test suites with Gloo and with ringcomm, and lists the tests that pass only with one.

    python -m benchmarks.collectives.conformance --log FILE
    python -m benchmarks.collectives.conformance --log FILE --torch-tests FOLDER
    python -m benchmarks.collectives.conformance --log FILE --suite distributed_test -k all_gather --backend ringcomm
    python -m benchmarks.collectives.conformance --log FILE --report --write

The first command runs the suite in torch's wheel on 2 to 8 ranks, the second also files of torch's test/distributed in
FOLDER, and the last writes results/conformance.md from what is in the log.

FILE gets a line for every completed test. Completed tests are not run again, so an interrupted run can be continued.
FOLDER is a checkout of test/distributed, preferably of the installed torch version. Exit status 1 if a test passes with
Gloo and not with ringcomm, and the reason is not in EXPLAINED.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.collectives.conformance_run import DISTRIBUTED_TEST, GLOO, IMPORT, Job, Record, serve

RESULTS = Path(__file__).resolve().parents[1] / "results"
OURS = "ringcomm"
WORLDS = (2, 3, 4, 8)
FILES = (  # those files of test/distributed in which some tests run processes on CPUs
    "_composable/fsdp/test_fully_shard_init.py",
    "_composable/fsdp/test_fully_shard_state_dict.py",
    "_composable/fsdp/test_fully_shard_training.py",
    "algorithms/test_join.py",
    "optim/test_zero_redundancy_optimizer.py",
    "test_c10d_object_collectives.py",
    "test_collective_utils.py",
    "test_functional_api.py",
    "test_c10d_functional_native.py",
    "test_device_mesh.py",
    "pipelining/test_stage.py",
    "pipelining/test_schedule_multiproc.py",
    "_tensor/test_redistribute.py",
    "_tensor/test_dtensor.py",
    "_tensor/test_[!dorx]*.py",
    "_tensor/test_[or]*s.py",
    "tensor/test_dtensor.py",
    "tensor/test_[!dorx]*.py",
    "tensor/test_[or]*s.py",
    "tensor/parallel/test_tp_*.py",
    "tensor/parallel/test_parallelize_api.py",
    "checkpoint/test_file_system_checkpoint_cpu.py",
    "checkpoint/test_[!f]*.py",
    "_composable/test_replicate.py",
    "_composable/test_composability/test_*.py",
    "_shard/*/test_*.py",
    "test_c10d_common.py",
)
EXPLAINED = {  # pattern of a test's name: the reason why only Gloo can pass it
    "test_barrier_timeout_*": "asserts the words of Gloo's message; the timeout itself is right",
    "test_monitored_barrier_gloo_rank_0_timeout": "asserts the words of Gloo's message, for a limit of 0 s",
    "test_monitored_barrier_*": "torch asks for a group named gloo",
    "test_*_thread_count_[12]": "torch's ShardedTensor.gather wants CUDA of any backend but Gloo that serves CUDA too",
    "test_ddp_logging_data_cpu": "torch logs any backend that is not its own as 'custom'",
}


def jobs(a: argparse.Namespace) -> list[Job]:
    """Returns the jobs in the order in which they run: each suite with Gloo, then with ringcomm."""
    files: dict[str, None] = {}
    for pattern in FILES if a.torch_tests else ():
        files |= dict.fromkeys(str(path.relative_to(a.torch_tests)) for path in sorted(a.torch_tests.glob(pattern)))
    suites = [(DISTRIBUTED_TEST, ranks) for ranks in a.ranks] + [(file, 0) for file in files]
    chosen = [(suite, ranks) for suite, ranks in suites if fnmatch.fnmatch(suite, a.suite)]
    return [Job(suite, ranks, backend) for suite, ranks in chosen for backend in a.backend or (GLOO, OURS)]


def read(log: Path) -> list[Record]:
    """Returns the completed tests, the newest result of each."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    records = [Record(**json.loads(line)) for line in lines]
    return list({(r.suite, r.ranks, r.backend, r.test): r for r in records}.values())


def run(a: argparse.Namespace) -> None:
    """Runs each job in a process of its own, because torch is imported there for the job's backend and number of
    ranks."""
    for job in jobs(a):
        done = {r.test for r in read(a.log) if (r.suite, r.ranks, r.backend) == (job.suite, job.ranks, job.backend)}

        def wanted(test: str, done: set[str] = done) -> bool:
            return (test == IMPORT or re.search(a.k, test) is not None) and not done & {test, IMPORT}

        process = multiprocessing.get_context("fork").Process(
            target=serve, args=(job, a.torch_tests, a.limit_s, wanted, a.log)
        )
        process.start()
        process.join()


def lost(records: Iterable[Record]) -> list[Record]:
    """Returns ringcomm's records of the tests that pass with Gloo and not with ringcomm."""
    by_test = {(r.suite, r.ranks, r.test, r.backend): r for r in records}
    passed = [(*key[:3], OURS) for key, r in by_test.items() if key[3] == GLOO and r.outcome == "passed"]
    return [by_test[key] for key in passed if key in by_test and by_test[key].outcome != "passed"]


def explanation(record: Record) -> str:
    """Returns the reason why a test is lost, or ""."""
    name = record.test.split(".")[-1]
    return next((why for pattern, why in EXPLAINED.items() if fnmatch.fnmatch(name, pattern)), "")


def report(records: list[Record], note: str) -> str:
    """Returns the table and the lists, in Markdown."""
    from importlib.metadata import version

    files = " --torch-tests FOLDER" if any(r.suite != DISTRIBUTED_TEST for r in records) else ""
    lines = [
        "# torch's own tests, with Gloo and with ringcomm",
        "",
        f"`python -m benchmarks.collectives.conformance --log FILE{files}`, torch {version('torch')}. {note}".rstrip(),
        "",
        "Passed / failed / skipped. *In groups*: those that pass with ringcomm and make a process group of it; the "
        "rest test no communication. *Lost*: those that pass with Gloo and not with ringcomm.",
        "",
        "| suite | ranks | tests | Gloo | ringcomm | in groups | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for suite, ranks in dict.fromkeys((r.suite, r.ranks) for r in records):
        of_suite = [r for r in records if (r.suite, r.ranks) == (suite, ranks) and r.test != IMPORT]
        if of_suite:
            lines.append(row(suite, str(ranks or "each its own"), of_suite))
    lines.append(row("**all**", "", [r for r in records if r.test != IMPORT]))
    missing = lost(records)
    lines += ["", f"## Passed with Gloo, not with ringcomm: {len(missing)}", ""]
    if missing:
        lines += ["| suite | ranks | test | error | why |", "|---|---|---|---|---|"]
    for r in missing:
        error = without_folders(r.first_line)[:240].replace("|", "\\|")
        lines.append(f"| {r.suite} | {r.ranks or ''} | {r.test} | {error} | {explanation(r) or 'not explained'} |")
    skipped = {r.suite: r.first_line for r in records if r.test == IMPORT}
    if skipped:
        lines += ["", "## Files that do not load here, with either backend", ""]
        lines += [f"* {suite}: {without_folders(why)[:160]}" for suite, why in skipped.items()]
    return "\n".join(lines) + "\n"


def without_folders(text: str) -> str:
    """Removes folders from file names, because they depend on the machine."""
    return re.sub(r"(?<![\w.])/\S*/(?=\w)", "", text)


def row(suite: str, ranks: str, records: list[Record]) -> str:
    cells = []
    for backend in (GLOO, OURS):
        count = Counter(r.outcome for r in records if r.backend == backend)
        cells.append(f"{count['passed']} / {count['failed']} / {count['skipped']}")
    grouped = sum(r.groups > 0 and r.outcome == "passed" and r.backend == OURS for r in records)
    tests = len({(r.suite, r.ranks, r.test) for r in records})
    return f"| {suite} | {ranks} | {tests} | {' | '.join(cells)} | {grouped} | {len(lost(records))} |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--log", type=Path, required=True, metavar="FILE", help="JSON lines, one a test")
    p.add_argument("--torch-tests", type=Path, metavar="FOLDER", help="a checkout of torch's test/distributed")
    p.add_argument("--suite", default="*", metavar="PATTERN", help="distributed_test, or paths of files in FOLDER")
    p.add_argument("-k", default="", metavar="PATTERN", help="only tests in whose names this is found")
    p.add_argument("--backend", action="append", choices=(GLOO, OURS), help="one alone (both)")
    p.add_argument("--ranks", type=int, nargs="+", default=WORLDS, help="of distributed_test (2 3 4 8)")
    p.add_argument("--limit-s", type=float, default=90.0, help="for each test (90)")
    p.add_argument("--note", default="", metavar="TEXT", help="for the report: such as where FOLDER is from")
    p.add_argument("--report", action="store_true", help="run nothing")
    p.add_argument("--write", action="store_true", help="write results/conformance.md")
    a = p.parse_args()
    if not a.report:
        run(a)
    records = read(a.log)
    text = report(records, a.note)
    print(text)
    if a.write:
        (RESULTS / "conformance.md").write_text(text, encoding="utf-8")
    raise SystemExit(int(any(not explanation(r) for r in lost(records))))


if __name__ == "__main__":
    main()
