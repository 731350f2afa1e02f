"""NCCL between hosts, without a GPU: the transport on emulated devices over a fake of NCCL, which says where it is
misused, and what is said of a library that is not there or too old. tests/cpp/cuda/nccl_test.cpp has the transport
alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ringcomm import _C, errors
from ringcomm.comm import nccl
from tests.support import emulated
from tests.support.choice import choose, slow

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="the engines need Linux"),
]
HOME = "tests.support.hierarchy.nccl_cases"
needs_cuda_build = pytest.mark.skipif("no CUDA engine" in _C.why_no_nccl(""), reason=_C.why_no_nccl(""))


@pytest.fixture(scope="module")
def fake() -> Path:
    """The fake libnccl.so.2, built beside the emulated `_C`."""
    return emulated.build("", "_C", "fake_nccl") / "fake_nccl" / "libnccl.so.2"


def run(fake: Path, function: str, *arguments: object, devices: int = 4, **environment: str) -> str:
    environment = {"RINGCOMM_EMULATED_DEVICES": str(devices), "RINGCOMM_NCCL": str(fake), **environment}
    return emulated.call(HOME, function, *arguments, limit_s=200, **environment)


@pytest.mark.parametrize("hosts", choose([[1, 1], [2, 2], [2, 1, 1]], [[2, 1, 1]]), ids=str)
def test_collectives_between_hosts_have_the_bits_of_one_host(fake: Path, hosts: list[int]) -> None:
    run(fake, "same_bits_as_cpu", hosts, ["float32", "bfloat16", "int8"], [1, 1000])


def test_an_error_of_nccl_names_the_peer(fake: Path) -> None:
    run(fake, "failures", devices=2)


@pytest.mark.parametrize(("number", "version"), [slow("21705", "2.17.5"), ("21799", "2.17.99")])
def test_an_old_nccl_is_refused(fake: Path, number: str, version: str) -> None:
    run(fake, "refused", version, devices=2, FAKE_NCCL_VERSION=number)


def test_combine_and_casts_on_devices(fake: Path) -> None:
    run(fake, "packing", devices=1)


@needs_cuda_build
def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_NCCL", "/nowhere/libnccl.so.2")
    usable, text = nccl.facts()
    assert not usable
    for part in ("/nowhere/libnccl.so.2", "nvidia-nccl-cu13", "RINGCOMM_NCCL"):
        assert part in text
    with pytest.raises(errors.UnsupportedError, match="nowhere"):
        _C.nccl_unique_id("/nowhere/libnccl.so.2")


@needs_cuda_build
def test_a_library_that_is_not_nccl() -> None:
    assert _C.__file__ is not None
    assert "expected ncclGetVersion" in _C.why_no_nccl(_C.__file__)


def test_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    monkeypatch.delenv("RINGCOMM_NCCL", raising=False)
    monkeypatch.setattr(nccl, "_packages", lambda: [tmp_path / "nothing", folder.parent])
    assert nccl.path() == str(folder / "libnccl.so.2")
    monkeypatch.setattr(nccl, "_packages", list)
    assert nccl.path() == ""
    monkeypatch.setenv("RINGCOMM_NCCL", "/some/where")
    assert nccl.path() == "/some/where"
