"""What every test has: a time limit (pyproject.toml), and the duty to leave nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share few cores; inherited by every process of a test
# A shell lets jobs in the background ignore Ctrl-C, and what they start: the tests of it begin with what is usual.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Of the test processes one runs these files, which wait more than they compute: the others have the cores meanwhile.
WAITING = ("comm/deadlock", "comm/faults", "hierarchy/faults", "comm/shrink", "comm/interrupt")
WAITING += ("observe/doctor", "observe/record")
# Files with long tests come first, so that no process is left with one of them at the end.
LONG = ("native", "cuda/gpu_dry_run", "cuda/engine", "backend/cuda", "cuda/training", "hierarchy/nccl", "comm/hostile")
LONG += ("context/attention", "backend/streams", "hierarchy/namespaces", "hierarchy/namespaces_gpt", "training/elastic")
LONG += ("cuda/build", "comm/launch", "training/memory", "training/fuzz", "mesh/training", "training/third_party")
LONG += ("training/parity", "data_parallel/shard", "comm/fuzz", "hierarchy/training")
IN_BLOCKS = ("data_parallel", "modules", "checkpoint")
_AFTER_THE_LIMIT_S = 60.0
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # nothing is captured yet


def file_name(nodeid: str) -> str:
    """The name of a test's file in the lists above: comm/deadlock for tests/comm/test_deadlock.py."""
    folder, slash, name = nodeid.partition("::")[0].removeprefix("tests/").rpartition("/")
    return folder + slash + name.removeprefix("test_").removesuffix(".py")


def is_chosen(item: pytest.Item, bit: int) -> bool:
    """True for every second test; for other bits, for other tests."""
    return bool(zlib.crc32(item.nodeid.encode()) >> bit & 1)


def without_a_part(cases: list[tuple[object, ...]]) -> list[bool]:
    """Of combinations of values, those that can be left out: any pair of values that meets in one of them meets in one
    that is kept; of combinations of two, any value."""
    size = 2 if len(cases[0]) > 2 else 1
    parts = [set(itertools.combinations(enumerate(case), size)) for case in cases]
    missing, kept = set().union(*parts), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(parts[i] & missing))
        kept.add(best)
        missing -= parts[best]
    return [i not in kept for i in range(len(cases))]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector never looks at what exists when the tests have been collected: it would take most of a
    second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves out of the product of several parametrizations: it runs what meets every value, of
    three every pair."""
    products: dict[object, list[tuple[pytest.Item, tuple[object, ...]]]] = {}
    for item in items:
        axes = [re.findall(r"\w+", str(mark.args[0])) for mark in item.iter_markers("parametrize")]
        usual = item.path.parent.name != "gpu" and item.get_closest_marker("slow") is None
        if usual and len(axes) > 1 and isinstance(item, pytest.Function):
            values = tuple(tuple(id(item.callspec.params[name]) for name in names) for names in axes)
            products.setdefault((item.path, item.originalname), []).append((item, values))
    for product in products.values():
        cases = [values for _, values in product]
        for (item, _), spare in zip(product, without_a_part(cases), strict=True):
            if spare:
                item.add_marker("slow")
    order = {name: i - len(WAITING) - len(LONG) for i, name in enumerate((*WAITING, *LONG))}
    items.sort(key=lambda item: order.get(file_name(item.nodeid), 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Runs the tests of a file in one process, and those of all files that wait.

    pytest-xdist's own groups (--dist loadgroup) are without effect since pytest 9.2 (its issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "waiting" if file_name(nodeid) in WAITING else file_name(nodeid)

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Says how a test process has ended before its time: pytest-xdist does not."""
    if error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            print(f"{node.gateway.id} has ended with {node.gateway._io.popen.wait(10)}", file=sys.__stderr__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the process of a test that is over its limit and holds Python's global lock, so that no thread of Python can
    end it: without this a frozen worker keeps the others waiting for ever."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + _AFTER_THE_LIMIT_S, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def shared_memory_files() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "ringcomm" in path.name} if folder.is_dir() else set()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    """A module of tests leaves no file in /dev/shm: ringcomm makes none there."""
    before = shared_memory_files()
    yield
    assert shared_memory_files() <= before, "shared memory was left behind, by this module or one that ran beside it"


@pytest.fixture(autouse=True)
def no_module_of_ddp_stays_active() -> Iterator[None]:
    """Where ranks are threads, the forward passes of torch's DDP may leave one of them behind as the active one (each
    restores the one that it has found), and torch would then compile blocks of later tests for it."""
    yield
    if "torch.nn.parallel.distributed" in sys.modules:
        sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel._active_ddp_module = None


_reads_generator = threading.Lock()


@pytest.fixture(autouse=True)
def no_garbage_is_collected_under_the_generators_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes the tensor of its generator's state while it holds the generator's lock. Before Python 3.12 garbage
    may be collected there, a finalizer may pass Python's global lock on, and another rank that is a thread then waits
    for the generator with the global lock held: the process is frozen for ever."""
    if sys.version_info >= (3, 12) or "torch" not in sys.modules:
        return
    import torch

    read = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        with _reads_generator:
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                return read()
            finally:
                if was_enabled:
                    gc.enable()

    monkeypatch.setattr(torch, "get_rng_state", get_rng_state)


@pytest.fixture(autouse=True)
def blocks_are_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of tests are smaller than a bucket and than a cache block; each would be one unit and one block, and
    tests would see less. Every second test below the folders in `IN_BLOCKS` has cache blocks. The size of a bucket is
    measured with short messages: no model is as large."""
    if "torch" in sys.modules:
        partition = importlib.import_module("ringcomm.data_parallel.model.partition")
        monkeypatch.setattr(partition, "PROBES", ((1 << 10, 1), (8 << 10, 1)))
        module = importlib.import_module("ringcomm.data_parallel.shard")
        monkeypatch.setattr(module, "_is_one_unit", lambda params, wish, cap: False)
        if file_name(request.node.nodeid).split("/")[0] in IN_BLOCKS and is_chosen(request.node, 0):
            monkeypatch.setattr(importlib.import_module("ringcomm.data_parallel.optim.cache_blocks"), "BLOCK", 64)


@pytest.fixture(autouse=True)
def there_are_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank has cores of its own, its collectives run in the background, and units are prefetched: so in
    every second test, except in processes that are not forked for it."""
    if "torch" in sys.modules and is_chosen(request.node, 1):
        group = importlib.import_module("ringcomm.data_parallel.buckets.group")
        monkeypatch.setattr(group.DataParallelGroup, "_least_cores", lambda ranks: sys.maxsize)


@pytest.fixture(autouse=True, scope="module")
def ranks_are_forked() -> Iterator[None]:
    """Ranks that are processes do not import torch each."""
    from ringcomm.comm import launch
    from tests.support import forked

    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(launch, "multiprocessing", forked.replacement())
        yield


@pytest.fixture
def new_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are processes start as they do for a user."""
    from ringcomm.comm import launch

    monkeypatch.setattr(launch, "multiprocessing", multiprocessing)


@pytest.fixture(autouse=True, scope="session")
def generator_of_all_threads() -> Iterator[None]:
    """Ranks that are threads share torch's generator, so one that sets its seed changes what the others draw: this is
    an error. `tests.support.seeded.seeded` gives a module values that depend on no other thread."""
    import torch

    def manual_seed(seed: int) -> torch.Generator:
        assert threading.current_thread() is threading.main_thread(), "a rank that is a thread seeds torch's generator"
        return usual(seed)

    usual = torch.manual_seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", manual_seed)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread, as each of the ranks that share few cores should."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
