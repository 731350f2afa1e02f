"""What `ringcomm.shard` cannot serve is refused in one sentence, on every rank, and nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.errors import AbortedError, InvalidArgumentError, MismatchError, UnsupportedError
from tests.data_parallel.test_shard import STAGES, Tower, batch, loss_of, sgd, state_of, step_of, tower
from tests.support.same import differences

Sharded = Callable[[ringcomm.Communicator, Tower, torch.optim.Optimizer], Any]


def alone(fn: Callable[[ringcomm.Communicator], Any], world_size: int = 1) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=10)


def everywhere(fn: Sharded, stages: tuple[int, ...] = STAGES, world_size: int = 2) -> None:
    """Calls ``fn`` with a sharded model, at each stage."""
    for stage in stages:

        def rank(comm: ringcomm.Communicator, stage: int = stage) -> None:
            model = tower()
            opt = sgd(model)
            ringcomm.shard(model, opt, stage, comm, bucket_cap_mb=0.0003)
            fn(comm, model, opt)

        alone(rank, world_size)


def test_parameters_that_share_memory() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.ModuleDict({"enc": nn.Linear(3, 3), "dec": nn.Linear(3, 3)})
        model["dec"].weight.data = model["enc"].weight.data
        with pytest.raises(InvalidArgumentError, match=r"enc.weight and dec.weight, two parameters that share memory"):
            ringcomm.shard(model, None, 1, comm)
        model["dec"].weight = model["enc"].weight
        ringcomm.shard(model, None, 1, comm)

    alone(rank)


def test_a_scripted_module() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        with pytest.raises(UnsupportedError, match="a scripted module, which takes no hooks"):
            ringcomm.shard(torch.jit.script(nn.Linear(3, 3)), None, 1, comm)

    alone(rank)


# ---- before anything is wrapped ------------------------------------------------------------------------------------


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()))


def foreign(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(3, 7))], lr=0.1)


class Wrapper(torch.optim.Optimizer):
    """As Lookahead and others are published: torch's constructor is not called."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (
            lambda model: Wrapper(torch.optim.SGD(model.parameters(), 0.1)),
            InvalidArgumentError,
            "pass that one and wrap",
        ),
        (sparse_adam, UnsupportedError, "SparseAdam"),
        (foreign, InvalidArgumentError, "an optimizer with none of the module's parameters"),
        (lambda model: list(model.parameters()), InvalidArgumentError, "list, expected a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_no_shard_can_serve(make: Callable[..., Any], kind: type[Exception], says: str) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        opt = make(model)
        before = state_of(model)
        with pytest.raises(kind, match=f"shard: rank {comm.rank} got .*{says}"):
            ringcomm.shard(model, opt, 2, comm)
        assert all(map(torch.equal, before, state_of(model)))
        model.requires_grad_(True)
        ringcomm.shard(model, sgd(model), 2, comm)  # nothing was left behind

    alone(rank, 2)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"stage": 4}, "stage=4, expected 0, 1, 2, 3 or None"),
        ({"stage": -1}, "stage=-1"),
        ({"stage": "2"}, r"stage='2', expected 0, 1, 2, 3 or None; pass stage=2$"),
        ({"stage": "7"}, r"stage='7', expected 0, 1, 2, 3 or None; pass that$"),
        ({"accumulation": "pairs"}, "accumulation='pairs'"),
        ({"atom": "page"}, "atom='page'"),
        ({"units": [nn.Linear(2, 2)]}, "unit Linear, which is not in the module"),
        (
            {"units": "inlet"},
            r"units='inlet', expected .* pass units=\[model.get_submodule\(name\) for name in names\]$",
        ),
        (
            {"units": ["blocks.1"]},
            r"expected a list of submodules, .* pass units=\[model.get_submodule\(name\) for name in names\]$",
        ),
        ({"units": [nn.Linear, tower()]}, "expected a list of submodules, of their classes or None"),
        (
            {"units": nn.Linear(2, 2)},
            r"units=a value of type Linear, expected a list of submodules, .* pass units=\[unit\]$",
        ),
        ({"mesh": object()}, "both comm and mesh"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1"),
    ],
)
def test_wrong_arguments(how: dict[str, Any], says: str) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        with pytest.raises(InvalidArgumentError, match=says):
            ringcomm.shard(model, sgd(model), **{"stage": 1, "comm": comm, **how})

    alone(rank)


