"""`ringcomm.unshard`: models, gradients and optimizers are plain again, and training goes on with the same bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.errors import InvalidArgumentError
from tests.data_parallel.test_shard import STAGES, loss_of, sgd, state_of, step_of, tower
from tests.modules.test_meta import HOW, Odd, Tower, on_cpu, ranks
from tests.support.choice import choose, slow
from tests.support.same import same

Wrapping = Callable[[ringcomm.Communicator, nn.Module, torch.optim.Optimizer], nn.Module]


def new(kind: type[nn.Module]) -> nn.Module:
    """The same values every time."""
    return tower() if kind is Tower else on_cpu(kind)


def is_plain(model: nn.Module, opt: torch.optim.Optimizer, like: nn.Module) -> None:
    """No trace of the wrapping is left."""
    assert [type(m) for m in model.modules()] == [type(m) for m in like.modules()]
    for m, plain in zip(model.modules(), like.modules(), strict=True):
        assert vars(m).keys() == vars(plain).keys()
        assert not m._state_dict_hooks
        assert not m._load_state_dict_pre_hooks
    storages = set()
    for p, plain in zip(model.parameters(), like.parameters(), strict=True):
        assert type(p) is nn.Parameter
        assert not vars(p)
        assert (p.shape, p.dtype, p.requires_grad) == (plain.shape, plain.dtype, plain.requires_grad)
        assert p.untyped_storage().nbytes() == p.nbytes
        storages.add(p.untyped_storage().data_ptr())
        assert p.grad is None or (type(p.grad) is torch.Tensor and p.grad.dtype == p.dtype)
    assert len(storages) == len(list(model.parameters()))
    assert type(opt).zero_grad is torch.optim.Optimizer.zero_grad
    assert not {*vars(opt)} & {"zero_grad", "_ringcomm"}
    assert not opt._optimizer_step_pre_hooks
    assert not opt._optimizer_step_post_hooks
    for p, state in opt.state.items():
        assert all(x.shape in (p.shape, ()) and type(x) is torch.Tensor for x in state.values())
    copy.deepcopy(model)


def sharded(stage: int, **how: Any) -> Wrapping:
    def wrap(comm: ringcomm.Communicator, model: nn.Module, opt: torch.optim.Optimizer) -> nn.Module:
        ringcomm.shard(model, opt, stage, comm, **how)
        return model

    return wrap


def by_module(comm: ringcomm.Communicator, model: Any, opt: torch.optim.Optimizer) -> nn.Module:
    ringcomm.fully_shard(model.blocks[0], comm=comm)
    ringcomm.fully_shard([model.blocks[1], model.blocks[2]], comm=comm)
    ringcomm.fully_shard(model, comm=comm)
    return model  # type: ignore[no-any-return]


def wrapped_by_ddp(comm: ringcomm.Communicator, model: nn.Module, opt: torch.optim.Optimizer) -> nn.Module:
    return ringcomm.DistributedDataParallel(model, comm)


WRAPPINGS: dict[str, Wrapping] = {
    **{f"{stage} {name}": sharded(stage, **how) for stage in STAGES for name, how in HOW.items()},
    "fully_shard": by_module,
    "DistributedDataParallel": wrapped_by_ddp,
}


def test_a_rank_may_still_have_a_model_that_is_gone_on_others() -> None:
    """Python's garbage collector runs at different times on each rank."""

    def train(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = new(Tower)
        opt = sgd(model)
        first = step_of(by_module(comm, model, opt), opt, comm.rank, 0)
        kept = sharded_model_of(model).ranks  # type: ignore[union-attr]
        ringcomm.unshard(model, opt)
        if comm.rank == 1:
            del kept
            gc.collect()
        return [first, step_of(by_module(comm, model, opt), opt, comm.rank, 1)]

    ranks(train)


# What `make test` runs: one of each stage, and the two other ways to wrap.
USUAL = ["0 buckets", "1 offload", "2 bfloat16", "3 buckets", "fully_shard", "DistributedDataParallel"]


@pytest.mark.parametrize("kind", [Tower, slow(Odd)])
@pytest.mark.parametrize("name", choose(WRAPPINGS, USUAL))
def test_training_goes_on_after_unshard_and_shard(name: str, kind: type[nn.Module]) -> None:
    """With a step, a gradient that was not used yet, and another stage afterwards."""
    if kind is Odd and name == "fully_shard":
        pytest.skip("a parameter that is tied across calls is refused")

    def train(comm: ringcomm.Communicator, between: bool) -> list[torch.Tensor]:
        model = new(kind)
        opt = sgd(model)
        wrap = WRAPPINGS[name]
        outer = wrap(comm, model, opt)
        losses = [step_of(outer, opt, comm.rank, step) for step in range(2)]
        loss_of(outer, comm.rank, 2).backward()
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if between:
            assert ringcomm.unshard(outer, opt) is model
            is_plain(model, opt, new(kind))
            for p, grad in zip(model.parameters(), grads, strict=True):
                assert (grad is None) == (p.grad is None)
                assert grad is None or torch.equal(p.grad.to(grad.dtype), grad)
            kept = [p.grad for p in model.parameters()]
            outer = wrap(comm, model, opt)
            for p, grad in zip(model.parameters(), kept, strict=True):
                p.grad = grad if grad is None else grad.to(p.dtype)
            if "bfloat16" in name:  # p.grad is of the parameters' type, and rounds
                opt.zero_grad()
                loss_of(outer, comm.rank, 2).backward()
        elif "bfloat16" in name:
            opt.zero_grad()
            loss_of(outer, comm.rank, 2).backward()
        opt.step()
        opt.zero_grad()
        losses += [step_of(outer, opt, comm.rank, step) for step in range(3, 5)]
        return losses + state_of(model)

    expected = ranks(lambda comm: train(comm, False))
    assert all(map(same, expected, ranks(lambda comm: train(comm, True))))


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_run_goes_on(stage: int) -> None:
    """One rank: what `unshard` leaves trains as a model does that was never wrapped."""

    def train(comm: ringcomm.Communicator, wraps: bool) -> list[torch.Tensor]:
        model = tower()
        opt = sgd(model)
        if wraps:
            ringcomm.shard(model, opt, stage, comm)
        losses = [step_of(model, opt, 0, step) for step in range(2)]
        if wraps:
            ringcomm.unshard(model, opt)
        losses += [step_of(model, opt, 0, step) for step in range(2, 4)]
        return losses + state_of(model) + [x for s in opt.state_dict()["state"].values() for x in s.values()]

    assert same(ranks(lambda comm: train(comm, True), 1)[0], ranks(lambda comm: train(comm, False), 1)[0])


@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_parameters_are_added_between(stage: int) -> None:
    def train(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = tower()
        opt = sgd(model)
        ringcomm.shard(model, opt, stage, comm)
        step_of(model, opt, comm.rank, 0)
        before = state_of(model)
        ringcomm.unshard(model)
        assert same(before, state_of(model))
        model.outlet = nn.Sequential(model.outlet, identity())  # type: ignore[assignment]
        opt.add_param_group({"params": [model.outlet[1].weight], "lr": 0.1})  # type: ignore[index]
        ringcomm.shard(model, opt, (stage + 1) % 4, comm)
        return [step_of(model, opt, comm.rank, step) for step in range(1, 3)] + state_of(model)

    def reference(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = tower()
        model.outlet = nn.Sequential(model.outlet, identity())  # type: ignore[assignment]
        new_weight = model.outlet[1].weight  # type: ignore[index]
        opt = adamw_of([p for p in model.parameters() if p is not new_weight])
        ringcomm.shard(model, opt, 0, comm)
        step_of(model, opt, comm.rank, 0)
        new_weight.grad = None
        opt.add_param_group({"params": [new_weight], "lr": 0.1})
        return [step_of(model, opt, comm.rank, step) for step in range(1, 3)] + state_of(model)

    assert all(map(same, ranks(reference), ranks(train)))


def identity() -> nn.Linear:
    """Uses no random numbers, because another rank's thread may draw between the seed and the draw."""
    linear = nn.utils.skip_init(nn.Linear, 2, 2, bias=False)
    nn.init.eye_(linear.weight)
    return linear


def adamw_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_several_optimizers_and_models(stage: int) -> None:
    """One optimizer over two models goes on with the model that stays sharded."""

    def train(comm: ringcomm.Communicator, frees: bool) -> list[torch.Tensor]:
        first, second = tower(), tower()
        opt = adamw_of([*first.parameters(), *second.parameters()])
        extra = torch.optim.SGD([*first.inlet.parameters()], lr=0.1)
        ringcomm.shard(first, opt, stage, comm)
        ringcomm.shard(second, opt, stage, comm)
        ringcomm.shard(first, extra)
        found = []
        for step in range(4):
            if frees and step == 2:
                ringcomm.unshard(first, extra)
                ringcomm.shard(first, None, 0, comm)
            (loss_of(first, comm.rank, step) + loss_of(second, comm.rank, step)).backward()
            opt.step()
            extra.step()
            opt.zero_grad()
        found += state_of(first) + state_of(second)
        return found

    expected = ranks(lambda comm: train(comm, False))
    assert all(map(same, expected, ranks(lambda comm: train(comm, True))))


@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_one_norm_of_several_models(stage: int, by_optimizer: bool) -> None:
    """As an actor and a critic, or an encoder and a decoder, are clipped: as if they were one model."""

    def train(comm: ringcomm.Communicator, apart: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        towers = nn.ModuleList([tower(), tower()])
        opt = adamw_of(towers.parameters())
        for module in towers if apart else [towers]:
            ringcomm.shard(module, opt, stage, comm)
        norms = []
        for step in range(3):
            first, second = towers
            (loss_of(first, comm.rank, step) + 2 * loss_of(second, comm.rank, step)).backward()
            norms.append(ringcomm.clip_grad_norm_(opt if by_optimizer else towers.parameters(), 0.1))
            opt.step()
            opt.zero_grad()
        return norms, [x for module in (towers if apart else [towers]) for x in state_of(module)]

    for (norms, state), (norms_apart, state_apart) in zip(
        ranks(lambda comm: train(comm, False)), ranks(lambda comm: train(comm, True)), strict=True
    ):
        assert min(norms) > 0.2, "clipped"
        assert same(norms, norms_apart)
        assert same(state, state_apart)


def test_a_norm_of_models_over_different_ranks_is_refused() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        models = [identity(), identity()]
        for model, over in zip(models, (comm, comm.split(0)), strict=True):
            ringcomm.shard(model, adamw_of(model.parameters()), 2, over)
        params = [p for model in models for p in model.parameters()]
        sum(model(torch.ones(2)).sum() for model in models).backward()
        grads = [p.grad.clone() for p in params]
        with pytest.raises(InvalidArgumentError, match="got parameters of 2 wrapped modules that have different comm"):
            ringcomm.clip_grad_norm_(params, 0.1)
        with pytest.raises(InvalidArgumentError, match="got wrapped and plain parameters, expected one kind"):
            ringcomm.clip_grad_norm_([params[0], nn.Parameter(torch.ones(1))], 0.1)
        assert same(grads, [p.grad for p in params])

    ranks(run)


@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_local_sums_and_forgotten_gradients(stage: int) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = tower()
        ringcomm.shard(model, None, stage, comm)
        with ringcomm.no_sync(model):
            loss_of(model, comm.rank, 0).backward()
        ringcomm.unshard(model)
        twin = tower()
        loss_of(twin, comm.rank, 0).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        ringcomm.shard(model, None, stage, comm)
        ringcomm.unshard(model)
        model.zero_grad()
        loss_of(model, comm.rank, 0).backward()  # hooks of ours would send, and show means
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))

    ranks(run)


def test_registered_methods_and_compiled_modules_are_as_before() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = tower()
        ringcomm.fully_shard(model.inlet, comm=comm)
        ringcomm.fully_shard(model, comm=comm)
        ringcomm.register_forward_method(model, "extra_repr")
        assert "extra_repr" in vars(model)
        ringcomm.unshard(model)
        assert "extra_repr" not in vars(model)
        assert model.extra_repr() == ""

    ranks(run)


def test_what_is_not_wrapped_or_a_part_is_refused() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = tower()
        with pytest.raises(InvalidArgumentError, match=r"unshard: got a Tower that is not wrapped"):
            ringcomm.unshard(model)
        ringcomm.shard(model, None, 3, comm)
        with pytest.raises(InvalidArgumentError, match=r"unshard: rank . got a Layer without .* expected all of it"):
            ringcomm.unshard(model.blocks[0])
        with pytest.raises(InvalidArgumentError, match=r"unshard: rank . got an optimizer with none of the module's"):
            ringcomm.unshard(model, sgd(tower()))
        ringcomm.unshard(model)
        with pytest.raises(InvalidArgumentError, match=r"not wrapped"):
            ringcomm.unshard(model)

    ranks(run)


def test_values_that_were_never_loaded_are_named() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        with torch.device("meta"):
            model = Tower()
        ringcomm.shard(model, None, 3, comm, init_fn=False)
        with pytest.raises(InvalidArgumentError, match=r"unshard: rank . got .* and 11 more from the meta device"):
            ringcomm.unshard(model)
        model.load_state_dict(tower().state_dict())
        ringcomm.unshard(model)
        assert same(state_of(model), state_of(tower()))

    ranks(run)


class Wrapper:
    """An optimizer in another object of its class, as Lightning and accelerate make them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__class__ = type("Wrapper", (Wrapper, type(optimizer)), {})
        self.__dict__["inner"] = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def test_a_wrapper_around_the_optimizer_stands_for_it(tmp_path: Path) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        opt = sgd(model)
        ringcomm.shard(model, opt, 2, comm)
        loss_of(model, comm.rank, 0).backward()
        opt.step()
        wrapper: Any = Wrapper(opt)
        ringcomm.restage(model, wrapper, 1)
        ringcomm.checkpoint.save(tmp_path, model, wrapper)
        ringcomm.checkpoint.load(tmp_path, model, wrapper)

    ringcomm.run_ranks(rank, 2)
