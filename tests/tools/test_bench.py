"""`ringcomm bench`: flags, columns, factors, and that a wrong element or a slow run fails."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm.tools import cli
from ringcomm.tools.bench import check as bench_check
from ringcomm.tools.bench import cli as bench
from ringcomm.tools.bench import run as bench_run
from ringcomm.tools.bench.cases import COLLECTIVE, Case
from ringcomm.tools.bench.options import COLLECTIVES, DTYPES, REDUCTIONS, parse_options, parse_size
from ringcomm.tools.bench.report import number, stats_of
from tests.support.choice import slow


def run(words: str, *more: str) -> int:
    """The exit status of `ringcomm bench` with these words; ranks are threads, and warm up with one call."""
    return cli.main(["bench", *words.split(), *more, "--ranks-as", "threads", "-w", "1"])


def case(
    name: str, dtype: torch.dtype = torch.float32, op: str = "sum", count: int = 100, rank: int = 0, world_size: int = 3
) -> Case:
    return Case(COLLECTIVE[name], dtype, "float", "sum", op, 0, count, rank, world_size)


def test_sizes_scan_as_nccl_tests_does() -> None:
    assert parse_size("8") == 8
    assert parse_size("1.5K") == 1536
    assert parse_size("2m") == 2 << 20
    assert parse_size("1G") == 1 << 30
    assert parse_options(["-b", "8", "-e", "128", "-f", "2"]).sizes == (8, 16, 32, 64, 128)
    assert parse_options(["-b", "8", "-e", "20", "-i", "4"]).sizes == (8, 12, 16, 20)
    assert parse_options([]).sizes == (32 << 20,)


def test_op_takes_reductions_and_collectives() -> None:
    options = parse_options(["--op", "all_to_all,reduce", "-o", "sum,avg"])
    assert options.collectives == ("alltoall", "reduce")
    assert options.reductions == ("sum", "avg")
    assert parse_options(["gather", "-o", "all"]).reductions == ("sum", "prod", "max", "min", "avg", "mulsum")
    assert parse_options(["-d", "float32,half"]).dtypes == ("float", "half")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-G 1", "-G/--cudagraph 1 has no meaning here"),
        ("-t 2", "ranks are counted by -g"),
        ("-R 1", "private memory cannot be registered"),
        ("-o mean", "'mean' is not a collective or reduction"),
        ("-d complex", "'complex' is not a datatype"),
        ("-b 3X", "is not a size"),
        ("-b 2M -e 1M", "is below -b"),
        ("-J out.csv", "only the suffix .json"),
        ("--level dist -m 4", "has neither -m groups nor --algorithm"),
        ("--peer gloo --ranks-as threads", "one world per process"),
        ("-n 0", "must be at least 1"),
        ("--warmup-ms -1", "--warmup-ms is -1; expected a time from 0 on"),
        ("allreduce", "did you mean all_reduce?"),
        ("all-gather", "did you mean all_gather? The collectives are: all_reduce, "),
        ("-e 1K", "is below the default -b 32M; pass -b too"),
        ("-b 64M", "is above the default -e 32M; pass -e too"),
        ("-J nowhere/out.json", "there is no folder nowhere"),
        ("--plot nowhere/out.png", "there is no folder nowhere"),
        ("--plot out.xyz", "ends in one of .png"),
        ("reduce --algorithm oneshot", "reduce has only auto; oneshot is in all_reduce"),
    ],
)
def test_flags_without_a_meaning_are_refused_by_name(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_options(words.split())
    assert raised.value.code == 2
    assert sentence in capsys.readouterr().err


def test_defaults_of_refused_flags_pass() -> None:
    words = "-t 1 -p 0 -z 0 -y 0 -G 0 -C 0 -x 0 -D 0 -V 16 -M 0 -R 0"
    assert parse_options(words.split()) == replace(parse_options([]), args=tuple(words.split()))


def test_factors_and_counts() -> None:
    factors = {name: COLLECTIVE[name].factor(4) for name in COLLECTIVES}
    assert factors["all_reduce"] == 1.5
    assert all(factors[name] == 0.75 for name in ("reduce_scatter", "all_gather", "alltoall", "gather", "scatter"))
    assert all(factors[name] == 1.0 for name in ("broadcast", "reduce", "sendrecv"))
    assert COLLECTIVE["all_reduce"].count(1000, 4, 3) == 250
    assert COLLECTIVE["all_gather"].count(1000, 4, 3) == 80  # 83 rounded down to 16 bytes
    assert COLLECTIVE["reduce_scatter"].count(8, 4, 2) == 0


def test_numbers_fit_their_columns() -> None:
    assert [number(v, 7) for v in (0.0, 12.345, 12345.6, 123456.7, 1234567.8)] == [
        "   0.00",
        "  12.35",
        "12345.6",
        " 123457",
        "1234568",
    ]
    assert [*stats_of([3.0, 1.0, 2.0, 4.0]).values()] == [
        *(1.0, 4.0, 2.5, 2.0, 4.0, 4.0, pytest.approx(1.118, abs=1e-3), pytest.approx(44.7, abs=0.1))
    ]


@pytest.mark.parametrize("world_size", [2, 5, 16])
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES.values()], ids=str)
def test_inputs_are_exact_in_every_order(dtype: torch.dtype, world_size: int) -> None:
    one = case("all_reduce", dtype, world_size=world_size)
    tables = [bench_check.integers(one, rank, 99) for rank in range(world_size)]
    random.Random(0).shuffle(tables)
    total = torch.zeros(bench_check.PERIOD, dtype=dtype)
    for table in tables:  # rounds at every step, as a ring does
        total = (total.double() + table.to(dtype).double()).to(dtype)
    expected = bench_check.reduced_integers(one, 99)
    assert bench_check.count_wrong(total, expected) == 0
    assert expected.double().count_nonzero() > bench_check.PERIOD // 8


@pytest.mark.parametrize("op", sorted(set(REDUCTIONS.values())))
def test_every_reduction_has_an_expected_table(op: str) -> None:
    for name in DTYPES.values():
        dtype = getattr(torch, name)
        if dtype.is_floating_point and op in ("band", "bor", "bxor"):
            continue
        assert bench_check.reduced_integers(case("all_reduce", dtype, op), 1).dtype == dtype


def test_one_flipped_bit_is_one_wrong_element() -> None:
    table = bench_check.floats(case("all_reduce"), 0, 1)
    y = torch.empty(200_000)
    bench_check.fill(y, table)
    assert bench_check.count_wrong(y, table) == 0
    y.view(torch.int32)[131_072] ^= 1
    assert bench_check.count_wrong(y, table) == 1
    assert bench_check.count_wrong(y, table, ulps=2) == 0
    assert bench_check.count_wrong(y[1000:], table, first=1000) == 1
    assert bench_check.count_wrong(y, table, first=1) > 199_000


def test_the_tree_splits_at_the_largest_power_of_two() -> None:
    names = [f"{rank}" for rank in range(7)]

    class Word(str):
        def __add__(self, other: str) -> Word:
            return Word(f"({self!s}{other!s})")

    assert bench_check.tree_sum([Word(n) for n in names]) == "(((01)(23))((45)6))"


def test_a_run_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = "-g 3 -b 96 -e 24K -f 16 -n 2 -I 1 --limit --rounds 2"
    assert run(words, *COLLECTIVES, "-J", str(out), "--plot", str(picture)) == 0
    text = capsys.readouterr().out
    assert text.count("# Out of bounds values : 0 OK") == len(COLLECTIVES) - 1
    assert text.count("# Out of bounds values : not checked") == 1  # of barrier
    assert text.count("random floats differ OK") == 3
    assert "       size         count      type   redop    root     time   algbw   busbw  #wrong    i_min" in text
    assert picture.stat().st_size > 10_000
    document = json.loads(out.read_text())
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert document["average_bus_bandwidth"]["okay"] == "unchecked"
    assert len(document["devices"]) == 3
    row = document["results"][1]
    assert row["size"] == 96 * 16
    assert row["out_of_place"]["nwrong"] == row["in_place"]["nwrong"] == 0
    assert row["out_of_place"]["bus_bw"] == pytest.approx(4 / 3 * row["out_of_place"]["alg_bw"])
    assert {"min_us", "max_us", "p99_us"} <= row["in_place_per_iter"].keys()


@pytest.mark.parametrize(
    "extra",
    [["--registered"], ["-R", "2", "-u", "1"], ["-m", "3"], ["--algorithm", "ring"], ["-r", "all"]],
    ids=" ".join,
)
def test_buffers_groups_algorithms_and_roots(extra: list[str]) -> None:
    assert run("all_reduce all_gather broadcast -g 3 -b 4K -e 64K -f 16 -n 2", *extra) == 0


@pytest.mark.parametrize("words", ["all_reduce -g 2", slow("all_reduce reduce_scatter -g 3")])
def test_every_dtype_and_reduction(words: str) -> None:
    assert run(f"{words} -b 3K -e 3K -n 1 -d all -o all") == 0


def test_a_wrong_element_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = bench_run.comm_call

    def wrong(comm: Any, algorithm: str, agg: int, one: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool) -> Any:
        call = right(comm, algorithm, agg, one, x, y, in_place)
        assert call is not None

        def run() -> None:
            call()
            if one.rank == 1:
                y.view(torch.int32)[5] ^= 1

        return run

    monkeypatch.setattr(bench_run, "comm_call", wrong)
    assert run("-g 2 -b 4K -e 4K -n 1") == 1
    text = capsys.readouterr().out
    assert "# Out of bounds values : 2 FAILED" in text
    assert "# Canonical order      : 1 of 2048 random floats differ FAILED" in text


def test_unchecked_results_are_not_reported_as_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert run("-g 2 -b 1K -e 1K -n 1 -c 0", "-J", str(out)) == 0
    text = capsys.readouterr().out
    assert "# Out of bounds values : not checked" in text
    assert "OK" not in text
    assert json.loads(out.read_text())["out_of_bounds"] == {"count": 0, "okay": "unchecked"}


class Ticking:
    """A clock whose calls get faster: the first hundred take a millisecond, others a microsecond."""

    def __init__(self) -> None:
        self.calls = 0

    def total(self, calls: Any) -> float:
        before, self.calls = self.calls, self.calls + len(list(calls))
        cold = max(0, min(self.calls, 100) - before)
        return cold * 1e-3 + (self.calls - before - cold) * 1e-6


@pytest.mark.parametrize(("words", "iters"), [([], 10_000), (["-w", "1"], 20), (["-n", "7"], 7)])
def test_the_number_of_calls_is_that_of_warm_calls(words: list[str], iters: int) -> None:
    options = parse_options(["-b", "1K", "-e", "1K", "-g", "1", *words])

    def one(comm: Any) -> tuple[int, int]:
        bench_ = bench_run.Bench(comm, options)
        bench_.clock = ticking = Ticking()
        runner = next(bench_.runners(next(bench_.cases("all_reduce"))))
        return runner.iters, ticking.calls

    found, warming = ringcomm.run_ranks(one, 1, ranks="threads")[0]
    assert found == iters
    assert (warming > 100) is (words != ["-w", "1"])


def test_a_plot_tells_its_curves_apart_and_names_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    picture = tmp_path / "out.png"
    for words in ("all_reduce all_gather -d float,half -o sum,max", "all_reduce -d all"):
        assert run(f"{words} -g 2 -b 64 -e 4K -f 8 -n 1 --rounds 3", "--plot", str(picture)) == 0
    for figure in figures:
        assert f"{len(os.sched_getaffinity(0))} cores, " in figure.get_suptitle()
        for axis in figure.axes:
            colors = [line.get_color() for line in axis.lines]
            assert len({*colors}) == len(colors) >= 2
            assert len(axis.collections) == len(axis.lines)  # a band of the turns around each
    first, second = figures
    assert "float" not in first.axes[0].get_title("left")
    assert [bool(axis.get_xlabel()) for axis in first.axes] == [False, False, True, True]
    assert second.axes[0].get_title("left") == "all_reduce, 2 ranks, sum"


def test_a_slow_run_fails() -> None:
    assert run("-g 2 -b 1K -e 1K -n 1 --min-bw 1e9") == 1
    assert run("-g 2 -b 1K -e 1K -n 1 --min-bw 0") == 0


@pytest.mark.usefixtures("new_pythons")  # they write where this process does
def test_processes_beside_a_peer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = "all_reduce all_gather -g 2 --level dist --peer gloo --rounds 3 -n 3 -b 1K -e 64K -f 64"
    assert bench.main([*words.split(), "-J", str(out)]) == 0
    assert "# Ratio to gloo" in capfd.readouterr().out
    for row in json.loads(out.read_text())["results"]:
        assert len(row["peer"]["ratios"]) == 3
        assert row["peer"]["ratio"] > 0


@pytest.mark.usefixtures("new_pythons")
def test_the_backend_ringcomm_is_a_peer_of_the_communicator(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert bench.main(["-g", "2", "--peer", "ringcomm", "-b", "1K", "-e", "1K", "-n", "3", "-J", str(out)]) == 0
    (row,) = json.loads(out.read_text())["results"]
    assert row["peer"]["ratio"] > 0
    assert row["in_place"]["time"] > 0
    assert row["out_of_place"]["time"] > 0  # which a peer lacks


def test_a_root_outside_the_world_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("broadcast -g 2 -r 2 -b 64 -e 64") == 2
    assert "got root 2, expected one of 0 to 1" in capsys.readouterr().err


def test_an_unknown_peer_is_refused_before_a_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--peer", "glue"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert text.startswith("ringcomm bench: got --peer glue, this torch has")
    assert "gloo" in text


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupted)
    assert bench.main([]) == 130
    assert capsys.readouterr().err == "ringcomm bench: interrupted\n"
