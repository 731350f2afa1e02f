"""state_dict() and load_state_dict() of a sharded module and of its parts: ordinary names, shapes and values."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ringcomm

WORLD = 3
BF16 = ringcomm.MixedPrecision(torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 5)) for _ in range(3))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_saved_tensor_is_no_larger_than_itself(stage: int, tmp_path: Path) -> None:
    """What saves tensors looks at their storages: safetensors refuses larger ones, torch.save saves them."""

    def check(model: Any, expected: dict[str, torch.Tensor]) -> None:
        where = tmp_path / f"{threading.get_ident()}"
        safetensors.torch.save_model(model, str(where))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        safetensors.torch.load_model(model, str(where))
        saved = io.BytesIO()
        torch.save({k: x for k, x in model.state_dict().items() if k == "head.weight"}, saved)
        assert len(saved.getvalue()) < 2500
        for name, x in model.state_dict().items():
            assert torch.equal(x, expected[name])

    on_ranks(check, stage)


def on_ranks(check: Callable[..., None], stage: int, **options: Any) -> None:
    models = []
    for _ in range(WORLD):
        torch.manual_seed(0)
        models.append(Net())

    def rank(comm: ringcomm.Communicator) -> None:
        model = models[comm.rank]
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        ringcomm.shard(model, None, stage, comm, bucket_cap_mb=0.0002, **options)
        check(model, expected)

    ringcomm.run_ranks(rank, WORLD, timeout=20)


def same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], prefix: str = "", times: float = 1) -> None:
    for name, value in state.items():
        wanted = expected[prefix + name]
        assert value.dtype == wanted.dtype, name
        assert torch.equal(value, wanted * times if value.is_floating_point() else wanted), name


def of_the_whole_and_its_parts(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    assert list(model.state_dict()) == list(expected)
    same(model.state_dict(), expected)
    same(model.blocks.state_dict(), expected, "blocks.")
    same(model.blocks[1].state_dict(), expected, "blocks.1.")


def into_the_whole_and_its_parts(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    twice = {name: value * 2 if value.is_floating_point() else value for name, value in expected.items()}
    model.load_state_dict(twice)
    same(model.state_dict(), twice)
    model.blocks[2].load_state_dict({name: expected[f"blocks.2.{name}"] * 6 for name in model.blocks[2].state_dict()})
    same(model.blocks[2].state_dict(), expected, "blocks.2.", 6)
    same(model.blocks[0].state_dict(), twice, "blocks.0.")


def some_that_do_not_fit(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """The same errors as from torch, which loads the others."""
    wrong = {name: value * 2 if value.is_floating_point() else value for name, value in expected.items()}
    wrong |= {"blocks.2.0.weight": torch.ones(1, 5), "blocks.2.0.bias": torch.ones(3), "scale": torch.ones(1)}
    wrong |= {"blocks.0.1.bias": torch.empty(5, device="meta"), "blocks.1.1.bias": 1}
    plain = Net()
    plain.load_state_dict(expected)
    with pytest.raises(RuntimeError) as in_torch:
        plain.load_state_dict(wrong)
    with pytest.raises(RuntimeError) as found:
        model.load_state_dict(wrong)
    assert sorted(str(found.value).split("\n")) == sorted(str(in_torch.value).split("\n"))
    same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "check", [of_the_whole_and_its_parts, into_the_whole_and_its_parts, some_that_do_not_fit], ids=lambda f: f.__name__
)
def test_state_dicts_are_ordinary(
    check: Callable[..., None], stage: int, precision: ringcomm.MixedPrecision | None
) -> None:
    on_ranks(check, stage, mixed_precision=precision)


def wrapped(model: Net, way: int | str, comm: ringcomm.Communicator) -> Net:
    """The model, wrapped at a stage or by `fully_shard`, with its blocks as units."""
    if isinstance(way, int):
        ringcomm.shard(model, None, way, comm, units=list(model.blocks))
    else:
        for block in model.blocks:
            ringcomm.fully_shard(block, comm=comm)
        ringcomm.fully_shard(model, comm=comm)
    return model


@pytest.mark.parametrize("way", [0, 1, 2, 3, "fully_shard"])
@pytest.mark.parametrize("names", ["prefixed", "none"])
def test_a_rank_with_a_file_of_other_names_leaves_no_other_rank_waiting(way: int | str, names: str) -> None:
    nets = [Net() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        model = wrapped(nets[comm.rank], way, comm)
        twos = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
        if comm.rank == 1:
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict({f"module.{name}": x for name, x in twos.items()} if names == "prefixed" else {})
        else:
            model.load_state_dict(twos)
        comm.barrier()

    ringcomm.run_ranks(rank, WORLD, ranks="threads", timeout=10)


@pytest.mark.parametrize("way", [0, 1, 2, 3, "fully_shard"])
def test_a_hook_of_an_inner_module_mends_a_value(way: int | str) -> None:
    def rank(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2))

        def mend(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            state[prefix + "weight"] = state[prefix + "weight"].view(2, 3)

        model[1].register_load_state_dict_pre_hook(mend)
        if isinstance(way, int):
            ringcomm.shard(model, None, way, comm)
        else:
            for unit in (*model, model):
                ringcomm.fully_shard(unit, comm=comm)
        file = {name: torch.full_like(x, 2) for name, x in model.state_dict().items()} | {"1.weight": torch.arange(6.0)}
        model.load_state_dict(file)
        return [x.clone() for x in model.state_dict().values()]

    for found in ringcomm.run_ranks(rank, 2, ranks="threads", timeout=10):
        assert torch.equal(found[2], torch.arange(6.0).view(2, 3))
        assert all((x == 2).all() for x in (found[0], found[1], found[3]))


@pytest.mark.parametrize("way", [0, 1, 2, 3, "fully_shard"])
def test_a_rank_with_a_file_that_does_not_fit_leaves_no_other_rank_waiting(way: int | str) -> None:
    nets = [Net() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        model = wrapped(nets[comm.rank], way, comm)
        twos = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
        for part, prefix in ((model, ""), (model.blocks[1], "blocks.1.")):
            file = {name.removeprefix(prefix): value for name, value in twos.items() if name.startswith(prefix)}
            if comm.rank == 1:
                file |= {name: value[:1] for name, value in file.items() if (prefix + name).startswith("blocks.1")}
                with pytest.raises(RuntimeError, match="size mismatch"):
                    part.load_state_dict(file)
            else:
                part.load_state_dict(file)
            comm.barrier()
        for name, value in model.state_dict().items():
            assert name.startswith("blocks.1") or (value == 2).all(), name

    ringcomm.run_ranks(rank, WORLD, ranks="threads", timeout=10)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_number_that_was_saved_as_a_vector_is_loaded(stage: int) -> None:
    """As torch did before 0.4, and as its load_state_dict accepts."""

    def check(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
        model.load_state_dict({name: value + 1 for name, value in expected.items()} | {"scale": torch.tensor([2.5])})
        same(model.state_dict(), {name: value + 1 for name, value in expected.items()})

    on_ranks(check, stage)


def test_the_state_dict_of_an_inner_module_is_read_by_all_ranks() -> None:
    def check(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
        part = model.blocks[0][0].state_dict()["weight"]
        assert torch.equal(part + 0, expected["blocks.0.0.weight"])
        with pytest.raises(ringcomm.InvalidArgumentError, match=r"got blocks\.0\.0\.weight, whose values are in"):
            part.data_ptr()

    on_ranks(check, 3)
