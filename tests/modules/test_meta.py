"""Models built on the meta device: sharded without ever being whole anywhere, then initialised or loaded by parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm.errors import InvalidArgumentError, MismatchError, UnsupportedError
from tests.data_parallel.test_shard import STAGES, Tower, loss_of, sgd, state_of, step_of
from tests.support.choice import choose
from tests.support.same import same

WORLD = 3


def ranks(fn: Callable[[ringcomm.Communicator], Any], world_size: int = WORLD) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, timeout=30)


def fill(m: nn.Module) -> None:
    """Values that depend on a tensor's name in its module and its shape alone; of ranks and order they know nothing."""
    own = {**dict(m.named_parameters(recurse=False)), **dict(m.named_buffers(recurse=False))}
    for name, x in own.items():
        source = torch.Generator().manual_seed(zlib.crc32(f"{type(m).__name__} {name} {tuple(x.shape)}".encode()))
        with torch.no_grad():
            values = torch.rand(x.shape, generator=source)
            x.copy_((values if x.is_floating_point() else values * 10).to(x.dtype))


class Odd(nn.Module):
    """Tied weights, buffers of two kinds, a frozen part, batch norm, and a tie between a block and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6)) for _ in range(3))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.blocks[1][0].weight  # type: ignore[index, union-attr]
        self.outlet = nn.Linear(6, 2)
        self.outlet.weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((2,), 2.0), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.tied(x)) * self.scale * self.mask


class Recurrent(nn.Module):
    """torch's recurrent modules keep weak references to their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(5, 4), nn.Linear(4, 2)
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.lstm(self.inlet(x).unsqueeze(1))[0].squeeze(1))


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def on_cpu(kind: type[nn.Module]) -> nn.Module:
    model = kind()
    model.apply(fill)
    return model


def trained(model: nn.Module, opt: torch.optim.Optimizer, rank: int) -> list[torch.Tensor]:
    before = state_of(model)
    return before + [step_of(model, opt, rank, step) for step in range(3)] + state_of(model)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"bucket_cap_mb": 1e-4},
    "bfloat16": {"mixed_precision": ringcomm.MixedPrecision(param_dtype=torch.bfloat16)},
    "offload": {"offload": True},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Tower, Odd, Recurrent])
@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_initialised_on_meta_as_on_the_cpu(stage: int, kind: type[nn.Module], how: str) -> None:
    def train(comm: ringcomm.Communicator, model: nn.Module, **init: Any) -> list[torch.Tensor]:
        opt = sgd(model)
        params = opt.param_groups[0]["params"]
        ringcomm.shard(model, opt, stage, comm, **{"bucket_cap_mb": 1, **HOW[how], **init})
        assert {id(p) for p in model.parameters()} == {id(p) for p in params}
        return trained(model, opt, comm.rank)

    expected = ranks(lambda comm: train(comm, on_cpu(kind)))
    found = ranks(lambda comm: train(comm, on_meta(kind), init_fn=fill))
    assert all(map(same, expected, found))


