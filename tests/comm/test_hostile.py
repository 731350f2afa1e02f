"""Bytes through which ranks meet, changed, cut off, foreign or of another version: refused with a word, at once, on
every rank that gets them. RINGCOMM_FUZZ=100 draws a hundred times as many examples."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe, current_process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ringcomm
from ringcomm import _C, errors
from ringcomm.comm import launch
from ringcomm.comm.hosts import identity
from ringcomm.comm.store import add_checksum, strip_checksum
from tests.support import emulated
from tests.support.choice import drawn
from tests.support.hostile.refusals import refusal

LIMIT_MS = 600_000  # whoever waits for it instead of refusing fails by the test's own limit


# ---- how bytes go wrong ------------------------------------------------------------------------------------------

Change = Callable[[bytes], bytes]


def _flip(at: int, bit: int) -> Change:
    def change(right: bytes) -> bytes:
        wrong = bytearray(right)
        wrong[at % len(wrong)] ^= 1 << bit
        return bytes(wrong)

    return change


def _field(at: int, value: bytes) -> Change:
    """Another value of one of the words that a handle consists of."""

    def change(right: bytes) -> bytes:
        words = right.split(b" ")
        words[at % len(words)] = value
        return b" ".join(words)

    return change


NUMBERS = (b"-1", b"0", b"1", b"2147483647", b"18446744073709551615", b"9" * 40, b"1e9", b"0x10", b"+3", b"nan", b"")
CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(_flip, st.integers(0, 10_000), st.integers(0, 7)),
    st.builds(_field, st.integers(0, 30), st.sampled_from(NUMBERS)),
    st.integers(0, 10_000).map(lambda n: lambda right: right[: n % len(right)]),
    st.binary(min_size=1, max_size=40).map(lambda more: lambda right: right + more),
    st.binary(min_size=1, max_size=40).map(lambda more: lambda right: more + right),
    st.binary(max_size=300).map(lambda other: lambda right: other),
    st.sampled_from([b"\0", b"\n", b"\xff", b"  "]).map(lambda other: lambda right: right.replace(b" ", other)),
    st.sampled_from([b"ringcomm-cpu-2 ", b"ringcomm-cuda-1 "]).map(
        lambda old: lambda right: old + right.partition(b" ")[2]
    ),
)


def changed(right: bytes, change: Change) -> bytes:
    """The bytes after a change; where it changes nothing, without their last one."""
    wrong = change(right)
    return wrong if wrong != right else right[:-1]


# ---- handles of engines ------------------------------------------------------------------------------------------


def engines(kind: str, world_size: int, limit_ms: int = LIMIT_MS) -> list[_C.Engine]:
    return [_C.Engine(kind, rank, world_size, limit_ms) for rank in range(world_size)]


def is_refused(kind: str, change: Change) -> None:
    """Either rank of two refuses handles of which one was changed."""
    for rank in range(2):
        ends = engines(kind, 2)
        handles = [end.handle() for end in ends]
        handles[1 - rank] = changed(handles[1 - rank], change)
        assert f"rank {rank}" in refusal(partial(ends[rank].connect, handles))


@given(CHANGES)
@drawn(300)
def test_a_changed_handle_is_refused(change: Change) -> None:
    is_refused("cpu", change)


def emulated_handles(examples: int) -> None:
    """On an emulated GPU, in a Python that has one."""
    drawn(examples)(given(CHANGES)(lambda change: is_refused("cuda", change)))()


@pytest.mark.timeout(900)  # the first to come builds the emulated engine
def test_a_changed_handle_of_a_gpu_is_refused() -> None:
    emulated.call("tests.comm.test_hostile", "emulated_handles", 12)


@pytest.mark.parametrize("kind", ["cpu"])
def test_handles_of_others_are_refused(kind: str) -> None:
    def refused(pick: Callable[[list[bytes], list[bytes]], list[bytes]]) -> str:
        ends, others = engines(kind, 2), engines(kind, 2)
        mine, theirs = ([end.handle() for end in each] for each in (ends, others))
        return refusal(lambda: ends[0].connect(pick(mine, theirs)))

    assert "its own handle" in refused(lambda mine, theirs: mine[::-1])
    assert "rank order" in refused(lambda mine, theirs: [mine[0], mine[0]])
    assert "2 handles" in refused(lambda mine, theirs: mine[:1])
    assert "2 handles" in refused(lambda mine, theirs: [*mine, *mine])
    assert "its own handle" in refused(lambda mine, theirs: theirs)


def with_words(handle: bytes, **words: Any) -> bytes:
    """A handle of the cpu engine with changed words and a valid checksum, as from a malicious or dead rank."""
    word, _, text = handle.decode().split(" ", 2)
    names = ("machine", "rank", "world_size", "pid", "fd", "nonce", "process", "slot_bytes", "p2p_slot_bytes")
    found = dict(zip(names, text.split(" "), strict=True)) | {name: str(value) for name, value in words.items()}
    text = " ".join(found.values())
    checksum = 0xCBF29CE484222325
    for byte in text.encode():
        checksum = (checksum ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{word} {checksum:016x} {text}".encode()


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Open files of this process that are no rank's memory."""
    other = _C.Engine("cpu", 0, 2, LIMIT_MS)
    (tmp_path / "large").write_bytes(bytes(64 << 20))
    reads, writes = os.pipe()
    ends = socket.socketpair()
    found = {
        "a folder": os.open(tmp_path, os.O_RDONLY),
        "another file": os.open(tmp_path / "large", os.O_RDWR),
        "a small file": os.memfd_create("small"),
        "a pipe": reads,
        "a socket": ends[0].fileno(),
        "another engine's memory": int(other.handle().split()[6]),
        "a device": os.open("/dev/zero", os.O_RDWR),
        "none": 1_000_000,
    }
    yield found
    for name in ("a folder", "another file", "a small file", "a device"):
        os.close(found[name])
    os.close(reads), os.close(writes)
    for end in ends:
        end.close()


