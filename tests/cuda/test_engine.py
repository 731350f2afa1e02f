"""The CUDA engine under the Python face, on emulated devices: the very kernels, compiled for the host.

Each test runs in a Python of its own, which has the emulated `_C` (tests/support/emulated.py); what it runs is in
tests/support/cuda/cases.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.choice import choose, slow
from tests.support.emulated import call, module
from tests.support.reference import DTYPES

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="the engines need Linux"),
]
COUNTS = [0, 1, 7, 1000, 4099]
SMALL = "channels=2,slot_bytes=4096,stage_bytes=4096,p2p_channels=1,p2p_slot_bytes=4096"
HOME = "tests.support.cuda.cases"
KINDS = [  # ranks, devices that are emulated, device
    pytest.param("threads", 1, "cuda:0", id="threads-one-device"),
    pytest.param("threads", 2, "cuda", id="threads-two-devices"),
    pytest.param("processes", 1, "cuda:0", id="processes"),
]


def placed(*chosen: str) -> list[Any]:
    """`KINDS`, of which `make test` takes these: test_matrix and others have ranks that are threads on one device."""
    return [each if each.id in chosen else slow(*each.values, id=each.id) for each in KINDS]


def run(function: str, *arguments: object, devices: int = 1, **environment: str) -> str:
    return call(HOME, function, *arguments, RINGCOMM_EMULATED_DEVICES=str(devices), **environment)


@pytest.fixture(autouse=True, scope="module")
def built() -> Path:
    return module()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["all_reduce", "algorithm", "reduce", "reduce_scatter", "movement", "point_to_point"])
def test_matrix(name: str, world_size: int) -> None:
    counts = COUNTS if world_size < 8 else [1, 1000]
    dtypes = [*DTYPES, "complex64", "complex128"] if name in ("movement", "point_to_point") else list(DTYPES)
    run("cells", world_size, [f"{name}_cells"], dtypes, counts, "threads", "cuda:0")


@pytest.mark.parametrize(("kind", "devices", "device"), placed("processes")[1:])
def test_matrix_apart(kind: str, devices: int, device: str) -> None:
    names = ["all_reduce", "algorithm", "reduce", "reduce_scatter", "movement", "point_to_point"]
    cells = [f"{name}_cells" for name in names]
    run("cells", 3, cells, ["float32", "bfloat16", "int8"], [0, 7, 1000], kind, device, devices=devices)


def test_nothing_is_written_beside_the_arrays() -> None:
    run("guards", 2)


@pytest.mark.parametrize("kind", choose(["threads", "processes"], ["threads"]))
def test_every_method_gives_what_it_gives_on_the_cpu(kind: str) -> None:
    run("same_as_cpu", 3, kind)


@pytest.mark.parametrize("world_size", choose([2, 3, 5], [3]))  # the matrix has others
def test_the_bits_are_the_cpu_engines(world_size: int) -> None:
    run("same_bits_as_cpu", world_size)


@pytest.mark.parametrize(
    ("world_size", "kind", "devices", "device"),
    [
        pytest.param(12, "threads", 2, "cuda", id="12-on-two-devices", marks=pytest.mark.slow),
        pytest.param(32, "threads", 4, "cuda", id="32-on-four-devices", marks=pytest.mark.slow),
        pytest.param(9, "processes", 1, "cuda:0", id="9-processes"),
    ],
)
def test_many_ranks(world_size: int, kind: str, devices: int, device: str) -> None:
    run("many_ranks", world_size, kind, device, devices=devices, RINGCOMM_CUDA_LAYOUT=SMALL)


def test_memory_that_the_peers_do_not_see_is_staged() -> None:
    run("staged_bits", 3, RINGCOMM_CUDA_APART="2", RINGCOMM_CUDA_LAYOUT="stage_bytes=3072,channels=2")


@pytest.mark.parametrize("kind", choose(["threads", "processes"], ["processes"]))
def test_the_path_does_not_change_the_bits(kind: str) -> None:
    run("the_path_does_not_change_the_bits", 3, kind)


@pytest.mark.parametrize(("kind", "devices", "device"), placed("threads-one-device", "processes"))
def test_copies_without_a_kernel(kind: str, devices: int, device: str) -> None:
    said = run("copies", kind, device, devices=devices)
    assert (", 0 of them by direct" in said) == (devices == 1 and kind == "threads"), said


# Of 8 ranks one launch takes half of the messages that 3 have in one.
@pytest.mark.parametrize("world_size", choose([3, 8], [8]))
def test_lists(world_size: int) -> None:
    run("lists", world_size)


@pytest.mark.parametrize(("kind", "devices", "device"), placed("processes"))
def test_a_send_and_a_receive_at_once(kind: str, devices: int, device: str) -> None:
    run("sendrecv", kind, device, devices=devices)


@pytest.mark.parametrize(("kind", "devices", "device"), placed("processes"))
def test_a_message_of_another_dtype_is_refused(kind: str, devices: int, device: str) -> None:
    run("other_dtypes", kind, device, devices=devices)


def test_buckets() -> None:
    run("buckets")


@pytest.mark.parametrize(("kind", "devices", "device"), placed("threads-two-devices"))
def test_streams_memory_and_families(kind: str, devices: int, device: str) -> None:
    run("lives", kind, device, devices=devices)


def test_errors_of_calls_that_are_not_prepared() -> None:
    run("plain_errors")


def test_an_impatient_wait_leaves_the_call_in_flight() -> None:
    run("impatient_waits")


@pytest.mark.parametrize(("kind", "devices", "device"), placed("processes"))
def test_pools_of_torch(kind: str, devices: int, device: str) -> None:
    run("pools", kind, device, devices=devices)


def test_pools_need_a_torch_that_has_them() -> None:
    run("no_pools")


def test_bad_input() -> None:
    run("bad_input")


def test_cupy_arrays() -> None:
    run("cupy")


def test_places() -> None:
    run("places", devices=2)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_failures(kind: str) -> None:
    run("failures", kind)


def test_an_abort_is_seen_of_a_process_that_ends_at_once() -> None:
    # One copy for each of three flags; an abort waits for them for a second at most.
    run("given_up_and_gone", RINGCOMM_EMULATED_COPY_US="150000")


def test_native_names() -> None:
    run("native")


def test_commands(tmp_path: Path) -> None:
    said = run("commands", str(tmp_path))
    assert "2 ranks sharing one GPU (L2/HBM)" in said
    assert "RINGCOMM_TUNING=" in said


def test_ranks_with_other_settings_do_not_connect(tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("all_reduce 2 max direct 0 0\n")
    for variable, value in (("RINGCOMM_TUNING", str(tmp_path / "tuning")), ("RINGCOMM_CUDA_THREADS", "32")):
        run("unequal", variable, value)


def test_a_tuning_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    run("foreign_tuning", str(tmp_path / "tuning"))


def test_processes_on_one_device_are_told_what_it_costs() -> None:
    run("time_slices", True, RINGCOMM_EMULATED_NO_MPS="1")
    run("time_slices", False)


def test_no_driver() -> None:
    assert "cuda" in run("no_driver", RINGCOMM_EMULATED_NO_DRIVER="1")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_calls_are_counted_by_the_chosen_algorithm(kind: str) -> None:
    run("chosen", kind)