@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_an_optimizer_whose_state_is_made_with_it(stage: int) -> None:
    """Adagrad's state would be on meta: it is made after the parameters have values."""

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)

    def plain(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = on_cpu(Tower)
        opt = adagrad(model)
        ringcomm.shard(model, opt, stage, comm)
        return trained(model, opt, comm.rank)

    def later(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = on_meta(Tower)
        with pytest.raises(UnsupportedError, match="Adagrad with the state 'sum' on the meta device"):
            ringcomm.shard(model, adagrad(model), stage, comm, init_fn=fill)
        ringcomm.shard(model, None, stage, comm, init_fn=fill)
        opt = adagrad(model)
        ringcomm.shard(model, opt)
        return trained(model, opt, comm.rank)

    assert all(map(same, ranks(plain), ranks(later)))


def test_random_values_depend_neither_on_units_nor_on_the_stage() -> None:
    """Submodules draw in the order of their construction, as `apply` calls them."""

    def draw(source: torch.Generator) -> Callable[[nn.Module], None]:
        def init(m: nn.Module) -> None:
            with torch.no_grad():
                for p in m.parameters(recurse=False):
                    p.copy_(torch.rand(p.shape, generator=source))

        return init

    def sharded(comm: ringcomm.Communicator, stage: int, **units: Any) -> list[torch.Tensor]:
        model = on_meta(Tower)
        ringcomm.shard(model, None, stage, comm, init_fn=draw(torch.Generator().manual_seed(comm.rank)), **units)
        return state_of(model)

    expected = state_of(Tower().apply(draw(torch.Generator().manual_seed(0))))
    some: dict[str, Any] = {"units": nn.LayerNorm}
    for stage in (0, 3):
        for units in ({"bucket_cap_mb": 1}, {"bucket_cap_mb": 1e-4}, some):
            assert all(
                same(found, expected) for found in ranks(lambda comm, s=stage, u=units: sharded(comm, s, **u), 2)
            )


@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_default_is_reset_parameters(stage: int) -> None:
    """Every rank gets rank 0's values, which are as `reset_parameters` draws them."""

    def train(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = on_meta(Tower)
        opt = sgd(model)
        ringcomm.shard(model, opt, stage, comm)
        return trained(model, opt, comm.rank)

    first, *others = ranks(train)
    count = len(list(Tower().state_dict()))
    assert all(same(first[:count], other[:count]) for other in others)
    for name, x in zip(Tower().state_dict(), first, strict=False):
        if "norm" in name:
            assert torch.equal(x, torch.full_like(x, float(name.endswith("weight"))))
        else:
            bound = 5**-0.5
            assert x.isfinite().all()
            assert 0 < x.abs().max() <= bound
            assert len(x.unique()) > 1


@pytest.mark.parametrize("way", ["load_state_dict", "checkpoint", "whole", "in place"])
@pytest.mark.parametrize("kind", [Tower, Odd])
@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_loaded_after_sharding(stage: int, kind: type[nn.Module], way: str, tmp_path: Any) -> None:
    def plain(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = on_cpu(kind)
        opt = sgd(model)
        ringcomm.shard(model, opt, 1, comm)
        ringcomm.checkpoint.save(tmp_path / "saved", model)
        return trained(model, opt, comm.rank)

    def loaded(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = on_meta(kind)
        opt = sgd(model)
        ringcomm.shard(model, opt, stage, comm, init_fn=False)
        if kind is Odd:
            model.scale.copy_(source.scale)  # type: ignore[operator, arg-type]
            model.mask.copy_(source.mask)  # type: ignore[operator, arg-type]
        if way == "load_state_dict":
            model.load_state_dict(source.state_dict())
        elif way == "checkpoint":
            ringcomm.checkpoint.load(tmp_path / "saved", model)
        elif way == "whole":
            with ringcomm.whole(model):
                model.apply(fill)
        else:
            model.apply(fill)
        return trained(model, opt, comm.rank)

    source = on_cpu(kind)
    expected = ranks(plain)
    assert all(map(same, expected, ranks(loaded)))


@pytest.mark.parametrize("stage", STAGES)
def test_forgotten_values_are_named(stage: int) -> None:
    def train(comm: ringcomm.Communicator) -> None:
        model = on_meta(Odd)
        ringcomm.shard(model, sgd(model), stage, comm, init_fn=False)
        with pytest.raises(
            InvalidArgumentError, match=r"rank . got .* and 23 more from the meta device without values"
        ):
            loss_of(model, comm.rank, 0)
        left_out = ("outlet.bias", "inlet.weight")
        state = {name: x for name, x in on_cpu(Odd).state_dict().items() if name not in left_out}
        model.load_state_dict(state, strict=False)
        with pytest.raises(InvalidArgumentError, match=r"got inlet.weight, outlet.bias, scale, mask from the meta"):
            loss_of(model, comm.rank, 0)
        model.load_state_dict(on_cpu(Odd).state_dict())
        model.scale = torch.ones(2)
        model.mask.fill_(True)  # type: ignore[operator]
        assert loss_of(model, comm.rank, 0).isfinite()

    ranks(train)


def test_modules_that_cannot_be_initialised_are_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    class Replaces(nn.Linear):
        def reset_parameters(self) -> None:
            self.weight = nn.Parameter(torch.ones(3, 3))

    def run(comm: ringcomm.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match=r"the module, a Own .* without reset_parameters.*init_fn"):
            ringcomm.shard(on_meta(Own), None, 3, comm)
        with torch.device("meta"):
            model = Replaces(3, 3)
            model.weight = nn.Parameter(torch.ones(3, 3))
        with pytest.raises(InvalidArgumentError, match=r"initialising the module replaced its parameters"):
            ringcomm.shard(model, None, 3, comm)
        with pytest.raises(InvalidArgumentError, match="init_fn"):
            ringcomm.shard(on_meta(Own), None, 3, comm, init_fn=3)  # type: ignore[arg-type]

    ranks(run, 1)


def test_ranks_agree_on_whether_they_initialise() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        with pytest.raises(MismatchError, match="init_fn"):
            ringcomm.shard(on_meta(Tower), None, 3, comm, init_fn=None if comm.rank else False)

    ranks(run, 2)


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("kind", [Tower])
def test_fully_shard(kind: type[nn.Module], loads: bool) -> None:
    def train(comm: ringcomm.Communicator, model: Any, **init: Any) -> list[torch.Tensor]:
        for block in model.blocks:
            ringcomm.fully_shard(block, comm=comm, **init)
        ringcomm.fully_shard(model, comm=comm, **init)
        if init.get("init_fn") is False:
            model.blocks[0].load_state_dict(source.blocks[0].state_dict())
            with pytest.raises(InvalidArgumentError, match=r"got blocks\.1\..* and 7 more from the meta"):
                loss_of(model, comm.rank, 0)
            model.load_state_dict(source.state_dict())
        return trained(model, sgd(model), comm.rank)

    source: Any = on_cpu(kind)
    expected = ranks(lambda comm: train(comm, on_cpu(kind)))
    init: Any = False if loads else fill
    assert all(map(same, expected, ranks(lambda comm: train(comm, on_meta(kind), init_fn=init))))


def test_values_that_were_loaded_between_two_calls_of_fully_shard() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("mask", torch.tensor([True, False]))

    def train(comm: ringcomm.Communicator) -> None:
        with torch.device("meta"):
            model = nn.Sequential(Masked(), nn.Linear(4, 4))
        source = nn.Sequential(Masked(), nn.Linear(4, 4))
        ringcomm.fully_shard(model[0], comm=comm, init_fn=False)
        model[0].load_state_dict(source[0].state_dict())
        ringcomm.fully_shard(model, comm=comm, init_fn=False)
        model[1].load_state_dict(source[1].state_dict())
        assert torch.equal(model(torch.ones(1, 4)), source(torch.ones(1, 4)))

    ranks(train, 1)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Meter(TorchDispatchMode):
    """The most bytes in storage that is alive, looked at after every operation; but for what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            self.alive[storage._cdata] = StorageWeakRef(storage)
            del storage
        found = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self.alive.items()}
        self.alive = {key: ref for key, ref in self.alive.items() if found[key] is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in found.values() if storage is not None))
        return result


@pytest.mark.parametrize("init", [fill, False])
def test_a_rank_never_has_more_than_a_unit_and_its_shards(init: Any) -> None:
    """Storage that is alive, seen after every operation, while a model of 16 units is sharded."""

    def shard(comm: ringcomm.Communicator) -> tuple[int, int]:
        model = on_meta(Wide)
        with Meter() as meter:
            ringcomm.shard(model, None, 3, comm, bucket_cap_mb=1e-3, init_fn=init)
        return meter.peak, ringcomm.memory(model).resident

    unit = (256 * 256 + 256) * 4
    for peak, resident in ranks(shard, 4):
        assert resident < 2.1 * 16 * unit / 4  # shards of parameters and gradients
        assert resident <= peak < resident + 2 * unit