def test_memory_that_is_not_what_a_handle_says_is_refused(descriptors: dict[str, int]) -> None:
    for what, fd in descriptors.items():
        ends = engines("cpu", 2)
        lie = with_words(ends[1].handle(), process=1, fd=fd)
        text = refusal(partial(ends[0].connect, [ends[0].handle(), lie]))
        assert "rank 0" in text or "process" in text, f"{what}: {text}"


@pytest.mark.parametrize("pid", [1, -1, 0, os.getppid(), 2**22 - 1, 2**31 - 1])
def test_memory_of_another_process_is_refused(pid: int) -> None:
    ends = engines("cpu", 2)
    lie = with_words(ends[1].handle(), process=1, pid=pid)
    refusal(lambda: ends[0].connect([ends[0].handle(), lie]), errors.RankLostError)  # lost, if there is no such process


@pytest.mark.parametrize("nbytes", [0, 4096, 1 << 40, (1 << 64) - 1])
def test_slots_of_another_length_are_refused(nbytes: int) -> None:
    for which in ("slot_bytes", "p2p_slot_bytes"):
        ends = engines("cpu", 2)
        lie = with_words(ends[1].handle(), **{which: nbytes})
        assert "same options" in refusal(partial(ends[0].connect, [ends[0].handle(), lie]))


def test_a_rank_that_waits_for_one_with_bad_handles_is_told() -> None:
    ends = engines("cpu", 2)
    handles = [end.handle() for end in ends]
    refusal(lambda: ends[0].connect([handles[0] + b"x", handles[1]]))
    with pytest.raises(errors.AbortedError, match=r"rank 1 expected 2 ranks to attach.*this version of the cpu engine"):
        ends[1].connect(handles)


# ---- stores ------------------------------------------------------------------------------------------------------


def joins(store: Any, rank: int = 0, world_size: int = 2) -> Callable[[], Any]:
    return lambda: ringcomm.init(rank, world_size, store=store, timeout=LIMIT_MS / 1e3)


@given(st.sampled_from(["host", "handle"]), CHANGES)
@drawn(200)
def test_a_changed_message_in_the_store_is_refused(what: str, change: Change) -> None:
    store, other = dist.HashStore(), _C.Engine("cpu", 1, 2, LIMIT_MS)
    messages = {"host": add_checksum(identity().encode(), 2), "handle": add_checksum(other.handle(), 2)}
    messages[what] = changed(messages[what], change)
    for key, message in messages.items():
        store.set(f"ringcomm/init/{key}/1/1", message)
    assert "rank 0" in refusal(joins(store))


@given(st.binary(max_size=100), st.integers(1, 1 << 20), CHANGES)
@drawn(200)
def test_a_checksum_matches_its_own_message_alone(payload: bytes, world_size: int, change: Change) -> None:
    value = add_checksum(payload, world_size)
    assert strip_checksum(value, "init", 0, 1) == (world_size, payload)
    refusal(lambda: strip_checksum(changed(value, change), "init", 0, 1))


@pytest.mark.parametrize("left", ["abc", "-5", "9" * 40, "\0", "-" + "9" * 40])
@pytest.mark.parametrize("kind", ["hash", "file"])
def test_a_foreign_count_in_the_store_is_refused(kind: str, left: str, tmp_path: Path) -> None:
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 2)
    store.set("ringcomm/init/host/generation/0", left)
    assert "a store that no other program uses" in refusal(joins(store))


@pytest.mark.parametrize("content", [b"no store", b"\xff" * 300, b"\5" * 41, bytes(7), b"#!/bin/sh\n" * 20])
def test_a_file_that_is_no_store_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "ranks").write_bytes(content)
    assert "another file" in refusal(lambda: ringcomm.init(0, 2, init_method=f"file://{tmp_path}/ranks", timeout=600))
    assert (tmp_path / "ranks").read_bytes() == content


