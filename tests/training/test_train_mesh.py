"""The main job on meshes of four ranks: the same bits whatever cuts batch, layers and states; one process as a measure
for what cuts sums; interrupted on one mesh and taken up on another; flags that do not fit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import torch_ranks
from tests.support.choice import choose
from tests.support.training import runs
from tests.support.training.runs import EXAMPLES, checksum, example, final_losses, steps, train_everywhere, verdict

SMALL = (
    "--steps", "4", "--batch", "2", "--context", "32", "--layers", "4", "--dim", "32", "--heads", "4",
    "--bucket-mb", "0.02", "--clip", "0.5", "--sample", "0",
)  # fmt: skip
SAME = {  # meshes with four micro-batches in all
    "dp 4": "--dp 4",
    "dp 2 x pp 2, stage 3": "--dp 2 --pp 2 --micro-batches 2 --stage 3",
    "dp 2 x pp 2, GPipe, accumulation, stage 2": "--pp 2 --accumulate 2 --schedule gpipe --stage 2",
    "dp 2 x pp 2, interleaved, stage 1": "--pp 2 --micro-batches 2 --schedule interleaved --stage 1",
    "pp 4": "--pp 4 --micro-batches 4",
    "pp 4, zero bubble": "--pp 4 --micro-batches 4 --schedule zero-bubble",
}
CLOSE = {
    "tp 4": "--tp 4",
    "cp 4": "--cp 4 --micro-batches 2",
    "cp 2 x tp 2, sequence parallel, stage 3": "--cp 2 --tp 2 --sequence-parallel --micro-batches 2 --stage 3",
    "pp 2 x tp 2": "--pp 2 --tp 2 --micro-batches 2 --stage 1",
    "pp 2 x cp 2": "--pp 2 --cp 2 --micro-batches 2 --stage 1",
}
WRONG = {
    "--pp 3": "pp 3 on 4 ranks, expected axes whose product is 4",
    "--dp 2": "dp 2 on 4 ranks, expected axes whose product is 4",
    "--tp 4 --heads 2": "--heads 2 with --tp 4, expected a multiple",
    "--pp 4 --layers 6": "--layers 6 for 4 stages",
    "--pp 4 --schedule interleaved": "--layers 4 for 8 stages",
    "--cp 4 --context 20": "--context 20 with --cp 4, expected a multiple of 8",
    "--sequence-parallel": "--sequence-parallel without --tp",
    "--tp 4 --context 30 --sequence-parallel": "30 bytes on each --cp rank, expected a multiple of --tp",
    "--tp 0": "--tp 0, expected 1 or more",
    "--schedule gpipe": "--schedule gpipe without --pp",
    "--compare --pp 2": "expected none of these",
}


def train(*words: str) -> str:
    """What the first of four ranks prints."""
    text, status = runs.train(*SMALL, *words, world_size=4)
    assert status == 0, text
    return text


@pytest.fixture(scope="module")
def reference() -> str:
    """Data parallel, beside one process."""
    text = train("--check")
    assert verdict(text).endswith(": the same bits; expected the same bits")
    return text


# mesh/test_training.py has the other meshes and schedules, with another model.
@pytest.mark.parametrize("mesh", choose(SAME, ["dp 2 x pp 2, interleaved, stage 1"]))
def test_the_mesh_changes_no_bit(mesh: str, reference: str) -> None:
    text = train(*SAME[mesh].split())
    assert len(steps(text)) == 4
    assert steps(text) == steps(reference)
    assert checksum(text) == checksum(reference)


@pytest.mark.parametrize("mesh", choose(CLOSE, ["cp 2 x tp 2, sequence parallel, stage 3"]))
def test_it_stays_close_to_one_process(mesh: str) -> None:
    said = verdict(train(*CLOSE[mesh].split(), "--check"))
    found = re.search(r"loss off by (\S+) of itself, parameters by up to (\S+);", said)
    assert found is not None, said
    assert float(found[1]) < 1e-6
    assert 0 < float(found[2]) < 2e-3  # 0 would be one process again


def test_one_process_is_plain_torch() -> None:
    text = train("--pp", "2", "--lr", "0.01", "--clip", "0")
    found = torch_ranks.run(plain, world_size=4, backend="")
    assert found == [(checksum(text), final_losses(text)["ringcomm"])] * 4


def plain() -> tuple[str, str]:
    """The same training with nothing of ours but data and order: two micro-batches in each of four steps."""
    import ringcomm

    train_gpt, gpt, training = (example(name) for name in ("train_gpt", "gpt", "training"))
    mesh = ringcomm.init_mesh({"pp": 1, "dp": 1, "cp": 1, "tp": 1}, ringcomm.init(0, 1))
    batches = example("text").Batches(train_gpt.read_text(None), 2, 2, 32, 0, mesh)
    torch.manual_seed(0)
    model = gpt.GPT(4, 32, 4, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: training.learning_rate(step, 4))
    losses = []
    for _ in range(4):
        for x, y in batches.draw():
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return example("mesh").checksum(model.state_dict()), f"{sum(losses) / len(losses):.5f}"


def test_the_check_sees_the_last_bit() -> None:
    text, status = train_everywhere(*SMALL, "--check", world_size=2, change=nudge)[0]
    assert status == 1
    assert re.search(r"loss off by 0.0e\+00 of itself, parameters by up to \S+; expected the same bits", verdict(text))


def nudge(state: dict[str, torch.Tensor]) -> None:
    """One element of one parameter by its last bit."""
    flat = state["blocks.2.norm1.weight"].view(-1)
    flat[3] = torch.nextafter(flat[3], torch.tensor(9.0))


def test_another_mesh_goes_on_with_the_same_bits(reference: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    first = train("--pp", "2", "--micro-batches", "2", "--stage", "3", "--until", "2", "--save", saved)
    text = train("--stage", "2", "--resume", saved)
    assert steps(first) + steps(text) == steps(reference)
    assert checksum(text) == checksum(reference)


@pytest.mark.slow  # mesh/test_checkpoint.py loads parts of layers on other meshes
def test_another_mesh_goes_on_with_parts_of_layers(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    train("--tp", "2", "--micro-batches", "2", "--stage", "2", "--until", "2", "--save", saved)
    text = train("--pp", "2", "--micro-batches", "2", "--resume", saved, "--check")
    assert [number for number, _ in steps(text)] == ["2", "3"]
    assert verdict(text).endswith(": the same bits; expected the same bits")  # one process went on from there too


@pytest.mark.parametrize("words", WRONG)
def test_flags_that_do_not_fit(words: str) -> None:
    (text, status), *others = train_everywhere(*SMALL, *words.split(), world_size=4)
    assert status == 2
    assert others == [("", 2)] * 3
    assert text.startswith("train_gpt: got ")
    assert WRONG[words] in text
    assert text.count("\n") == 1


@pytest.mark.slow  # as test_train_gpt.py does with another layout
def test_it_runs_under_torchrun_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    words = ["--pp", "3", "--layers", "3", "--micro-batches", "2", "--check", "--json", str(file)]
    done = subprocess.run(
        [*command, str(EXAMPLES / "train_gpt.py"), *SMALL, *words],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 ranks (pp 3), 128 tokens per step" in done.stdout
    found = json.loads(file.read_text())
    assert found["parameters"] == checksum(done.stdout)
    assert len(found["losses"]) == 4
    assert found["mesh"] == {"pp": 3, "dp": 1, "cp": 1, "tp": 1}
    assert len(found["kept_mib"]) == len(found["peak_mib"]) == 3
    assert sum(found["kept_mib"]) < 1.5 * 4 * 4 * sum(p.numel() for p in model().parameters()) / 2**20
    assert all(peak >= 0 for peak in found["peak_mib"])
    assert found["tokens_per_s"] > 0


def model() -> torch.nn.Module:
    """That of the run above."""
    made: torch.nn.Module = example("gpt").GPT(3, 32, 4, 32)
    return made