def test_in_the_place_of_a_process_group_the_error_says_what_to_pass() -> None:
    class ProcessGroup:
        """A class with the name of torch's."""

    model = tower()
    says = r"got comm=a value of type ProcessGroup, .*; pass comm=ringcomm\.Communicator\.from_process_group\(group\)$"
    with pytest.raises(InvalidArgumentError, match=says):
        ringcomm.shard(model, sgd(model), 1, ProcessGroup())  # type: ignore[arg-type]


def test_a_copy_at_stage_3_is_refused_with_how_to_average_weights() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model, _ = ringcomm.shard(tower(), None, 3, comm)
        with pytest.raises(UnsupportedError, match=r"to average weights, .* lerp_ a copy of state_dict\(\)"):
            torch.optim.swa_utils.AveragedModel(model)

    alone(rank)


def test_a_module_without_anything_to_train_is_refused() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match="without parameters"):
            ringcomm.shard(nn.ReLU(), None, 1, comm)

    alone(rank)


def test_parameters_without_memory_are_refused_by_name() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        model.outlet = nn.Linear(6, 2, device="meta")
        with pytest.raises(UnsupportedError, match=r"outlet.weight on the meta device"):
            ringcomm.DistributedDataParallel(model, comm)

    alone(rank)


@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(2), lambda: nn.LazyBatchNorm1d(affine=False)])
def test_a_lazy_module_is_refused_before_its_first_call(lazy: Callable[[], nn.Module]) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        model.outlet = lazy()
        for wrap in (
            lambda: ringcomm.DistributedDataParallel(model, comm),
            lambda: ringcomm.shard(model, None, 3, comm),
        ):
            with pytest.raises(UnsupportedError, match=r"rank 0 got outlet\.\w+ of a lazy module"):
                wrap()
        model.outlet(torch.ones(2, 6))
        ringcomm.shard(model, None, 3, comm)

    alone(rank)


@pytest.mark.parametrize("stage", STAGES)
def test_wrapping_twice_is_refused(stage: int) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        opt = sgd(model)
        precision = ringcomm.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
        ringcomm.shard(model, opt, stage, comm, mixed_precision=precision)
        before = state_of(model)
        for module in (model, model.blocks[0], nn.Sequential(model)):
            with pytest.raises(InvalidArgumentError, match="wrapped already"):
                ringcomm.shard(module, None, stage, comm)
        others = {"stage": 3 - stage, "mixed_precision": ringcomm.MixedPrecision()}
        for name, other in others.items():
            with pytest.raises(InvalidArgumentError, match=rf"got {name}=.* for a module .* wrapped with {name}="):
                ringcomm.shard(model, sgd(model), **{"stage": stage, "comm": comm, name: other})
        for same in (None, precision):
            with pytest.raises(InvalidArgumentError, match="an optimizer that is sharded already"):
                ringcomm.shard(model, opt, mixed_precision=same)
        assert all(map(torch.equal, before, state_of(model)))
        step_of(model, opt, comm.rank, 0)

    alone(rank, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_of_which_a_part_is_wrapped_is_refused(stage: int) -> None:
    """An actor and a critic that share an encoder: the actor's own gradients would not be averaged."""

    def rank(comm: ringcomm.Communicator) -> None:
        encoder = nn.Linear(6, 6)
        critic, actor = nn.Sequential(encoder, nn.Linear(6, 1)), nn.Sequential(encoder, nn.Linear(6, 2))
        ringcomm.shard(critic, sgd(critic), stage, comm)
        for mine in (actor, actor[1]):
            with pytest.raises(InvalidArgumentError, match=r"0.weight, which is wrapped already, and 1.weight, which"):
                ringcomm.shard(actor, sgd(mine))
        actor[1].requires_grad_(False)
        ringcomm.shard(actor, sgd(encoder))

    alone(rank, 2)


def wider(model: Tower) -> None:
    model.blocks[1].linear = nn.Linear(6, 7)


def another_type(model: Tower) -> None:
    model.blocks[1].norm.double()


def frozen_there(model: Tower) -> None:
    model.outlet.bias.requires_grad_(False)


def another_buffer(model: Tower) -> None:
    model.register_buffer("mask", torch.zeros(4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wider, r"blocks.1.linear.weight \(7, 6\) torch.float32 where rank 0 has blocks.1.linear.weight \(6, 6\)"),
        (another_type, r"blocks.1.norm.weight \(6,\) torch.float64 where rank 0"),
        (frozen_there, r"outlet.bias \(2,\) torch.float32 frozen where rank 0"),
        (another_buffer, r"buffer mask \(4,\) torch.float32 where rank 0 has nothing"),
    ],
)
def test_ranks_with_different_models_name_the_first_difference(change: Callable[[Tower], None], says: str) -> None:
    def rank(comm: ringcomm.Communicator) -> str:
        model = tower()
        if comm.rank == 2:
            change(model)
        with pytest.raises(MismatchError, match="shard: rank") as error:
            ringcomm.shard(model, None, 1, comm)
        return str(error.value)

    said = alone(rank, 3)
    assert re.match(r"shard: rank 0 got .* where rank 2 has", said[0])
    assert re.match(r"shard: rank 1 got .* where rank 2 has", said[1])
    assert re.match(f"shard: rank 2 got {says}", said[2])


