"""The timeline: which spans there are, how they nest, nothing when off, and how files of several ranks become one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm import Communicator, run_ranks
from ringcomm.comm.schedule import num_steps, ring_step
from ringcomm.observe.trace import merge, trace
from ringcomm.tools import cli
from tests.support import ROOT, torch_ranks

Span = dict[str, Any]

# ---- what is recorded ----------------------------------------------------------------------------------------------


def spans_of(timeline: dict[str, Any]) -> list[Span]:
    """The spans, with times in whole nanoseconds."""
    spans = [dict(event) for event in timeline["traceEvents"] if event["ph"] == "X"]
    for span in spans:
        span["begin"] = round(span["ts"] * 1000)
        span["end"] = span["begin"] + round(span["dur"] * 1000)
    return sorted(spans, key=lambda span: (span["pid"], span["tid"], span["begin"], -span["end"]))


def record(fn: Callable[..., Any], world_size: int, *args: Any, room: int = 1 << 16, **options: Any) -> dict[str, Any]:
    """The timeline of ranks that are threads."""
    trace.start(room)
    try:
        run_ranks(fn, world_size, *args, timeout=60, **options)
    finally:
        timeline = trace.stop()
    return timeline


def check_nesting(spans: list[Span]) -> None:
    """Checks that phases lie inside their call, and that no thread waits and works at once."""
    threads = defaultdict(list)
    for span in spans:
        assert span["begin"] <= span["end"]
        threads[span["pid"], span["tid"]].append(span)
    for each in threads.values():
        calls = [span for span in each if span["cat"] == "call"]
        for span in each:
            if "number" not in span["args"] or span["cat"] == "call":
                continue
            whose = [
                call
                for call in calls
                if call["begin"] <= span["begin"]
                and span["end"] <= call["end"]
                and all(call["args"][key] == span["args"][key] for key in ("group", "number", "rank"))
            ]
            assert len(whose) == 1, f"{span} lies in {whose}"
        leaves = [span for span in each if span["cat"] in ("wait", "work")]
        for one, other in pairwise(leaves):
            assert one["end"] <= other["begin"], f"{one} and {other} overlap"


def test_the_guide_names_every_kind_of_span() -> None:
    header = (ROOT / "csrc/runtime/observe/trace.h").read_text(encoding="utf-8")
    kinds = re.findall(r'X\(k\w+, "([^"]+)", "(\w+)"\)', header)
    assert {category for _, category in kinds} == {"call", "step", "wait", "work"}
    guide = (ROOT / "docs/trace.md").read_text(encoding="utf-8")
    assert [name for name, category in kinds if category != "call" and f"`{name}`" not in guide] == []


# ---- the ring ------------------------------------------------------------------------------------------------------


def ring_all_reduce(comm: Communicator, count: int = 96, calls: int = 1) -> None:
    for _ in range(calls):
        comm.all_reduce(np.ones(count, np.float32), algorithm="ring")


def steps_of(spans: list[Span], rank: int) -> list[tuple[int, int, int]]:
    steps = [span["args"] for span in spans if span["name"] == "step" and span["args"]["rank"] == rank]
    return [(args["step"], args["send_chunk"], args["recv_chunk"]) for args in steps]


def expected_steps(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    steps = range(num_steps(world_size))
    return [(step, *ring_step(rank, world_size, step)[:2]) for step in steps]


def test_calls_of_a_world_of_one_count_too() -> None:
    timeline = record(lambda comm: [comm.all_reduce(np.ones(3)) for _ in range(3)], 1)
    assert [span["args"]["number"] for span in spans_of(timeline) if span["cat"] == "call"] == [0, 1, 2]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_ring_all_reduce_is_the_steps_of_the_schedule(world_size: int) -> None:
    spans = spans_of(record(ring_all_reduce, world_size))
    for rank in range(world_size):
        assert steps_of(spans, rank) == expected_steps(rank, world_size)
    check_nesting(spans)


def test_every_window_takes_all_steps_of_the_ring() -> None:
    windows = 3
    chunk = 256 * 1024 // 4
    spans = spans_of(record(ring_all_reduce, 3, windows * 3 * chunk))
    for rank in range(3):
        assert steps_of(spans, rank) == windows * expected_steps(rank, 3)
    written = [span["args"]["bytes"] for span in spans if span["name"] == "write slot"]
    # Copied into a slot are the chunk that a rank sends first, and those that it passes on; sums are written there at
    # once.
    assert written == [chunk * 4] * (3 * windows * 2)
    check_nesting(spans)


def test_the_arguments_of_a_span() -> None:
    spans = spans_of(record(ring_all_reduce, 3))
    calls = [span for span in spans if span["cat"] == "call"]
    assert [call["name"] for call in calls] == ["ringcomm:all_reduce"] * 3
    assert sorted(call["args"]["rank"] for call in calls) == [0, 1, 2]
    line = ring_all_reduce.__code__.co_firstlineno + 2
    for call in calls:
        args = call["args"]
        assert (args["dtype"], args["count"], args["reduce_op"]) == ("float32", 96, "sum")
        assert (args["algorithm"], args["world_size"], args["bytes"], args["number"]) == ("ring", 3, 384, 0)
        assert args["site"].endswith(f"test_trace.py:{line}")
    (group,) = {call["args"]["group"] for call in calls}
    assert int(group, 16) > 0  # a text: readers of JSON may round integers above 2^53


def test_threads_are_named_by_rank() -> None:
    events = record(ring_all_reduce, 3)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    (process,) = (event["args"]["name"] for event in events if event["name"] == "process_name")
    assert process.startswith("ranks 0, 1, 2 of 3 (process ")


# ---- every other way -----------------------------------------------------------------------------------------------


def every_call(comm: Communicator, count: int) -> None:
    x = np.ones(count, np.float32)
    parts = np.ones(count * comm.world_size, np.float32)
    comm.all_reduce(x)
    comm.all_reduce(x, algorithm="oneshot")
    comm.reduce_scatter(parts)
    comm.all_gather(x)
    comm.all_to_all(parts)
    comm.broadcast(x, root=1)
    comm.reduce(x, root=1)
    comm.gather(x, root=1)
    comm.scatter(parts if comm.rank == 1 else None, out=x, root=1)
    comm.barrier()
    comm.reduce_scatter(parts, algorithm="ring")
    comm.all_gather(x, algorithm="ring")


@pytest.mark.parametrize(
    ("count", "all_reduce"), [(10, "oneshot"), (5_000, "direct"), (300_000, "direct")], ids=["small", "middle", "large"]
)
def test_every_collective_nests(count: int, all_reduce: str) -> None:
    spans = spans_of(record(every_call, 3, count))
    check_nesting(spans)
    calls = [span for span in spans if span["cat"] == "call" and span["args"]["rank"] == 0]
    assert [call["args"]["number"] for call in calls] == list(range(12))
    assert [call["args"]["algorithm"] for call in calls[:2]] == [all_reduce, "oneshot"]
    assert [call["args"]["algorithm"] for call in calls[-2:]] == ["ring"] * 2
    for call in calls:
        parts = [span for span in spans if span["args"].get("number") == call["args"]["number"] and span is not call]
        assert Counter(span["cat"] for span in parts).keys() >= {"wait", "work"}, f"nothing happens in {call['name']}"


def test_in_place_has_its_phases() -> None:
    spans = spans_of(record(every_call, 3, 5_000))
    first = [span for span in spans if span["args"].get("number") == 0 and span["args"]["rank"] == 2]
    assert [span["name"] for span in first if span["cat"] == "step"] == ["publish buffers", "in place", "leave"]


def messages(comm: Communicator, count: int) -> None:
    x = np.full(count, comm.rank, np.float32)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(x, 0)


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_messages_are_slices(count: int) -> None:
    spans = spans_of(record(messages, 2, count))
    check_nesting(spans)
    sent, received = (
        [(span["args"]["ticket"], span["args"]["bytes"]) for span in spans if span["name"] == f"{what} slice"]
        for what in ("send", "receive")
    )
    assert sorted(sent) == sorted(received)
    assert sum(nbytes for _, nbytes in sent) == count * 4
    assert Counter(span["name"] for span in spans if span["cat"] == "call") == {"ringcomm:send": 1, "ringcomm:recv": 1}


def asynchronous(comm: Communicator) -> None:
    works = [comm.all_reduce(np.ones(50_000, np.float32), async_op=True, algorithm="ring") for _ in range(4)]
    for work in works:
        work.wait()


def test_asynchronous_calls_are_recorded_where_they_run() -> None:
    spans = spans_of(record(asynchronous, 3))
    check_nesting(spans)
    for rank in range(3):
        calls = [span for span in spans if span["cat"] == "call" and span["args"]["rank"] == rank]
        assert sorted(call["args"]["number"] for call in calls) == [0, 1, 2, 3]
        assert all("test_trace.py:" in call["args"]["site"] for call in calls)
        steps = [span for span in spans if span["name"] == "step" and span["args"]["rank"] == rank]
        assert Counter(step["args"]["number"] for step in steps) == dict.fromkeys(range(4), num_steps(3))


def between_hosts(comm: Communicator) -> None:
    comm.all_reduce(np.ones(100_000, np.float32))


def test_between_hosts() -> None:
    """A call over hosts holds the calls of its host's engine, which count their ranks by themselves."""
    spans = spans_of(record(between_hosts, 3, hosts=[2, 1]))
    check_nesting(spans)
    outer = [span for span in spans if span["cat"] == "call" and span["args"]["world_size"] == 3]
    assert {span["args"]["rank"] for span in outer if span["name"] == "ringcomm:all_reduce"} == {0, 1, 2}
    inner = {span["name"] for span in spans if span["cat"] == "call" and span["args"]["world_size"] == 2}
    assert inner >= {"ringcomm:reduce_scatter", "ringcomm:all_gather"}
    assert {span["name"] for span in spans} >= {"agree", "compute", "start messages", "wait messages"}
    rounds = [span["args"] for span in spans if span["name"] == "wait messages" and span["args"]["rank"] == 2]
    assert {(args["step"], args["rail"]) for args in rounds} >= {(0, 0), (1, 0), (0, 1), (1, 1)}


