"""Streams, events and futures of the torch.distributed backend on a device, without a GPU.

`fake_cuda` gives a Python of its own "cuda" tensors in host memory, and a device guard and an engine that write down
what is asked of them. "record e1 s7": event 1 is recorded on stream 7; "block s1 e1": stream 1 waits for it; "keep s1":
the allocator is told that stream 1 uses memory. Stream 7 is the caller's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from ringcomm import backend, errors
from tests.support import ROOT, emulated, forked
from tests.support.torch_checks import raised

pytestmark = pytest.mark.timeout(300)
Log = list[str]


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    """A Python whose torch takes `fake_cuda` for CUDA."""
    if torch.backends.cuda.is_built():
        pytest.skip("a torch with CUDA brings its own device guard; needs a build of torch for the cpu")
    with forked.server().Pool(1, _prepare, (str(_compiled()),)) as pool:
        yield pool


def _compiled() -> Path:
    """The module `fake_cuda`. It takes twenty seconds to compile, so a later run of the tests takes an earlier one's,
    if the sources, torch and the command are the same."""
    sources = [ROOT / "tests" / "support" / "fake_cuda" / "fake_cuda.cpp", ROOT / "csrc" / "core" / "names.cpp"]
    torch_folder = Path(torch.__file__).parent
    includes = [
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
        sysconfig.get_path("include"),
    ]
    words = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", "-w"]
    words += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-DUSE_C10D", "-DUSE_DISTRIBUTED"]
    words += [f"-I{ROOT / 'csrc'}", *(f"-isystem{each}" for each in includes), *map(str, sources)]
    words += [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    words += [f"-Wl,-rpath,{torch_folder / 'lib'}"]
    key = hashlib.sha256(repr((torch.__version__, words)).encode())
    for path in (*sources, *sorted((ROOT / "csrc" / "core").rglob("*.h"))):
        key.update(path.read_bytes())
    folder = ROOT / "build" / "fake_cuda"
    module = folder / key.hexdigest()[:16] / f"fake_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    with emulated.building(folder):
        if not module.exists():
            for old in folder.glob("*/"):
                shutil.rmtree(old)
            module.parent.mkdir()
            unfinished = module.with_name("unfinished.so")
            done = subprocess.run([*words, "-o", str(unfinished)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            unfinished.rename(module)
    return module


def _prepare(path: str) -> None:
    spec = importlib.util.spec_from_file_location("fake_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["fake_cuda"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["fake_cuda"])


class FakeEngineFactory(backend.DeviceEngineFactory):
    """Gives a group the engine that writes down its calls."""

    def make(self, call: str, index: int) -> object:
        import fake_cuda

        self.made = f"{call} on {index}"
        self.engine = fake_cuda.engine()
        return self.engine

    def connect(self, call: str) -> object:
        assert self.made.startswith(call)
        return self.engine


def in_group(scenario: Callable[[Any, Any], Any]) -> Any:
    """Runs a scenario with `fake_cuda` and a new backend."""
    import fake_cuda

    backend.DeviceEngineFactory = FakeEngineFactory  # this process has no other use
    fake_cuda.reset()
    fake_cuda.set_stream(7)
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    device = dist.group.WORLD._get_backend(torch.device("cuda"))
    try:
        if scenario is not _first_call_in_a_graph:
            device.allreduce([ones()]).wait()  # connects, and takes stream 1 for asynchronous calls
        fake_cuda.log()
        return scenario(fake_cuda, device)
    finally:
        dist.destroy_process_group()


def ones(*shape: int) -> torch.Tensor:
    import fake_cuda

    return fake_cuda.tensor(torch.ones(shape or (8,)))


def columns() -> torch.Tensor:
    """A tensor that is not contiguous."""
    import fake_cuda

    return fake_cuda.tensor(torch.arange(8.0).reshape(2, 4).t())


def numbered(log: Log) -> Log:
    """Events by order of appearance: the first is e1."""
    names: dict[str, str] = {}
    return [
        " ".join(
            names.setdefault(word, f"e{len(names) + 1}") if word[0] == "e" and word[1:].isdigit() else word
            for word in line.split()
        )
        for line in log
    ]


def sync_options() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


# -- where calls run -------------------------------------------------------------------------------------------------


def _synchronous(fake: Any, device: Any) -> Log:
    assert device.allreduce([ones()], sync_options()) is None
    device.allreduce([columns()], sync_options())
    return fake.log()


def test_a_synchronous_call_runs_on_the_current_stream(process: Pool) -> None:
    assert process.apply(in_group, (_synchronous,)) == [
        "run all_reduce s7",
        *("copy s7", "run all_reduce s7", "copy s7"),
    ]


def _asynchronous(fake: Any, device: Any) -> tuple[Log, Log]:
    work = device.allreduce([ones()])
    called = fake.log()
    fake.set_stream(9)
    assert work.wait()
    return called, fake.log()


def test_an_asynchronous_call_runs_between_the_streams(process: Pool) -> None:
    called, waited = process.apply(in_group, (_asynchronous,))
    assert numbered(called + waited) == [
        *("record e1 s7", "block s1 e1", "run all_reduce s1", "record e2 s1"),
        "block s9 e2",  # and the host waits for nothing
    ]


def _strided(fake: Any, device: Any) -> Log:
    x = columns()
    work = device.allreduce([x])
    work.wait()
    assert torch.equal(fake.host(x), torch.arange(8.0).reshape(2, 4).t())
    return fake.log()


def test_stand_ins_are_filled_before_and_read_after_the_call(process: Pool) -> None:
    assert numbered(process.apply(in_group, (_strided,))) == [
        "copy s7",
        *("record e1 s7", "block s1 e1", "keep s1", "run all_reduce s1", "copy s1", "record e2 s1"),
        "block s7 e2",
    ]


def _messages(fake: Any, device: Any) -> list[Log]:
    x, y = ones(), ones()
    logs = []
    for call in (
        lambda: device.send([x], 0, 0),
        lambda: device.recv([y], 0, 0),
        lambda: device.send([x], 0, 0),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)])[0],
    ):
        work = call()
        work.wait()
        logs.append(fake.log())
    return logs


def test_messages_have_streams_of_their_own(process: Pool) -> None:
    send, recv, again, batch = process.apply(in_group, (_messages,))
    sender, receiver = (log[2].split()[-1] for log in (send, recv))
    assert len({"s7", "s1", sender, receiver}) == 4
    assert send[2] == again[2] == f"run send {sender}"
    assert recv[2] == f"run recv {receiver}"
    assert "run_list send recv s1" in batch


def _lists(fake: Any, device: Any) -> Log:
    dist.group.WORLD.allreduce_coalesced([ones(), ones()]).wait()
    options = dist.BroadcastOptions()
    options.asyncOp, options.rootRank = False, 0
    with dist._coalescing_manager(device=torch.device("cuda", 0)):
        for _ in range(2):
            dist.group.WORLD.broadcast([ones()], options)  # dist.broadcast asks the driver about float8
    return [line for line in fake.log() if line.startswith("run")]


def test_lists_are_one_call_of_the_engine(process: Pool) -> None:
    assert process.apply(in_group, (_lists,)) == [
        "run_list all_reduce all_reduce s1",
        "run_list broadcast broadcast s7",
    ]


def _barriers(fake: Any, device: Any) -> tuple[Log, Log, Log]:
    dist.barrier()
    synchronous = fake.log()
    work = dist.barrier(async_op=True)
    called = fake.log()
    work.wait()
    return synchronous, called, fake.log()


def test_a_barrier_holds_up_the_host(process: Pool) -> None:
    synchronous, called, waited = process.apply(in_group, (_barriers,))
    assert numbered(synchronous) == ["run barrier s7", "record e1 s7", "query e1"]
    assert numbered(called + waited)[-3:] == ["record e2 s1", "query e2", "block s7 e2"]


# -- works and futures -----------------------------------------------------------------------------------------------


def _future(fake: Any, device: Any) -> tuple[Log, Log]:
    x = ones()
    future = device.allreduce([x]).get_future()
    assert future.done()
    made = fake.log()
    child = future.then(lambda done: done.value()[0])
    assert child.wait().data_ptr() == x.data_ptr()
    return made, fake.log()


def test_callbacks_of_a_future_run_behind_the_call(process: Pool) -> None:
    made, then = process.apply(in_group, (_future,))
    assert made[-1].endswith("s1")
    event = made[-1].split()[1]
    side = then[0].removeprefix("pool low ")
    assert then[1:3] == [f"block {side} {event}", f"keep {side}"]
    assert then[3].startswith("record ")
    assert then[4] == f"block s7 {then[3].split()[1]}"


def _limits(fake: Any, device: Any) -> str:
    fake.set_events_done(False)
    work = device.allreduce([ones()])
    assert not work.is_completed()
    text = raised(errors.CollectiveTimeoutError, work.wait, timedelta(milliseconds=30))
    work.wait()  # without a limit only the stream waits
    fake.set_events_done(True)
    assert work.is_completed()
    assert work.wait(timedelta(milliseconds=30))
    return text


def test_a_wait_with_a_limit_holds_up_the_host(process: Pool) -> None:
    text = process.apply(in_group, (_limits,))
    assert "all_reduce: rank 0 expected the call to end within 30 ms" in text


def _errors(fake: Any, device: Any) -> list[str]:
    done, work = device.allreduce([ones()]), device.allreduce([ones()])
    assert done.is_completed()  # before it goes wrong
    fake.set_aborted(True)
    assert done.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert device.get_error() == ErrorType.COMM_ERROR
    calls = (work.wait, lambda: work.get_future().wait(), lambda: device.allreduce([ones()]))
    return [raised(dist.DistBackendError, call) for call in calls]


def test_errors_of_the_engine_surface(process: Pool) -> None:
    assert all("fake:" in text for text in process.apply(in_group, (_errors,)))


def _lives(fake: Any, device: Any) -> list[int]:
    """Tensors in memory that only the backend keeps: while a call runs, when it has ended, when it was waited for."""
    seen = []
    fake.set_events_done(False)
    device.allreduce([ones()])
    seen.append(fake.alive())
    fake.set_events_done(True)
    device.allreduce([ones()]).wait()  # looks at the older one
    seen.append(fake.alive())
    fake.set_events_done(False)
    work = device.allreduce_coalesced([ones(), ones()])
    seen.append(fake.alive())
    work.wait()
    seen.append(fake.alive())
    return seen


def test_tensors_live_until_the_call_ends_or_is_waited_for(process: Pool) -> None:
    assert process.apply(in_group, (_lives,)) == [1, 0, 2, 2]


# -- graphs, devices -------------------------------------------------------------------------------------------------


def _graph(fake: Any, device: Any) -> tuple[Log, Log]:
    fake.set_capturing(True)
    work = device.allreduce([ones()])
    work.wait()
    assert work.is_completed()
    dist.barrier()
    device.allreduce([ones()], sync_options())
    captured = fake.log()
    fake.set_capturing(False)
    device.allreduce([ones()]).wait()
    return captured, fake.log()


def test_nothing_looks_at_events_of_a_graph(process: Pool) -> None:
    captured, after = process.apply(in_group, (_graph,))
    assert not [line for line in captured if "query" in line or "host" in line]
    assert [line for line in captured if line.startswith("run")] == [
        "run all_reduce s1",
        "run barrier s7",
        "run all_reduce s7",
    ]
    events = {line.split()[1] for line in captured if line.startswith("record")}
    assert not [line for line in after if line.startswith("query") and line.split()[1] in events]


def _first_call_in_a_graph(fake: Any, device: Any) -> str:
    fake.set_capturing(True)
    return raised(errors.InvalidArgumentError, device.allreduce, [ones()])


def test_the_first_call_is_not_for_a_graph(process: Pool) -> None:
    assert "before the capture" in process.apply(in_group, (_first_call_in_a_graph,))


def _devices(fake: Any, device: Any) -> list[str]:
    x, elsewhere, host = ones(), fake.tensor(torch.ones(8), 1), torch.ones(8)
    return [
        raised(errors.DeviceError, device.allreduce, [elsewhere]),
        raised(errors.DeviceError, device._allgather_base, x, host),
        raised(errors.DeviceError, device._allgather_base, host, x),
        raised(errors.DeviceError, dist.group.WORLD.allreduce_coalesced, [x, host]),
    ]


def test_devices_do_not_mix(process: Pool) -> None:
    first, *others = process.apply(in_group, (_devices,))
    assert "cuda:1, expected one on cuda:0" in first
    assert "torch.cuda.set_device(0)" in first
    assert all("expected one device" in text for text in others)


def _eager(fake: Any, device: Any) -> Log:
    group = dist.new_group()
    other = group._get_backend(torch.device("cuda"))
    other.eager_connect_single_device(torch.device("cuda", 0))
    other.perform_nocolor_split(torch.device("cuda", 0))
    other.set_timeout(timedelta(seconds=3))
    dist.destroy_process_group(group)
    del group, other
    return fake.log()


def test_a_bound_device_connects_at_once(process: Pool) -> None:
    log = process.apply(in_group, (_eager,))
    lent = [line.removeprefix("lend ") for line in log if line.startswith("lend ")]
    assert len(lent) == 5  # collectives, and a side stream for each direction, this rank and any
    assert log[5:] == ["timeout 3000", "close", *(f"take back {stream}" for stream in lent)]


def _pooled(fake: Any, device: Any) -> Log:
    fake.set_names_foreign_streams(False)
    group = dist.new_group()
    group._get_backend(torch.device("cuda")).eager_connect_single_device(torch.device("cuda", 0))
    dist.destroy_process_group(group)
    return fake.log()


def test_where_torch_does_not_know_our_streams_lanes_are_of_its_pool(process: Pool) -> None:
    assert process.apply(in_group, (_pooled,)) == ["lend s6", "take back s6", "pool high s7", "close"]


def _many(fake: Any, device: Any) -> Log:
    for _ in range(3):
        device.allreduce([ones()]).wait()
    return fake.log()


def test_a_call_makes_no_events_and_no_streams(process: Pool) -> None:
    """What a call asks of the runtime, beside the engine: an event orders the streams, another is its end; both were
    made for an earlier call."""
    call = ["record e1 s7", "block s1 e1", "run all_reduce s1", "record e2 s1", "block s7 e2"]
    assert process.apply(in_group, (_many,)) == 3 * call