@pytest.mark.parametrize(
    "difference",
    [
        {"stage": lambda rank: 1 + rank},
        {"bucket_cap_mb": lambda rank: 1.0 + rank},
        {"accumulation": lambda rank: "tree" if rank else "sequential"},
        {"mixed_precision": lambda rank: ringcomm.MixedPrecision(torch.bfloat16 if rank else None)},
        {"atom": lambda rank: "tensor" if rank else "element"},
        {"units": lambda rank: Tower if rank else None},
        {"optimizer": lambda rank: rank},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_ranks_that_ask_for_different_things_are_refused(difference: dict[str, Callable[[int], Any]]) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        how: dict[str, Any] = {"stage": 1, "optimizer": sgd(model), "bucket_cap_mb": 1.0}
        how |= {name: value(comm.rank) for name, value in difference.items()}
        if "optimizer" in difference:
            how["optimizer"] = sgd(model) if comm.rank else torch.optim.AdamW(model.blocks.parameters())
        with pytest.raises(MismatchError, match=f"shard: rank {comm.rank} got .* where rank"):
            ringcomm.shard(model, comm=comm, **how)

    alone(rank, 2)


# ---- afterwards ----------------------------------------------------------------------------------------------------


def test_ranks_that_name_different_stages_are_refused_and_nothing_moves() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Linear(4, 4)
        ringcomm.shard(model, None, 1, comm)
        with pytest.raises(MismatchError, match=f"restage: rank {comm.rank} got stage=.* where rank"):
            ringcomm.restage(model, None, 2 + comm.rank)
        assert ringcomm.stage_of(model) == 1

    ringcomm.run_ranks(rank, 2, timeout=20)


def replaced(model: Tower) -> None:
    model.outlet.weight = nn.Parameter(torch.zeros(2, 6))


def replaced_module(model: Tower) -> None:
    model.blocks[2].linear = nn.Linear(6, 6)


def added(model: Tower) -> None:
    model.blocks[0].register_parameter("extra", nn.Parameter(torch.zeros(2)))


def added_module(model: Tower) -> None:
    model.blocks.append(nn.Linear(6, 6))


CHANGES: list[tuple[Callable[[Tower], Any], str]] = [
    (replaced, "outlet.weight"),
    (replaced_module, "blocks.2.linear"),
    (added, "blocks.0.extra"),
    (added_module, "blocks.3"),
    (lambda model: model.half(), r"torch.float16 on cpu"),
    (lambda model: model.double(), r"torch.float64 on cpu"),
    (lambda model: model.to(torch.bfloat16), r"torch.bfloat16 on cpu"),
    (lambda model: model.blocks[1].double(), "blocks.1"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES, ids=range(len(CHANGES)))
def test_a_module_that_changed_after_wrapping_is_refused_by_name(change: Callable[[Tower], Any], name: str) -> None:
    def check(comm: ringcomm.Communicator, model: Tower, opt: torch.optim.Optimizer) -> None:
        step_of(model, opt, comm.rank, 0)

        def change_and_train() -> None:
            change(model)
            step_of(model, opt, comm.rank, 1)

        with pytest.raises(InvalidArgumentError, match=name):
            change_and_train()

    everywhere(check)


def test_what_is_unfrozen_is_trained_from_then_on() -> None:
    def rank(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        results = []
        for stage in STAGES:
            model = tower()
            model.inlet.bias.requires_grad_(False)
            opt = sgd(model)
            ringcomm.shard(model, opt, stage, comm)
            step_of(model, opt, comm.rank, 0)
            before = model.state_dict()["inlet.bias"].clone()
            model.inlet.bias.requires_grad_(True)
            step_of(model, opt, comm.rank, 1)
            assert not torch.equal(before, model.state_dict()["inlet.bias"])
            results.append(model.state_dict())
        for name in results[0]:
            assert all(torch.equal(results[0][name], each[name]) for each in results), name
        return []

    alone(rank, 2)


def test_assigning_a_state_dict_is_refused() -> None:
    def check(comm: ringcomm.Communicator, model: Tower, opt: torch.optim.Optimizer) -> None:
        with pytest.raises(InvalidArgumentError, match="assign=True"):
            model.load_state_dict(model.state_dict(), assign=True)
        model.load_state_dict(model.state_dict())
        step_of(model, opt, comm.rank, 0)

    everywhere(check)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_optimizers_state_of_another_model_changes_nothing(stage: int) -> None:
    other = nn.Linear(7, 5)
    foreign = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 7)).sum().backward()
    foreign.step()

    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Linear(4, 3)
        _, opt = ringcomm.shard(model, torch.optim.AdamW(model.parameters()), stage, comm)
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        before = opt.state_dict()["state"]
        message = rf"load_state_dict: rank {comm.rank} got exp_avg of weight of shape \(5, 7\), expected \(3, 4\)"
        with pytest.raises(ringcomm.ShapeError, match=message):
            opt.load_state_dict(foreign.state_dict())
        after = opt.state_dict()["state"]
        assert all(torch.equal(value, after[i][key]) for i, state in before.items() for key, value in state.items())

    ringcomm.run_ranks(rank, 3, ranks="threads", timeout=20)


def test_torchs_clipping_equals_ringcomms() -> None:
    def check(comm: ringcomm.Communicator, model: Tower, opt: torch.optim.Optimizer) -> None:
        loss_of(model, comm.rank, 0).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        clipped = ringcomm.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 0.1
        torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-4, atol=0)

    everywhere(check)


def test_the_loss_scaler_of_torch_skips_a_step_on_all_ranks() -> None:
    def check(comm: ringcomm.Communicator, model: Tower, opt: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for overflows in (False, True):
            before = state_of(model)
            loss = loss_of(model, comm.rank, 0)
            scaler.scale(loss * (torch.inf if overflows and comm.rank == 1 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            assert all(map(torch.equal, before, state_of(model))) == overflows
        assert scaler.get_scale() == 2.0

    everywhere(check, world_size=3)


def test_parameters_in_shards_are_read_and_written_by_all_ranks() -> None:
    reads: list[Callable[[nn.Parameter], Any]] = [
        lambda p: p + 1,
        lambda p: p.sum(),
        lambda p: torch.tensor(p.tolist()),
        lambda p: p.clone(),
        lambda p: torch.tensor(p.numpy(force=True)),
        lambda p: p[0],
        lambda p: p.data * 2,
        lambda p: p.detach().t(),
        lambda p: torch.stack([p, p.data]),
    ]
    writes: list[Callable[[nn.Parameter], Any]] = [
        lambda p: torch.nn.init.constant_(p, 0.5),
        lambda p: p.copy_(torch.ones(2, 6)),
        lambda p: p.data.clamp_(-0.01, 0.01),
        lambda p: p.data.mul_(2),
        lambda p: setattr(p, "data", torch.full((2, 6), 3.0)),
        lambda p: p.detach().__setitem__(0, 7.0),
    ]

    def rank(comm: ringcomm.Communicator) -> None:
        model, plain = tower(), tower()
        opt = sgd(model)
        ringcomm.shard(model, opt, 3, comm)
        p, q = model.outlet.weight, plain.outlet.weight
        assert p.shape == (2, 6)
        assert p.requires_grad
        assert p.numel() == 12
        for read in reads:
            assert torch.equal(read(p), read(q))
        for write in writes:
            with torch.no_grad():
                write(p)
                write(q)
            assert torch.equal(model.state_dict()["outlet.weight"], q)
            assert torch.equal(model.state_dict()["inlet.weight"], plain.inlet.weight)
        for refused in (lambda: p.data_ptr(), lambda: p.untyped_storage()):
            with pytest.raises(InvalidArgumentError, match=r"outlet.weight, whose values are in the ranks' shards"):
                refused()
        (p.square().sum() + model.blocks[0].linear.weight.sum()).backward()
        q.square().sum().backward()
        with ringcomm.whole(model):
            assert torch.isfinite(p).all()
        step_of(model, opt, comm.rank, 0)

    alone(rank, 3)


def test_sparse_gradients_are_refused_by_name() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        for stage in STAGES:
            model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
            ringcomm.shard(model, torch.optim.SGD(model.parameters()), stage, comm)
            with pytest.raises(InvalidArgumentError, match=rf"rank {comm.rank} got a sparse gradient of 0.weight"):
                model(torch.arange(3)).sum().backward()

    alone(rank)


def test_other_functions_refuse_what_is_not_wrapped() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model, wrapped = tower(), tower()
        opt = sgd(wrapped)
        ringcomm.shard(wrapped, opt, 1, comm)
        for call in (
            lambda: ringcomm.stage_of(model),
            lambda: ringcomm.restage(model, None, 1),
            lambda: ringcomm.no_sync(model).__enter__(),
            lambda: ringcomm.whole(model).__enter__(),
        ):
            with pytest.raises(InvalidArgumentError, match=r"Tower that is not wrapped, expected .*; pass that$"):
                call()
        with pytest.raises(InvalidArgumentError, match="with none of the module's"):
            ringcomm.restage(wrapped, sgd(model), 2)
        with pytest.raises(InvalidArgumentError, match="stage=7"):
            ringcomm.restage(wrapped, opt, 7)
        with pytest.raises(InvalidArgumentError, match="restage"):
            ringcomm.restage(wrapped, wrapped, 2)
        assert ringcomm.stage_of(wrapped) == 1

    alone(rank)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_a_reduction_is_refused_by_name(stage: int) -> None:
    def check(comm: ringcomm.Communicator, model: Tower, opt: torch.optim.Optimizer) -> None:
        before = state_of(model)
        with ringcomm.no_sync(model):
            loss_of(model, comm.rank, 0).backward()
        with pytest.raises(InvalidArgumentError, match=r"gradient of .* that was not reduced, .* outside of no_sync"):
            opt.step()
        assert all(map(torch.equal, before, state_of(model)))
        model.outlet.bias.grad = torch.ones(2)  # in the place of this rank's sum
        with pytest.raises(InvalidArgumentError, match=r"gradient of .* that was not reduced"):
            opt.step()
        opt.zero_grad()
        step_of(model, opt, comm.rank, 0)

    everywhere(check, stages=(stage,))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clips", [False, True])
def test_a_step_takes_means_that_the_program_has_made(stage: int, clips: bool) -> None:
    """As programs do that combine the gradients of several losses."""
    found: dict[bool, list[torch.Tensor]] = {}
    for by_hand in (False, True):

        def train(comm: Any, model: Tower, opt: torch.optim.Optimizer, by_hand: bool = by_hand) -> None:
            for number in range(3):
                with ringcomm.no_sync(model) if by_hand else nullcontext():
                    loss_of(model, comm.rank, number).backward()
                if by_hand:
                    with_grad = [p for p in model.parameters() if p.grad is not None]
                    means = [comm.all_reduce(p.grad.clone(), "avg") for p in with_grad]
                    for p, mean in zip(with_grad, means, strict=True):
                        p.grad = mean
                if clips:
                    ringcomm.clip_grad_norm_(model, 0.1)
                opt.step()
                opt.zero_grad()
            found[by_hand] = state_of(model)

        everywhere(train, stages=(stage,))
    assert not differences(found[True], found[False])


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    a.grad, b.grad = b.grad, a.grad


def _detach(a: torch.Tensor, b: torch.Tensor) -> None:
    for p in (a, b):
        assert p.grad is not None
        p.grad = p.grad.detach()


@pytest.mark.parametrize("accumulation", ["sequential", "tree"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", [_swap, _detach])
def test_this_ranks_own_sums_are_no_means(change: Callable[..., None], stage: int, accumulation: str) -> None:
    def train(comm: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        ringcomm.shard(model, opt, stage, comm, accumulation=accumulation)
        with ringcomm.no_sync(model):
            model(torch.ones(1, 4)).sum().backward()
        change(*model.parameters())
        with pytest.raises(InvalidArgumentError, match="that was not reduced"):
            opt.step()

    ringcomm.run_ranks(train, 2, ranks="threads", timeout=60)


@pytest.mark.parametrize("stage", STAGES)
def test_different_means_are_refused(stage: int) -> None:
    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> None:
        before = state_of(model)
        with ringcomm.no_sync(model):
            loss_of(model, comm.rank, 0).backward()
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5
        with pytest.raises(MismatchError, match=r"step: .* a gradient of .* with checksum .*; assign the mean"):
            opt.step()
        assert all(map(torch.equal, before, state_of(model)))
        opt.zero_grad()
        step_of(model, opt, comm.rank, 0)

    everywhere(check, stages=(stage,))


class Casting(nn.Linear):
    """Casts its parameters in its forward pass, as routers of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(torch.float32)
        return super().forward(x.float())


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_forward_casts(stage: int) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(3, 3), Casting(3, 3)).double()
        ringcomm.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, comm)
        with pytest.raises(InvalidArgumentError, match=r"1\.(weight|bias) was set to a tensor of .* torch\.float32"):
            model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()

    alone(rank, 2)


def test_a_gradient_in_place_of_the_reduced_one_is_taken() -> None:
    def check(comm: ringcomm.Communicator, model: Tower, opt: torch.optim.Optimizer) -> None:
        loss_of(model, comm.rank, 0).backward()
        model.outlet.bias.grad = torch.zeros(2)
        before = state_of(model)[-2:]
        for group in opt.param_groups:
            group["weight_decay"] = 0.0
        opt.step()
        weight, bias = state_of(model)[-2:]
        assert not torch.equal(weight, before[0])
        assert torch.equal(bias, before[1])

    everywhere(check, world_size=3)


# ---- one rank alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_exception_on_one_rank_ends_the_others(stage: int, where: str) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = tower()
        opt = sgd(model)
        ringcomm.shard(model, opt, stage, comm)
        step_of(model, opt, comm.rank, 0)
        if comm.rank == 1 and where == "forward":
            model.fail_at = 1
        loss = model(batch(comm.rank, 1)).pow(2).sum()
        if comm.rank == 1 and where == "backward":
            raise ArithmeticError("before backward")
        loss.backward()
        if comm.rank == 1 and where == "step":
            raise ArithmeticError("before step")
        opt.step()
        step_of(model, opt, comm.rank, 2)

    with pytest.raises(ArithmeticError):
        alone(rank, 3)


def test_a_rank_that_does_something_else_is_named() -> None:
    def check(comm: ringcomm.Communicator, model: Tower, opt: torch.optim.Optimizer) -> None:
        calls = [lambda: loss_of(model, comm.rank, 0).backward(), comm.barrier]
        with pytest.raises((MismatchError, AbortedError), match=r"rank [01]"):
            calls[comm.rank]()

    everywhere(check)