@given(CHANGES)
@drawn(50)
def test_a_changed_message_to_a_process_group_is_refused(change: Change) -> None:
    from ringcomm import backend

    store = dist.HashStore()
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, 0, 2
    options.timeout, options.group_id, options.global_ranks_in_group = dist.constants.default_pg_timeout, "g", [0, 1]
    store.set(f"{backend.keys_of('ringcomm', [0, 1])}/host/1/1", changed(add_checksum(identity().encode(), 2), change))
    assert "rank 0" in refusal(lambda: backend.create(options))


# ---- what is said by hand ----------------------------------------------------------------------------------------

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RINGCOMM_HOST", "RINGCOMM_WIRE_DTYPE")
ENVIRONMENTS = [
    {"RANK": "0", "WORLD_SIZE": "9" * 5000},
    {"RANK": "0", "WORLD_SIZE": "1" + "0" * 12},
    {"RANK": "0", "WORLD_SIZE": "-2"},
    {"RANK": "1.0", "WORLD_SIZE": "2"},
    {"RANK": "\udcff", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999999"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "port"},
    {"RINGCOMM_WIRE_DTYPE": "int64"},
    {"RINGCOMM_WIRE_DTYPE": "\udcff"},
]


@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=lambda each: ",".join(f"{k}={v[:9]!a}" for k, v in each.items())
)
def test_a_wrong_environment_is_refused(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    refusal(lambda: ringcomm.init(timeout=600))


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\udcff"])
def test_a_wrong_name_of_a_host_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_HOST", name)
    assert "printable" in refusal(joins(dist.HashStore()))


NO_PLACES = [("0", 2), (0, "2"), (0.0, 2), (True, 2), (0, 1 << 40), (0, 1 << 2000), (0, -1), (-1, 2), (2, 2), (None, 2)]


@pytest.mark.parametrize(("rank", "world_size"), NO_PLACES, ids=[ascii(each)[:30] for each in NO_PLACES])
def test_an_invalid_rank_or_world_size_is_refused(rank: Any, world_size: Any) -> None:
    refusal(joins(dist.HashStore(), rank, world_size))


NO_OPTIONS: list[dict[str, Any]] = [
    {"timeout": float("nan")},
    {"timeout": True},
    {"timeout": 1 << 5000},
    {"engine": 3},
    {"device": 3.5},
    {"device": "cuda:" + "9" * 30},
    {"network": 3},
    {"network": ""},
    {"wire_dtype": torch.int8},
    {"store": 3},
    {"init_method": 3},
    {"init_method": "foo://bar"},
    {"init_method": "tcp://[::"},
    {"init_method": "file:///tmp\0x"},
]


@pytest.mark.parametrize("options", NO_OPTIONS, ids=lambda options: ascii(options)[:40])
def test_a_wrong_option_of_init_is_refused(options: dict[str, Any]) -> None:
    refusal(lambda: ringcomm.init(0, 2, **{"timeout": 600, **options}))


NO_RUNS: list[dict[str, Any]] = [
    {"world_size": 0},
    {"world_size": 1 << 200},
    {"world_size": 2.0},
    {"world_size": True},
    {"ranks": 3},
    {"ranks": np.zeros(3)},
    {"args": 3},
    {"hosts": "ab"},
    {"hosts": [1]},
    {"hosts": [1 << 200]},
    {"hosts": 3},
    {"timeout": -1},
    {"wire_dtype": "x\0"},
    {"device": []},
    {"return_exceptions": 1},
    {"fn": 3},
]


@pytest.mark.parametrize("options", NO_RUNS, ids=lambda options: ascii(options)[:40])
def test_a_wrong_option_of_run_ranks_is_refused(options: dict[str, Any]) -> None:
    refusal(lambda: ringcomm.run_ranks(**{"fn": len, "world_size": 2, **options}), TypeError, ValueError)


# ---- pipes of run_ranks ------------------------------------------------------------------------------------------

MESSAGES = [b"", b"x", b"\x80\x04.", pickle.dumps(3), pickle.dumps(("word", 1)), pickle.dumps(("error", 1)), bytes(99)]


def _of_rank_0(ours: Any) -> launch._Processes:
    """A run of one rank; the test holds the other end of its pipe."""
    ranks = launch._Processes(1, returns_errors=False)
    ranks.processes.append(current_process())
    ranks.pipes[ours] = ranks.open[ours] = 0
    return ranks


@given(st.one_of(st.binary(max_size=100), st.sampled_from(MESSAGES)))
@drawn(100)
def test_a_malformed_message_fails_its_rank(message: bytes) -> None:
    ours, theirs = Pipe()
    ranks = _of_rank_0(ours)
    theirs.send_bytes(message)
    ranks.receive(ours)
    assert not ranks.open
    with pytest.raises(errors.RankFailedError, match=r"rank 0 .* does not load"):
        ranks.run()
    for end in (ours, theirs):
        end.close()


def test_a_huge_announced_length_fails_its_rank() -> None:
    ours, theirs = Pipe()
    ranks = _of_rank_0(ours)
    os.write(theirs.fileno(), b"\xff\xff\xff\xff" + b"\x7f" + b"\xff" * 7)
    ranks.receive(ours)
    with pytest.raises(errors.RankFailedError, match="rank 0"):
        ranks.run()
    for end in (ours, theirs):
        end.close()


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A checkpoint's files."""
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("saved") / "c"
    dcp.save({"a": torch.arange(6.0).view(2, 3), "n": {"step": 3}}, checkpoint_id=folder, no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def reads(files: dict[str, bytes]) -> Callable[[], Any]:
    """Reads all of a checkpoint that has these files."""
    from ringcomm.checkpoint.files import Source

    def read() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            source = Source(Path(folder), "load", 0)
            return {name: source.tensor(name) for name in source.tensors}

    return read


def test_a_checkpoint_as_it_was_saved_is_read(saved: dict[str, bytes]) -> None:
    assert reads(saved)()["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


@given(st.one_of(st.binary(max_size=200), st.integers(0, 5000)))
@drawn(150)
def test_wrong_metadata_is_refused(saved: dict[str, bytes], wrong: bytes | int) -> None:
    whole = saved[".metadata"]
    damaged = wrong if isinstance(wrong, bytes) else whole[: wrong % len(whole)]
    assert "damaged" in refusal(reads({**saved, ".metadata": damaged}))


def with_metadata(saved: dict[str, bytes], change: Callable[[Any], Any]) -> dict[str, bytes]:
    metadata = pickle.loads(saved[".metadata"])
    change(metadata)
    return {**saved, ".metadata": pickle.dumps(metadata)}


class Runs:
    """Runs something as it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code of a checkpoint was run",)


def _elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"


def _huge(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].size = torch.Size([1 << 40, 1 << 20])


LIES: dict[str, Callable[[Any], Any]] = {
    "runs code": lambda m: setattr(m, "planner_data", Runs()),
    "another folder": _elsewhere,
    "huge": _huge,
    "no tensor": lambda m: m.state_dict_metadata.update(a=3),
    "no names": lambda m: setattr(m, "state_dict_metadata", [1, 2]),
    "box outside": lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "offsets", torch.Size([5, 5])),
    "box of other dimensions": lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "sizes", torch.Size([6])),
    "nowhere": lambda m: m.storage_data.clear(),
}


@pytest.mark.parametrize("lie", LIES)
def test_false_metadata_is_refused(lie: str, saved: dict[str, bytes]) -> None:
    assert "damaged" in refusal(reads(with_metadata(saved, LIES[lie])))


@pytest.mark.parametrize(
    "content", [b"", b"3", b"{}", b'{"crc32c": 3}', b'{"crc32c": {".metadata": 1}}', b"\xff", b"[" * 9999]
)
def test_wrong_checksums_are_refused(content: bytes, saved: dict[str, bytes]) -> None:
    assert "damaged" in refusal(reads({**saved, "checksums.json": content}))


TUNINGS = [
    "all_reduce 2 max direct -1 0",
    "all_reduce 2 99999999999999999999999 direct 0 0",
    "all_reduce 0 max direct 0 0",
    "all_reduce 2 max ring 0 0",
    "all_reduce 2 max direct 0 0 0",
    "all_reduce\0 2 max direct 0 0",
    "\xff\xfe",
]
LAYOUTS = [
    "channels",
    "channels=",
    "channels=-1",
    "channels=9999999999",
    "x=1",
    "channels=0",
    "=",
    "depth=0",
]


def emulated_settings(folder: str) -> None:
    """On an emulated GPU, in a Python that has one."""
    path = Path(folder) / "tuning"
    os.environ["RINGCOMM_TUNING"] = str(path)
    for tuning in TUNINGS:
        path.write_bytes(tuning.encode("latin-1"))
        refusal(lambda: _C.Engine("cuda", 0, 2, LIMIT_MS))
    del os.environ["RINGCOMM_TUNING"]
    for layout in LAYOUTS:
        os.environ["RINGCOMM_CUDA_LAYOUT"] = layout
        refusal(lambda: _C.Engine("cuda", 0, 2, LIMIT_MS))


@pytest.mark.timeout(900)  # the first to come builds the emulated engine
def test_wrong_files_and_layouts_of_a_gpu_are_refused(tmp_path: Path) -> None:
    emulated.call("tests.comm.test_hostile", "emulated_settings", str(tmp_path))
