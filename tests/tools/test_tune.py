"""`ringcomm tune` without a device: what it chooses from given times, the lines it writes, and what it refuses."""

from __future__ import annotations

import pytest

from ringcomm import _C
from ringcomm.tools import cli, tune
from ringcomm.tools.tune import Candidate, choose, entries

SMALL, LARGE = Candidate("oneshot"), Candidate("direct")
WIDE = Candidate("direct", 16, 512)


def test_candidates_are_every_combination_once() -> None:
    found = tune.candidates("all_reduce", (0, 8), (0, 256))
    assert len(found) == len(set(found)) == 2 * 4
    assert found[:2] == [SMALL, LARGE]
    assert not tune.fits(SMALL, 1 << 24)
    assert tune.fits(LARGE, 1 << 24)


def test_copies_without_a_kernel_have_no_channels() -> None:
    found = tune.candidates("all_to_all", (0, 8), (0, 256))
    assert [each for each in found if each.algorithm == "copy_engine"] == [Candidate("copy_engine")]
    assert len(found) == 1 + 4


def test_the_fastest_is_chosen_where_it_gains() -> None:
    times = {
        SMALL: {1024: 5e-6, 16384: 50e-6},
        LARGE: {1024: 9e-6, 16384: 20e-6, 1 << 24: 100e-6},
        WIDE: {1024: 8e-6, 16384: 19.9e-6, 1 << 24: 60e-6},
    }
    chosen = choose(times, (1024, 16384, 1 << 24))
    assert chosen == [(1024, SMALL), (16384, LARGE), (1 << 24, WIDE)]  # 0.5 % is no reason to name channels
    lines = entries("all_reduce", 4, chosen)
    assert [line.split() for line in lines] == [
        ["all_reduce", "4", "4096", "oneshot", "0", "0"],
        ["all_reduce", "4", str(1 << 19), "direct", "0", "0"],
        ["all_reduce", "4", "max", "direct", "16", "512"],
    ]


def test_the_file_names_what_all_its_groups_have() -> None:
    device, nvlink, pcie = "device NVIDIA H200\n", "links nvlink\n", "links pcie\n"
    assert tune._common({device, nvlink}) == [device, nvlink]
    assert tune._common({device, nvlink, pcie}) == [device]


def test_neighbours_of_one_choice_share_a_line() -> None:
    lines = entries("all_gather", 2, [(1024, LARGE), (4096, LARGE), (16384, LARGE)])
    assert [line.split() for line in lines] == [["all_gather", "2", "max", "direct", "0", "0"]]


@pytest.mark.parametrize(
    "words",
    [["fly"], ["-f", "1"], ["-b", "10"], ["--channels", "a"], ["-o", "/nowhere/at/all"], ["-b", "2K", "-e", "1K"]],
)
def test_wrong_flags_end_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main(words)
    assert caught.value.code == 2


def test_the_error_says_what_cannot_be_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--device", "cpu"]) == 2
    assert "expected cuda" in capsys.readouterr().err
    if _C.why_no_cuda():
        assert cli.main(["tune"]) == 2
        assert _C.why_no_cuda() in capsys.readouterr().err
