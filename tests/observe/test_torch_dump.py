"""Records as the files of torch's flight recorder, read by torch's own analyser."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from torch.distributed.flight_recorder import fr_trace

from ringcomm.errors import InvalidArgumentError
from ringcomm.observe import doctor, record, torch_dump
from ringcomm.observe.record import Record
from tests.observe.test_record_view import made, made_call


def analysed(folder: Path, *found: Record) -> list[tuple[str, bool]]:
    """The collectives that torch's analyser makes of records: their names, and whether all ranks agree."""
    torch_dump.write(record.merge(found), folder / "dumps")
    fr_trace.main([str(folder / "dumps"), "-o", str(folder / "database")])
    _, database = pickle.loads((folder / "database").read_bytes())
    return [(each.collective_name.removeprefix("nccl:"), each.pass_check) for each in database.collectives]


OPS = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
]


def test_collectives_that_match_are_found_to_match(tmp_path: Path) -> None:
    calls = [made_call(number, op=op, count=12) for number, op in enumerate(OPS)]
    calls += [made_call(9 + number, op=op, count=-1) for number, op in enumerate(OPS[1:3] + OPS[7:8])]
    message = made_call(99, op="send")
    refused = made_call(12, "refused", "all_reduce")
    last = made_call(12, "enqueued")
    found = analysed(
        tmp_path, made(0, *calls, message, last), made(1, *calls, refused, last), made(2, *calls, last, message)
    )
    uneven = ["reduce_scatter_v", "all_gather_v", "all_to_all"]
    assert found == [(op, True) for op in [*OPS, *uneven, "all_reduce"]]


@pytest.mark.parametrize(
    "odd", [made_call(1, op="broadcast"), made_call(1, count=5), made_call(1, dtype="int64"), made_call(1, "failed")]
)
def test_a_collective_that_differs_is_found(odd: record.Call, tmp_path: Path) -> None:
    usual = [made_call(0), made_call(1)]
    found = analysed(tmp_path, made(0, *usual), made(1, *usual), made(2, usual[0], odd))
    assert [agrees for _, agrees in found[:2]] == [True, False]


def test_calls_that_one_rank_no_longer_holds_are_left_out(tmp_path: Path) -> None:
    calls = [made_call(number) for number in range(6)]
    found = analysed(tmp_path, made(0, *calls[3:]), made(1, *calls), made(2, *calls[1:]))
    assert found == [("all_reduce", True)] * 3


def test_communicators_of_fewer_ranks_name_global_ranks(tmp_path: Path) -> None:
    world = [made(rank, made_call(0)) for rank in range(3)]
    pair = [made(0, made_call(1), world_size=2, group=0xCD, pid=42), made(1, world_size=2, group=0xCD, pid=40)]
    half = made(0, made_call(2), world_size=2, group=0xEF, pid=41)
    paths, notes = torch_dump.write(record.merge([*world, *pair, half]), tmp_path)
    assert notes == ["communicators left out: ef (no record of its rank 1)"]
    dumps = [pickle.loads(path.read_bytes()) for path in paths]
    assert [sorted(dump["pg_config"]) for dump in dumps] == [["ab", "cd"], ["ab"], ["ab", "cd"]]
    assert dumps[2]["pg_config"]["cd"]["ranks"] == "[2, 0]"
    assert dumps[2]["pg_status"]["cd"]["last_completed_collective"] == 2
    assert [len(dump["entries"]) for dump in dumps] == [1, 1, 2]
    assert [entry["record_id"] for entry in dumps[2]["entries"]] == [0, 1]


def test_calls_on_a_device_are_started(tmp_path: Path) -> None:
    calls = made_call(0), made_call(1, "enqueued")
    ranks = [made(rank, *calls, engine="cuda") for rank in range(3)]
    paths, notes = torch_dump.write(record.merge(ranks), tmp_path)
    dump = pickle.loads(paths[0].read_bytes())
    assert not notes
    assert [entry["state"] for entry in dump["entries"]] == ["completed", "started"]
    assert dump["pg_status"]["ab"] == {
        "last_enqueued_collective": 2,
        "last_started_collective": 2,
        "last_completed_collective": 1,
    }