def failing(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(ringcomm.AbortedError):
            comm.barrier()
    else:
        comm.abort("enough")


def test_a_call_that_raises_says_so() -> None:
    spans = spans_of(record(failing, 2))
    (call,) = (span for span in spans if span["cat"] == "call")
    assert call["args"]["failed"] is True
    check_nesting(spans)


# ---- on and off ----------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_when_tracing_is_off() -> None:
    run_ranks(ring_all_reduce, 3)
    trace.start()
    timeline = trace.stop()
    run_ranks(ring_all_reduce, 3)
    assert timeline["traceEvents"] == []
    assert timeline["ringcomm"][0]["dropped"] == 0


def test_a_full_buffer_counts_what_it_drops() -> None:
    calls = 2  # few enough tickets that nobody waits for credit: the spans are the same each time
    whole = Counter(span["args"]["rank"] for span in spans_of(record(ring_all_reduce, 3, 96, calls)))
    timeline = record(ring_all_reduce, 3, 96, calls, room=5)
    kept = Counter(span["args"]["rank"] for span in spans_of(timeline))
    assert kept == {0: 5, 1: 5, 2: 5}
    assert timeline["ringcomm"][0]["dropped"] == sum(whole.values()) - sum(kept.values())


def test_one_trace_at_a_time() -> None:
    trace.start()
    try:
        with pytest.raises(ringcomm.InvalidArgumentError, match="one trace of this process at a time"):
            trace.start()
    finally:
        trace.stop()
    with pytest.raises(ringcomm.InvalidArgumentError, match="expected a trace that was started, got none"):
        trace.stop()


@pytest.mark.parametrize("room", [0, -1, 1 << 30, 1 << 40])
def test_an_invalid_capacity_is_refused(room: int) -> None:
    with pytest.raises(ringcomm.InvalidArgumentError, match="trace: "):
        trace.start(room)


def test_a_file_in_no_folder_is_refused_before_anything_is_lost(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "timeline.json"
    with pytest.raises(ringcomm.InvalidArgumentError, match="in a folder that is there"):
        trace(nowhere)
    trace.start()
    try:
        with pytest.raises(ringcomm.InvalidArgumentError, match="in a folder that is there"):
            trace.stop(nowhere)
    finally:
        assert trace.stop(tmp_path / "timeline.json")["ringcomm"][0]["dropped"] == 0


# ---- files ---------------------------------------------------------------------------------------------------------


def traced_process(comm: Communicator, folder: str) -> None:
    comm.barrier()
    with ringcomm.trace(os.path.join(folder, f"rank{comm.rank}.json")):
        comm.all_reduce(np.ones(96, np.float32), algorithm="ring")


def test_files_of_processes_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(traced_process, 3, str(tmp_path), ranks="processes", timeout=60)
    out = tmp_path / "merged.json"
    assert cli.main(["trace", *(str(tmp_path / f"rank{r}.json") for r in range(3)), "-o", str(out)]) == 0
    spans = spans_of(json.loads(out.read_text()))
    assert f"{len(spans)} spans of 3 processes, 0 dropped" in capsys.readouterr().out
    assert len({span["pid"] for span in spans}) == 3
    check_nesting(spans)
    for rank in range(3):
        assert steps_of(spans, rank) == expected_steps(rank, 3)
    # The clocks are one: nobody has seen a ticket before its writer began to publish it.
    published = {(s["args"]["rank"], s["args"]["ticket"]): s["begin"] for s in spans if s["name"] == "publish"}
    waits = [span for span in spans if span["name"] == "wait ticket"]
    assert len(waits) == 3 * num_steps(3)
    for wait in waits:
        assert published[wait["args"]["peer"], wait["args"]["ticket"]] <= wait["end"]


def test_hosts_with_clocks_of_their_own() -> None:
    def timeline(host: str, epoch_us: float) -> dict[str, Any]:
        span = {"ph": "X", "name": "step", "cat": "step", "pid": 7, "tid": 7, "ts": 100.0, "dur": 1.0, "args": {}}
        process = {"pid": 7, "host": host, "epoch_us": epoch_us, "dropped": 1}
        return {"traceEvents": [span], "displayTimeUnit": "ns", "ringcomm": [process]}

    merged = merge([timeline("a", 1000.0), timeline("b", 1500.0)])
    assert [(event["pid"], event["ts"]) for event in merged["traceEvents"]] == [(7, 100.0), (8, 600.0)]
    again = merge([merged, timeline("a", 1000.0)])
    assert [(event["pid"], event["ts"]) for event in again["traceEvents"]] == [(7, 100.0), (8, 600.0), (9, 100.0)]
    assert [process["dropped"] for process in again["ringcomm"]] == [1, 1, 1]


SCRIPT = """
import numpy, sys
from ringcomm import run_ranks

def rank(comm):
    return comm.all_reduce(numpy.ones(4)).sum()

if __name__ == "__main__":
    print(run_ranks(rank, 2, ranks=sys.argv[1], timeout=60))
"""


@pytest.mark.parametrize(("ranks", "files"), [("threads", 1), ("processes", 2)])
def test_a_whole_process(ranks: str, files: int, tmp_path: Path) -> None:
    """One file for each process that made a call; the parent of processes made none."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "traces"
    environment = {**os.environ, "RINGCOMM_TRACE": str(folder)}
    subprocess.run([sys.executable, str(script), ranks], env=environment, check=True, timeout=100)
    found = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert len(found) == files
    calls = [span for span in spans_of(merge(found)) if span["name"] == "ringcomm:all_reduce"]
    assert sorted(call["args"]["rank"] for call in calls) == [0, 1]
    assert all(call["args"]["site"].endswith("script.py:6") for call in calls)


@pytest.mark.parametrize("text", ["", "[1]", '{"traceEvents": []}'])
def test_other_files_are_refused_in_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text(text)
    assert cli.main(["trace", str(other), "-o", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["trace", str(tmp_path / "missing"), "-o", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.endswith("missing: No such file or directory; name a file that can be read\n")
    assert cli.main(["trace", str(other)]) == 2


# ---- beside torch --------------------------------------------------------------------------------------------------


def beside_the_profiler() -> tuple[list[str], list[Span]]:
    trace.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(10))
    timeline = trace.stop()
    return [event.name for event in profiler.events()], spans_of(timeline)


def test_names_are_the_profilers() -> None:
    for names, spans in torch_ranks.run(beside_the_profiler):
        check_nesting(spans)
        (call,) = (span for span in spans if span["cat"] == "call")
        assert call["name"] == "ringcomm:all_reduce"
        assert call["name"] in names
        assert call["args"]["site"].endswith(f"test_trace.py:{beside_the_profiler.__code__.co_firstlineno + 3}")
