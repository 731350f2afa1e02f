"""Around the calls of a ringcomm process group: profiler, sequence, dispatch modes, functional calls, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import torch_ranks
from tests.support.torch_checks import all_reduce_works, backend_of

pytestmark = pytest.mark.timeout(180)
run = torch_ranks.run


def _profiled() -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.broadcast(torch.ones(10), 0)
        dist.all_gather_into_tensor(torch.ones(30), torch.ones(10))
        dist.barrier()
    return [event.name for event in profiler.events() if event.name.startswith("ringcomm:")]


def test_profiler_names() -> None:
    for names in run(_profiled):
        assert sorted(names) == [
            "ringcomm:all_gather_into_tensor",
            "ringcomm:all_reduce",
            "ringcomm:all_reduce",
            "ringcomm:barrier",
            "ringcomm:broadcast",
        ]


def _profiled_as_by_torch() -> list[tuple[str, bool, list[list[int]]]]:
    rank, x, parts = dist.get_rank(), torch.ones(2, 3), [torch.ones(4) for _ in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(6, 3), x)
        dist.scatter(torch.empty(4), parts if rank == 0 else None, src=0)
        dist.isend(x, (rank + 1) % 3)
        dist.recv(x)
    spans = [event for event in profiler.events() if event.name.startswith("ringcomm:")]
    return sorted((span.name, span.is_async, span.input_shapes) for span in spans)


def test_spans_are_asynchronous_and_show_the_shapes_of_inputs() -> None:
    for rank, spans in enumerate(run(_profiled_as_by_torch)):
        assert spans == [
            ("ringcomm:all_gather_into_tensor", True, [[2, 3]]),
            ("ringcomm:all_reduce", True, [[2, 3]]),
            ("ringcomm:all_reduce", True, [[2, 3]]),
            ("ringcomm:recvAnySource", True, [[2, 3]]),
            ("ringcomm:scatter", True, [[4]] * 3 if rank == 0 else []),
            ("ringcomm:send", True, [[2, 3]]),
        ]


# -- what Kineto's tools read ------------------------------------------------------------------------------------------


def _param_comms(folder: str) -> list[dict[str, Any]]:
    rank, world = dist.get_rank(), 3
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    pair = dist.new_group([0, 2], group_desc="pair")
    x, rows = torch.ones(6), torch.ones(world, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.ones(3, 4)).sum().backward()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([torch.empty(6) for _ in range(world)], x)
        dist.all_gather_into_tensor(torch.empty(18, dtype=torch.int32), torch.ones(6, dtype=torch.int32))
        dist.reduce_scatter(torch.empty(2), list(rows))
        dist.reduce_scatter_tensor(torch.empty(2), x, async_op=True).wait()
        dist.all_to_all_single(torch.empty(6), x)
        sent = [[1, 1, 2][(rank + peer) % 3] for peer in range(world)]
        dist.all_to_all_single(torch.empty(4, 5), torch.ones(4, 5), sent, sent)
        dist.all_to_all(list(torch.empty(world, 2)), list(rows))
        dist.gather(x, [torch.empty(6) for _ in range(world)] if rank == 0 else None)
        dist.scatter(torch.empty(2), list(rows) if rank == 0 else None)
        dist.barrier()
        if rank == 2:
            dist.send(x, 0)
        elif rank == 0:
            dist.recv(x, 2)
        if rank != 1:
            dist.all_reduce(x, group=pair)
    path = f"{folder}/{rank}.json"
    profiler.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    return [event["args"] for event in events if event["name"] == "record_param_comms"]


def test_profiles_have_the_events_that_tools_read(tmp_path: Path) -> None:
    for rank, found in enumerate(run(_param_comms, str(tmp_path))):
        shown = [(each["Collective name"], each["In msg nelems"], each["Out msg nelems"]) for each in found]
        expected = [
            ("allreduce", 10, 10),  # of DistributedDataParallel
            ("broadcast", 6, 6),
            ("reduce", 6, 6),
            ("all_gather", 6, 18),
            ("_allgather_base", 6, 18),
            ("reduce_scatter", 6, 2),
            ("_reduce_scatter_base", 6, 2),
            ("all_to_all", 6, 6),
            ("all_to_allv", 20, 20),
            ("all_to_all", 6, 6),
            ("gather", 6, 18 if rank == 0 else 0),
            ("scatter", 6 if rank == 0 else 0, 2),
            ("barrier", 0, 0),
        ]
        if rank != 1:
            expected += [("send" if rank == 2 else "recv", 6, 6), ("allreduce", 6, 6)]
        assert shown == expected
        assert [each["dtype"] for each in found[:5]] == ["Float", "Float", "Float", "Float", "Int"]
        assert [each["Group size"] for each in found] == [3] * (13 if rank == 1 else 14) + [2] * (rank != 1)
        assert {each["Process Group Ranks"] for each in found[:13]} == {"[0, 1, 2]"}
        if "Seq" in found[1]:  # not in the profiles of torch 2.11
            assert [each["Seq"] for each in found[1:13]] == list(range(found[1]["Seq"], found[1]["Seq"] + 12))
        splits = [[1, 1, 2][(rank + peer) % 3] for peer in range(3)]
        assert found[8]["In split size"] == str(splits)
        assert found[8]["Out split size"] == str(splits)
        assert found[9]["In split size"] == "[2, 2, 2]"  # elements of each tensor
        if rank != 1:
            assert found[-2].get("Seq", 1) == 1  # sends and receives are counted apart
            assert found[-1]["Process Group Description"] == "pair"
            assert found[-1]["Process Group Ranks"] == "[0, 2]"
            assert found[-1]["Process Group Name"] != found[0]["Process Group Name"]


def _sequence() -> None:
    backend = backend_of()
    backend._set_sequence_number_for_group()
    start = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    dist.isend(torch.ones(1), dist.get_rank())
    assert backend._get_sequence_number_for_group() == start + 2


def test_sequence_numbers() -> None:
    run(_sequence)


def _dispatch_mode() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        all_reduce_works()
        x = torch.ones(3)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_into_tensor(torch.ones(9), x)
    assert mode.get_total_counts() == 3


def test_synchronous_calls_pass_dispatch_modes() -> None:
    run(_dispatch_mode)


# -- functional collectives, shared memory ---------------------------------------------------------------------------


def _functional() -> None:
    from torch.distributed import _functional_collectives as functional

    rank, world = dist.get_rank(), dist.group.WORLD
    x = torch.arange(6.0) + rank
    assert torch.equal(functional.all_reduce(x, "sum", world), 3 * torch.arange(6.0) + 3)
    gathered = torch.cat([torch.arange(6.0) + peer for peer in range(3)])
    assert torch.equal(functional.all_gather_tensor(x, 0, world), gathered)
    part = functional.reduce_scatter_tensor(x, "avg", 0, world)
    assert torch.equal(part, (torch.arange(6.0) + 1)[2 * rank : 2 * rank + 2])
    assert torch.equal(functional.broadcast(x, 2, world), torch.arange(6.0) + 2)
    exchanged = functional.all_to_all_single(x, [2, 2, 2], [2, 2, 2], world)
    assert torch.equal(exchanged, torch.cat([gathered[6 * peer + 2 * rank :][:2] for peer in range(3)]))
    several = functional.all_reduce_coalesced([x, 2 * x], "sum", world)
    assert torch.equal(several[1], 6 * torch.arange(6.0) + 6)
    several = functional.all_gather_into_tensor_coalesced([x, 2 * x], world)
    assert torch.equal(several[1], 2 * gathered)
    several = functional.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], world)
    assert torch.equal(several[0], (3 * torch.arange(6.0) + 3)[2 * rank : 2 * rank + 2])


def test_functional_collectives() -> None:
    run(_functional)


def _allocated() -> None:
    backend, cpu = backend_of(), torch.device("cpu")
    assert backend.supports_tensor_alloc(cpu)
    assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
    for dtype, count in ((torch.float32, 100_000), (torch.bfloat16, 7), (torch.int64, 0)):
        x = backend.allocate_tensor(count, dtype=dtype, device=cpu)
        assert x.dtype == dtype
        assert x.shape == (count,)
        x.fill_(dist.get_rank())
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((count,), 3, dtype=dtype))
        view = x.view(-1)[: count // 2]
        del x
        dist.all_reduce(view)
        assert torch.equal(view, torch.full((count // 2,), 9, dtype=dtype))


def test_memory_of_the_engine() -> None:
    run(_allocated)
