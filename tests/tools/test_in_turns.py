"""benchmarks/in_turns.py: trees take turns, cells are compared within a turn, formats of all levels are read."""

from __future__ import annotations

import json
import statistics

from benchmarks import in_turns


def test_the_trees_take_turns_and_a_slower_cell_shows() -> None:
    order = []

    def run_tree(which: int) -> in_turns.Cells:
        order.append(which)
        load = 1.0 + (len(order) - 1) // 2 % 2  # of the machine, in the second turn
        return {"same": 10.0 * load, "slower": (10.0, 20.0)[which] * load, **({"only new": 1.0} if which else {})}

    times = in_turns.in_turns(run_tree, 3)
    assert order == [0, 1, 1, 0, 0, 1]
    assert list(times) == ["same", "slower"]
    assert statistics.median(in_turns.ratios(*times["slower"])) == 0.5
    assert in_turns.is_slower(*times["slower"], 0.97)
    assert not in_turns.is_slower(*times["same"], 0.97)
    assert not in_turns.is_slower([10.0, 10.0, 10.0], [10.0, 20.0, 20.0], 0.97)  # undisturbed it is as fast
    assert in_turns.row("comm", "x", [10.0, 20.0, 30.0], [10.0, 10.0, 10.0]) == (
        "| comm | x | 20 (10-30) | 10 (10-10) | 2 (1-3) | 1.000 |"
    )


def test_what_the_benchmarks_write_is_read() -> None:
    rows = [{"experiment_name": "all_reduce", "size": 1024, "in_place_per_iter": {"p50_us": 4.5}}]
    assert in_turns.from_bench(json.dumps({"results": rows})) == {"all_reduce 1024 in_place": 4.5}
    assert in_turns.from_engine_bench('{"op": "barrier", "bytes": 0, "us": [3, 1, 2]}\n') == {"barrier 0": 2}
    steps = {"stage 0": {"seconds": [2.0, 3.0, 8.0]}, in_turns.ALONE: {"seconds": [1.0, 1.0, 2.0]}}
    assert in_turns.from_train(json.dumps([{"steps": {**steps, "torch DDP, Gloo": {"seconds": [1.0]}}}])) == {
        "step, stage 0": 3.0
    }