def test_the_newest_of_several_runs_is_taken(tmp_path: Path) -> None:
    old = [made(rank, *map(made_call, range(3)), pid=10 + rank, group=0xCD) for rank in range(3)]
    new = [made(rank, made_call(0), taken_ns=old[0].taken_ns + 1) for rank in range(3)]
    paths, notes = torch_dump.write(record.merge([*old, *new]), tmp_path)
    assert [*pickle.loads(paths[0].read_bytes())["pg_config"]] == ["ab"]
    assert notes == ["communicators left out: cd (of another run, whose records are 0 us older)"]


def test_the_newest_of_several_runs_is_taken_though_an_older_one_is_larger(tmp_path: Path) -> None:
    old = [made(rank, made_call(0), made_call(1), pid=10 + rank, group=0xCD, world_size=4) for rank in range(4)]
    new = [made(rank, made_call(0), taken_ns=old[0].taken_ns + 6_000_000_000) for rank in range(3)]
    part = [made(rank, made_call(0), world_size=2, group=0xEF, taken_ns=old[0].taken_ns - 1) for rank in range(2)]
    paths, notes = torch_dump.write(record.merge([*part, *new, *old]), tmp_path)
    assert [path.name for path in paths] == ["rank_0", "rank_1", "rank_2"]
    assert sorted(pickle.loads(paths[0].read_bytes())["pg_config"]) == ["ab", "ef"]
    assert notes == ["communicators left out: cd (of another run, whose records are 6.0 s older)"]


def test_a_helper_process_does_not_hide_the_job(tmp_path: Path) -> None:
    job = [made(rank, made_call(0)) for rank in range(3)]
    helper = made(0, *map(made_call, range(9)), pid=9, group=0xCD, world_size=1, taken_ns=job[0].taken_ns + 1_000_000)
    paths, notes = torch_dump.write(record.merge([*job, helper]), tmp_path)
    assert [path.name for path in paths] == ["rank_0", "rank_1", "rank_2"]
    assert notes == ["communicators left out: cd (of another run, whose records are 1.0 ms newer)"]


@pytest.mark.parametrize("pids", [(40, 40, 40), (40, 41, 42)])
def test_ranks_that_are_threads_are_left_out(pids: tuple[int, ...], tmp_path: Path) -> None:
    world = [made(rank, made_call(0), pid=pids[rank]) for rank in range(3)]
    pair = [made(rank, made_call(0), world_size=2, group=0xEF, pid=40) for rank in range(2)]
    _, notes = torch_dump.write(record.merge([*world, *pair]), tmp_path)
    assert notes == ["communicators left out: ef (its ranks are threads of one process)"]


def test_a_rank_without_a_record_needs_an_option_of_torchfrtrace(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    found = [made(rank, made_call(0), made_call(1, "in flight")) for rank in range(2)]
    _, notes = torch_dump.write(record.merge(found), tmp_path / "dumps")
    assert notes == ["no record of rank 2: torchfrtrace needs --allow-incomplete-ranks"]
    words = [str(tmp_path / "dumps"), "-o", str(tmp_path / "database")]
    with pytest.raises(AssertionError, match=r"Missing dump files from ranks \{2\}"):
        fr_trace.main(words)
    fr_trace.main([*words, "--allow-incomplete-ranks"])
    assert "we missed FR dumps from ranks ({2})" in caplog.text


def test_doctor_says_on_stderr_what_the_files_lack(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for rank in range(2):
        document = {"ringcomm_record": record._FORMAT, **record._plain(made(rank, made_call(0)))}
        (tmp_path / f"{rank}.json").write_text(json.dumps(document))
    files = [str(tmp_path / "0.json"), str(tmp_path / "1.json")]
    assert doctor.main([*files, "--torch", str(tmp_path / "dumps")]) == 0
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "dumps" / f"rank_{rank}") for rank in range(2)]
    assert said.err == "ringcomm doctor: no record of rank 2: torchfrtrace needs --allow-incomplete-ranks\n"


def test_files_of_other_ranks_are_not_left_beside(tmp_path: Path) -> None:
    three = record.merge([made(rank, made_call(0)) for rank in range(3)])
    two = record.merge([made(rank, made_call(0), world_size=2) for rank in range(2)])
    torch_dump.write(two, tmp_path)
    torch_dump.write(three, tmp_path)  # replaces all
    with pytest.raises(InvalidArgumentError, match=r"beside those of ranks 0, 1, got .* with those of rank 2, which"):
        torch_dump.write(two, tmp_path)


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="hold no communicator"):
        torch_dump.write([], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        torch_dump.write(record.merge([made(0, made_call(0))]), tmp_path / "file")
