"""`p.grad` from stage 1 on: every operation gives the bits that it gives on the ordinary gradients of stage 0."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringcomm
from ringcomm.data_parallel.buckets.sharded_gradient import ShardedGradient
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.errors import InvalidArgumentError, MismatchError, UnsupportedError
from tests.data_parallel.test_shard import STAGES, loss_of, sgd, state_of
from tests.support import torch_ranks
from tests.support.choice import choose, slow
from tests.support.seeded import seeded

pytestmark = pytest.mark.usefixtures("one_thread")
WORLD = 3
WIDTH = 14  # shards end inside of the blocks' matrices
BF16 = ringcomm.MixedPrecision(torch.bfloat16)
Use = Callable[[Any, torch.optim.Optimizer], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def tower() -> Tower:
    return seeded(Tower())


def on_ranks(use: Callable[[Any, Tower, torch.optim.Optimizer], Any], stage: int, **options: Any) -> list[Any]:
    """``use(comm, model, optimizer)`` on every rank, with small groups of which shards cut parameters."""

    def rank(comm: ringcomm.Communicator) -> Any:
        model = tower()
        opt = sgd(model)
        ringcomm.shard(model, opt, stage, comm, **{"bucket_cap_mb": 0.0003, **options})
        return use(comm, model, opt)

    return ringcomm.run_ranks(rank, WORLD, ranks="threads", timeout=60)


def trained(use: Use, stage: int, **options: Any) -> list[list[torch.Tensor]]:
    """What ``use`` returns between backward and step, in two steps, and what was trained."""

    def train(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = []
        for step in range(2):
            loss_of(model, comm.rank, step).backward()
            with torch.no_grad():
                found += [x.clone() for x in use(model, opt) or []]
            opt.step()
            opt.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        return found + state_of(model)

    return on_ranks(train, stage, **options)


def assert_same(expected: list[list[torch.Tensor]], found: list[list[torch.Tensor]]) -> None:
    for there, here in zip(expected, found, strict=True):
        for a, b in zip(there, here, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
            assert torch.equal(a.isnan(), b.isnan())


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# ---- the bits of stage 0 -------------------------------------------------------------------------------------------


def reads(model: Tower, _: Any) -> list[torch.Tensor]:
    grads = grads_of(model)
    found = [g.norm() for g in grads] + [g * 2 for g in grads] + [g.clone() for g in grads]
    found += [g.isfinite().all() for g in grads] + [g.abs().max() for g in grads] + [g.to(torch.float64) for g in grads]
    found += [torch.cat([g.view(-1) for g in grads]), torch.stack([g.sum() for g in grads]), grads[2] @ grads[2].t()]
    found += [
        torch.dot(model.inlet.bias.grad, model.blocks[1].norm.bias.grad),
        torch.tensor(grads[0].tolist()),
        torch.tensor(grads[1][0].item()),
    ]
    return [*found, grads[0].new_zeros(2), torch.zeros_like(grads[0]), *grads[0].split(2), grads[0][1:, ::2].clone()]


def copies(model: Tower, _: Any) -> list[torch.Tensor]:
    g = model.inlet.weight.grad
    found = [copy.deepcopy(g), copy.copy(g), pickle.loads(pickle.dumps(g)), g.float().clone()]
    found += [torch.from_numpy(copy.deepcopy(g).float().numpy())]
    assert all(type(x) is torch.Tensor for x in found)
    if g.dtype == torch.float32:
        found += [torch.tensor(g.numpy()), torch.from_dlpack(g.clone())]
    return found


def into_plain_tensors(model: Tower, _: Any) -> list[torch.Tensor]:
    buffers = [torch.ones_like(p) for p in grads_of(model)]
    torch._foreach_add_(buffers, grads_of(model))
    for buffer, g in zip(buffers, grads_of(model), strict=True):
        buffer.lerp_(g, 0.25).add_(g, alpha=3).copy_(buffer * g)
    out = torch.empty_like(buffers[0])
    torch.add(buffers[0], grads_of(model)[0], out=out)
    return [*buffers, out]


def scalars(model: Tower, _: Any) -> None:
    for k, g in enumerate(grads_of(model)):
        g.mul_(0.3).div_(7).add_(0.01, alpha=2).sub_(1e-3).neg_().mul_(torch.tensor(1.1)).clamp_(-0.3, 0.3)
        g.clamp_min_(-0.25).clamp_max_(0.2).add_(k)
        g *= 1.5
        g -= k


def tensors(model: Tower, _: Any) -> None:
    for g in grads_of(model):
        ramp = torch.arange(g.numel(), dtype=g.dtype).view(g.shape) / 7
        g.add_(ramp).mul_(ramp).sub_(ramp, alpha=0.1).div_(ramp + 1).lerp_(ramp, 0.3).lerp_(ramp, ramp / 9)
        g.addcmul_(ramp, ramp, value=0.5).addcdiv_(ramp, ramp + 1, value=0.1).masked_fill_(ramp > 0.8, 0.125)
        g.clamp_(min=-ramp, max=ramp + 0.5).add_(ramp.flatten()[:1]).add_(g)
    model.inlet.bias.grad.copy_(torch.linspace(-1, 1, WIDTH))
    model.blocks[0].norm.bias.grad.copy_(model.blocks[2].norm.bias.grad)
    model.blocks[1].norm.bias.grad.add_(model.blocks[2].norm.weight.grad).mul_(model.blocks[0].linear.weight.grad[1])


def fills(model: Tower, _: Any) -> None:
    first, second, third, fourth, *_ = grads_of(model)
    first.zero_()
    second.fill_(0.5).sign_()
    third[0, 1] = float("nan")
    third[1, 0] = float("inf")
    third.nan_to_num_(0.25, 2.0, -2.0).abs_().sqrt_()
    fourth.data.mul_(2)
    fourth.detach().add_(1)
    fourth.data = fourth * 3


def other_changes(model: Tower, _: Any) -> list[torch.Tensor]:
    g = model.blocks[0].linear.weight.grad
    g[0] = 3.0
    g[2, 1:4] += 0.5
    g.view(-1)[5:20].mul_(2)
    g.t().add_(torch.arange(WIDTH, dtype=g.dtype)[:, None])
    g.unsqueeze(0).flatten()[::7] = 0.25
    first, *_ = g.split(2)
    first.sub_(1)
    for row in g.unbind()[4:]:
        row.neg_()
    g[0].copy_(g[1])
    g[torch.arange(WIDTH) % 5 == 0] = 0.125
    g.index_add_(0, torch.tensor([1, 3]), torch.ones(2, WIDTH, dtype=g.dtype))
    g.cumsum_(1).addmm_(torch.eye(WIDTH, dtype=g.dtype), torch.ones(WIDTH, WIDTH, dtype=g.dtype), alpha=0.01)
    torch.mul(g, 0.5, out=g)
    torch.nn.init.uniform_(model.outlet.bias.grad, generator=torch.Generator().manual_seed(1))
    return [g.clone()]


def diagonals(model: Tower, _: Any) -> list[torch.Tensor]:
    g = model.blocks[1].linear.weight.grad
    g[1:].fill_diagonal_(3.0)
    g.t()[2:].fill_diagonal_(4.0)
    g[5:].as_strided((2, 3), (WIDTH, 2)).mul_(0.5)
    g.apply_(lambda v: v + 0.5)
    g[3].apply_(lambda v: v * 2)
    g.map_(g.t().clone(), lambda a, b: a + 0.25 * b)
    return [g[1:].as_strided((2, 2), (WIDTH + 1, 1)).clone(), g.clone()]


def lists(model: Tower, _: Any) -> list[torch.Tensor]:
    grads = grads_of(model)
    plain = torch.ones(3)
    found = [*torch._foreach_norm(grads), *torch._foreach_mul(grads, 2.0), *torch._foreach_pow(2.0, grads)]
    torch._foreach_mul_([plain, *grads], 0.75)
    torch._foreach_mul_(grads, torch.tensor(1.25))
    torch._foreach_add_(grads, [0.01 * k for k in range(len(grads))])
    torch._foreach_div_(grads, [torch.full_like(g, 1.5) for g in grads])
    torch._foreach_lerp_(grads, [*reversed([g.clone() for g in reversed(grads)])], 0.5)
    torch._foreach_addcmul_(grads, grads, grads, torch.linspace(0, 1, len(grads)))
    torch._foreach_sub_([g.view(-1) for g in grads], 0.01)
    torch._foreach_clamp_max_(grads, 0.5)
    torch._foreach_neg_(grads)
    return [*found, plain, *torch._foreach_max(grads), *torch._foreach_norm(grads, float("inf"))]


def torch_clipping(model: Tower, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = [*model.parameters()]
    found = [nn.utils.clip_grad_norm_(params, 2.0), nn.utils.clip_grad_norm_(params, 1.0, foreach=True)]
    found += [nn.utils.clip_grad_norm_(params, 0.5, foreach=False), nn.utils.clip_grad_norm_(params, 0.4, 1.0)]
    found += [nn.utils.clip_grad_norm_(params[1:5], 0.01, float("inf")), nn.utils.get_total_norm(grads_of(model))]
    nn.utils.clip_grads_with_norm_(params, 0.1, found[-1])
    for foreach in (None, True, False):
        nn.utils.clip_grad_value_(params, 0.02 if foreach else 0.03, foreach=foreach)
    found += [ringcomm.clip_grad_norm_(model, 0.01), nn.utils.clip_grad_norm_(params, 1.0)]
    torch.testing.assert_close(found[-1].float(), torch.tensor(0.01), rtol=0.01, atol=0)
    return found


def assigned(model: Tower, _: Any) -> list[torch.Tensor]:
    """As PCGrad does; some are the gradients of others."""
    for p in model.parameters():
        p.grad = p.grad * 0.5 + 0.01
    model.inlet.bias.grad = torch.linspace(0, 1, WIDTH, dtype=model.inlet.bias.dtype)
    model.outlet.bias.grad = None
    model.outlet.weight.grad = model.outlet.weight.grad.detach()
    model.blocks[1].norm.bias.grad = model.blocks[0].norm.bias.grad
    norm = ringcomm.clip_grad_norm_(model, 0.5)
    return [norm, *(g.clone() for g in grads_of(model))]


def replaced_data(model: Tower, _: Any) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


def torch_scaler(model: Tower, _: Any) -> list[torch.Tensor]:
    scaler, plain = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters())
    scaler.scale(torch.ones(()))
    scaler.unscale_(plain)
    (found,) = scaler._found_inf_per_device(plain).values()
    first = found.clone()
    model.blocks[2].linear.weight.grad[5, 5] = float("inf")  # in the shard of one rank
    scaler.update()
    scaler.unscale_(plain)
    (found,) = scaler._found_inf_per_device(plain).values()
    assert (float(first), float(found)) == (0.0, 1.0)
    model.blocks[2].linear.weight.grad.nan_to_num_(posinf=1.0)
    return [first, found]


USES = [reads, copies, into_plain_tensors, scalars, tensors, fills, other_changes, lists, torch_clipping]
USES += [diagonals, assigned, replaced_data, torch_scaler]


# What `make test` runs: a use of each kind.
TELLING = ["reads", "diagonals", "fills", "lists", "copies", "assigned", "torch_clipping", "torch_scaler"]


@pytest.mark.parametrize("precision", [None, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("use", choose(USES, TELLING, by="__name__"), ids=lambda use: use.__name__)
def test_the_bits_of_stage_0(use: Use, precision: Any) -> None:
    expected = trained(use, 0, mixed_precision=precision)
    for stage in (1, 2, 3):
        assert_same(expected, trained(use, stage, mixed_precision=precision))


@pytest.mark.parametrize("use", [slow(scalars), slow(tensors), assigned], ids=lambda use: use.__name__)
def test_the_bits_of_stage_0_with_offload_and_with_tensors_that_are_not_cut(use: Use) -> None:
    expected = trained(use, 0)
    for stage in (1, 2, 3):
        assert_same(expected, trained(use, stage, offload=True))
        assert_same(expected, trained(use, stage, atom="tensor"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_is_the_mean_over_the_ranks(stage: int) -> None:
    """Beside our own stage 0: what torch computes from the ranks' own gradients."""

    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> None:
        local: dict[str, torch.Tensor] = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: local.update({name: p.grad.clone()}))
        loss_of(model, comm.rank, 0).backward()
        for name, p in model.named_parameters():
            mean = comm.all_reduce(local[name].float(), "avg")
            assert isinstance(p.grad, ShardedGradient)
            assert torch.equal(p.grad.clone(), mean.bfloat16())
            p.grad.mul_(1 / 3).mul_(3)  # in float32: nothing is rounded to 8 bits in between
            assert torch.equal(p.grad.clone(), mean.mul_(1 / 3).mul_(3).bfloat16())

    on_ranks(check, stage, mixed_precision=BF16)


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_users_see_this_ranks_gradient_before_it_is_reduced(late: bool) -> None:
    def rank(comm: ringcomm.Communicator, stage: int | None) -> dict[str, torch.Tensor]:
        model, seen = tower(), {}

        def register() -> None:
            for name, p in model.named_parameters():
                p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))

        if not late:
            register()
        if stage is not None:
            ringcomm.shard(model, sgd(model), stage, comm, bucket_cap_mb=0.0003)
        if late:
            register()
        loss_of(model, comm.rank, 0).backward()
        return seen

    def all_ranks(stage: int | None) -> list[dict[str, torch.Tensor]]:
        return ringcomm.run_ranks(lambda comm: rank(comm, stage), WORLD, ranks="threads", timeout=60)

    expected = all_ranks(None)
    assert not torch.equal(expected[0]["inlet.weight"], expected[1]["inlet.weight"])
    for stage in STAGES:
        for there, here in zip(expected, all_ranks(stage), strict=True):
            assert there.keys() == here.keys()
            assert all(torch.equal(there[name], here[name]) for name in there)


def test_hooks_before_a_step_edit_gradients() -> None:
    def rank(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = tower()
        opt = sgd(model)

        def halve(*_: Any) -> None:
            for g in grads_of(model):
                g.mul_(0.5)
            model.inlet.bias.grad = torch.ones(WIDTH)

        def clip(*_: Any) -> None:
            for g in grads_of(model):
                g.clamp_(-0.1, 0.1)

        opt.register_step_pre_hook(halve)
        ringcomm.shard(model, opt, stage, comm, bucket_cap_mb=0.0003)
        opt.register_step_pre_hook(clip)
        for step in range(2):
            loss_of(model, comm.rank, step).backward()
            opt.step()
            opt.zero_grad()
        return state_of(model)

    expected, *others = (
        ringcomm.run_ranks(lambda comm, stage=stage: rank(comm, stage), WORLD, ranks="threads", timeout=60)
        for stage in STAGES
    )
    for found in others:
        assert_same(expected, found)


# ---- what is sent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_sent(stage: int) -> None:
    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> None:
        ranks = sharded_model_of(model).ranks
        loss_of(model, comm.rank, 0).backward()
        gathers = ranks.traffic["gradient all_gather calls"]
        scalars(model, opt)
        torch._foreach_mul_(grads_of(model), 0.5)
        if comm.rank == 1:  # alone
            for g in grads_of(model):
                assert "sharded" in repr(g)
                assert (g.size(), g.numel(), g.dim()) == (g.shape, g.numel(), len(g.shape))
                assert (g.is_sparse, g.requires_grad, g.layout, g.dtype) == (False, False, torch.strided, torch.float32)
                assert isinstance(g.detach(), ShardedGradient)
                assert isinstance(g.data, ShardedGradient)
        assert ranks.traffic["gradient all_gather calls"] == gathers
        groups = sharded_model_of(model).order
        layouts = [group.layout for group in groups]
        assert len(groups) > 3
        assert any(s.offset < x.shard_numel < s.end for x in layouts for s in x.segments)  # cut between ranks
        for _ in range(2):
            for p in groups[0].params:
                p.grad.norm()
        assert ranks.traffic["gradient all_gather calls"] == gathers + 1
        assert ranks.read[0] is groups[0].gradient
        before = weakref.ref(ranks.read[1])
        torch._foreach_norm([p.grad for p in model.parameters()])  # each group once, one at a time
        assert before() is None
        assert ranks.traffic["gradient all_gather calls"] <= gathers + 1 + len(groups)
        opt.step()
        assert ranks.read is None

    on_ranks(check, stage)


# ---- before the first reduction ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mixed_precision": BF16}, {"accumulation": "tree"}], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_inside_of_no_sync_it_is_this_ranks_sum(stage: int, options: dict[str, Any]) -> None:
    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        sums: list[torch.Tensor] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.float()))
        ranks, gathers = sharded_model_of(model).ranks, "gradient all_gather calls"
        with ringcomm.no_sync(model):
            loss_of(model, comm.rank, 0).backward()
            values = [g.float().norm() for g in grads_of(model)]
            assert sorted(values) == sorted(each.norm() for each in sums)
            for g in grads_of(model):
                g.mul_(0.5)
            model.inlet.bias.grad = torch.ones(WIDTH, dtype=model.inlet.bias.dtype)
        assert ranks.traffic[gathers] == 0
        loss_of(model, comm.rank, 1).backward()
        return [g.clone() for g in grads_of(model)]

    expected, found = on_ranks(check, 0, **options), on_ranks(check, stage, **options)
    assert_same(expected, found)


def test_a_tree_of_sums_can_be_read_and_not_changed() -> None:
    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> None:
        first: list[torch.Tensor] = []
        with ringcomm.no_sync(model):
            for k in range(3):
                loss_of(model, comm.rank, k).backward()
                first = first or [g.clone() for g in grads_of(model)]
        assert not any(torch.equal(a, b) for a, b in zip(first, grads_of(model), strict=True))
        with pytest.raises(InvalidArgumentError, match=rf"rank {comm.rank} got a change of the gradient of inlet.weig"):
            model.inlet.weight.grad.mul_(2)

    on_ranks(check, 2, accumulation="tree")


@pytest.mark.parametrize("precision", [None, BF16], ids=["float32", "bf16"])
def test_a_gradient_that_was_assigned_before_any_backward_counts(precision: Any) -> None:
    """As torch.distributed.checkpoint does, to make an optimizer's state."""

    def train(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        for p in model.parameters():
            p.grad = torch.ones(p.shape, dtype=p.dtype)
        opt.step()
        after = state_of(model)
        model.outlet.bias.grad = None
        model.inlet.weight.grad = torch.full((WIDTH, 5), 0.25, dtype=model.inlet.weight.dtype)
        loss_of(model, comm.rank, 0).backward()  # adds
        opt.step()
        opt.zero_grad()
        model.outlet.weight.grad = torch.ones(2, dtype=model.outlet.bias.dtype).expand(WIDTH, 2).t()
        opt.step()
        return after + state_of(model)

    expected = on_ranks(train, 0, mixed_precision=precision)
    before = state_of(tower())
    assert not any(torch.equal(a.float(), b.float()) for a, b in zip(before, expected[0], strict=False))
    for stage in (1, 2, 3):
        assert_same(expected, on_ranks(train, stage, mixed_precision=precision))


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_refused(stage: int) -> None:
    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> None:
        loss_of(model, comm.rank, 0).backward()
        g = model.inlet.weight.grad
        with pytest.raises(InvalidArgumentError, match=rf"rank {comm.rank} got \(70,\) as the gradient of inlet.weigh"):
            g.resize_(70)
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(g)
        with pytest.raises(RuntimeError, match="size"):
            g.add_(torch.ones(7))
        model.inlet.weight.grad = torch.ones(WIDTH, 5).to_sparse()
        with pytest.raises(InvalidArgumentError, match=r"torch.sparse_coo tensor as the gradient of inlet.weight"):
            opt.step()
        opt.zero_grad()
        assert g.norm() > 0  # what is kept stays
        with ringcomm.no_sync(model):
            loss_of(model, comm.rank, 1).backward()
        g = model.inlet.weight.grad
        opt.zero_grad()
        if isinstance(g, ShardedGradient):
            with pytest.raises(InvalidArgumentError, match=r"gradient of inlet\.weight that was dropped"):
                g.norm()

    on_ranks(check, stage)


def test_the_bits_of_a_rounded_gradient_are_not_a_view() -> None:
    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> None:
        loss_of(model, comm.rank, 0).backward()
        with pytest.raises(InvalidArgumentError, match=r"torch.int16 for the gradient of inlet.weight, which is kept"):
            model.inlet.weight.grad.view(torch.int16)
        assert model.inlet.weight.grad.clone().view(torch.int16).dtype == torch.int16

    on_ranks(check, 2, mixed_precision=BF16)


def test_where_a_rank_has_joined() -> None:
    def check(comm: Any, model: Tower, opt: torch.optim.Optimizer) -> None:
        with ringcomm.join(model):
            for step in range(1 if comm.rank == 1 else 2):
                loss_of(model, comm.rank, step).backward()
                if step:
                    with pytest.raises(UnsupportedError, match=r"inside join, .* use ringcomm.clip_grad_norm_"):
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                ringcomm.clip_grad_norm_(model, 1.0)
                opt.step()
                opt.zero_grad()

    on_ranks(check, 2)


def _stash(wrapped: Any, model: Any, optimizer: Any, x: torch.Tensor, before: list[Any]) -> None:
    old = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    wrapped(x * 2).square().sum().backward()
    for p, g in zip(model.parameters(), old, strict=True):
        p.grad.add_(g)


def _difference(wrapped: Any, model: Any, optimizer: Any, x: torch.Tensor, before: list[Any]) -> None:
    for p, g in zip(model.parameters(), [*before], strict=False):
        p.grad.sub_(g, alpha=0.5)
    before[:] = [p.grad for p in model.parameters()]


def _exchange(wrapped: Any, model: Any, optimizer: Any, x: torch.Tensor, before: list[Any]) -> None:
    model[0].weight.grad, model[2].weight.grad = model[2].weight.grad, model[0].weight.grad


def _one_of_them(wrapped: Any, model: Any, optimizer: Any, x: torch.Tensor, before: list[Any]) -> None:
    kept, model[0].weight.grad = model[0].weight.grad, None
    wrapped(x * 2).square().sum().backward()
    model[0].weight.grad.add_(kept)


@pytest.mark.parametrize("use", [_stash, _difference, _exchange, _one_of_them])
def test_gradients_that_users_keep_keep_their_values(use: Any) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def run(comm: ringcomm.Communicator, stage: int | None) -> list[torch.Tensor]:
        """Without a stage: one process, which has the gradients of all ranks."""
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped: Any = model if stage is None else ringcomm.shard(model, optimizer, stage, comm)[0]
        before: list[Any] = []
        for step in range(4):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
            wrapped(x).square().sum().backward()  # ranks have the same input: the mean is each one's gradient
            use(wrapped, model, optimizer, x, before)
            optimizer.step()
            optimizer.zero_grad()
        return [x.clone() for x in model.state_dict().values()]

    expected = ringcomm.run_ranks(run, 1, None, timeout=20)[0]
    for stage in range(4):
        found = ringcomm.run_ranks(run, 2, stage, timeout=20)[0]
        assert all(map(torch.equal, expected, found)), f"stage {stage}"


@pytest.mark.parametrize("stage", [0, 2])
def test_unreferenced_gradients_stay_in_their_memory(stage: int) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ringcomm.shard(model, optimizer, stage, comm)
        gradient = model.weight._ringcomm.bucket.gradient
        seen = set()
        for _ in range(3):
            model(torch.ones(2, 6)).sum().backward()
            seen.add(id(gradient.sharded_grads[0]) if stage else gradient.means[0][0].data_ptr())
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == 1
        assert gradient.reduced.data_ptr() in seen or stage

    ringcomm.run_ranks(run, 2, timeout=20)


SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "flat": lambda grad: grad.view(-1),
    "data": lambda grad: grad.data[1:],
}


@pytest.mark.parametrize("synced", [True, False], ids=["reduced", "no_sync"])
@pytest.mark.parametrize("kept", SLICES)
@pytest.mark.parametrize("stage", range(4))
def test_slices_of_gradients_keep_their_values(stage: int, kept: str, synced: bool) -> None:
    """As in torch, where a slice keeps the values that `zero_grad` dropped."""

    def run(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ringcomm.shard(model, optimizer, stage, comm)
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(4):
            with contextlib.nullcontext() if synced else ringcomm.no_sync(model):
                model(torch.full((2, 6), step + 1.0)).sum().backward()
            if comm.rank == 0 or (synced and stage):  # a sharded gradient is read by all ranks
                for p in (model[0].weight, model[1].bias):
                    part = SLICES[kept](p.grad)
                    before.append((part, part.clone()))
            assert not step or not before or not torch.equal(before[0][1], before[-2][1])
            optimizer.step() if synced else None
            optimizer.zero_grad()
            with ringcomm.no_sync(model):
                model(torch.full((2, 6), -1.0)).sum().backward()
            optimizer.zero_grad()
            for part, values in before:
                assert torch.equal(part, values)

    ringcomm.run_ranks(run, 2, timeout=20)


@pytest.mark.parametrize("kept", SLICES)
@pytest.mark.parametrize("stage", range(4))
def test_slices_keep_their_values_where_other_gradients_stay(stage: int, kept: str) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        ringcomm.shard(model, None, stage, comm)
        for step in range(3):
            model(torch.full((2, 6), step + 1.0)).sum().backward()
            part, stays = SLICES[kept](model[0].weight.grad), model[1].weight.grad
            values, before = part.clone(), stays.clone()
            model[0].zero_grad()
            model(torch.full((2, 6), -1.0)).sum().backward()
            assert torch.equal(part, values)
            assert model[1].weight.grad is stays
            assert not torch.equal(stays, before)
            model.zero_grad()

    ringcomm.run_ranks(run, 2, timeout=20)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_autograd_has_saved_keep_their_values(stage: int) -> None:
    def run(comm: ringcomm.Communicator) -> torch.Tensor:
        model = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ringcomm.shard(model, optimizer, stage, comm)
        scale = torch.ones((), requires_grad=True)
        with ringcomm.no_sync(model):
            model(torch.ones(2, 6)).sum().backward()
            later = (model.bias.grad * scale).sum()
            optimizer.zero_grad()
            model(torch.full((2, 6), 100.0)).square().sum().backward()
        later.backward()
        assert scale.grad == 12
        return scale.grad

    ringcomm.run_ranks(run, 2, timeout=20)


@pytest.mark.parametrize("stage", range(4))
def test_unreferenced_gradients_stay_in_their_memory_inside_no_sync(stage: int) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ringcomm.shard(model, optimizer, stage, comm)
        gradient = model[0].weight._ringcomm.bucket.gradient
        seen, summed = set(), set()
        for _ in range(4):
            with ringcomm.no_sync(model):
                for _ in range(2):
                    model(torch.ones(2, 6)).sum().backward()
                    summed.add(model[0].weight.grad.data_ptr())
            model(torch.ones(2, 6)).sum().backward()
            seen.add(gradient.buffer.data_ptr())
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == len(summed) == 1

    ringcomm.run_ranks(run, 2, timeout=20)


# ---- collectives of torch.distributed -------------------------------------------------------------------------------


def _exchanging(stage: int) -> list[torch.Tensor]:
    """Trains with sums of gradients and parameters over the ranks, as people write them beside DDP."""
    W = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ringcomm.shard(model, optimizer, stage)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 64)).square().sum().backward()
        grads = grads_of(model)
        for grad in grads:
            dist.all_reduce(grad)
            grad /= W
            dist.all_reduce(grad.data, async_op=True).wait()
            grad.div_(W)
        dist.all_reduce_coalesced(grads)
        dist.broadcast(grads[0], 1)
        if stage:
            with pytest.raises(InvalidArgumentError, match="result differs"):
                dist.reduce(grads[0], 0)
        optimizer.step()
        optimizer.zero_grad()
        works = [dist.all_reduce(p.data, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        for p in model.parameters():
            p.data.div_(W)
        dist.broadcast(model.weight.data, 1, async_op=True).wait()
    parts = [torch.zeros(64) for _ in range(W)]
    dist.all_gather(parts, model.bias.data)
    return [*parts, *(x.clone() for x in model.state_dict().values())]


def test_collectives_of_torch_distributed() -> None:
    expected = torch_ranks.run(_exchanging, 0, world_size=2)
    for stage in (1, 2, 3):
        for there, here in zip(expected, torch_ranks.run(_exchanging, stage, world_size=2), strict=True):
            assert all(map(torch.equal, there, here))


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_a_rank_that_reads_a_gradient_alone_gets_no_other_values(stage: int) -> None:
    """Its gather must not take what the others' next gather of as many elements brings."""

    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        opt = sgd(model)
        ringcomm.shard(model, opt, stage, comm)
        model(torch.ones(2, 4)).sum().backward()
        if comm.rank == 0:
            with pytest.raises(MismatchError, match="barrier"):
                model[0].weight.grad.norm()
        else:
            with pytest.raises(MismatchError, match="barrier"):
                model(torch.ones(2, 4)) if stage == 3 else opt.step()

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=10)


_OF_COMPLEX = {
    "real": lambda g: g.real.clone(),
    "imag": lambda g: g.imag + 0,
    "conj": lambda g: g.conj() + 0,
    "sum of conj": lambda g: (g.conj() * 2).sum(),
    "pairs": lambda g: torch.view_as_real(g).sum(0),
    "integers": lambda g: torch.view_as_real(g).view(torch.int32).clone(),
    "written integers": lambda g: torch.view_as_real(g).view(torch.int32).fill_(1066192077),
    "copied integers": lambda g: torch.view_as_real(g).view(torch.int32).copy_(torch.arange(12).int().view(6, 2)),
    "written imag": lambda g: g.imag.zero_(),
    "written conj": lambda g: g.conj().mul_(2j),
}


@pytest.mark.parametrize("what", _OF_COMPLEX)
def test_views_of_another_type_and_conjugates_have_the_values_of_stage_0(what: str) -> None:
    def rank(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = nn.ParameterList([torch.arange(1, 7) * (1 + 2j) + torch.arange(6) ** 2 * 1j])
        ringcomm.shard(model, stage=stage, comm=comm)
        model[0].abs().pow(2).sum().backward()
        grad = model[0].grad
        assert grad is not None
        return [_OF_COMPLEX[what](grad).clone(), grad.clone()]

    expected = ringcomm.run_ranks(rank, 2, 0, timeout=30)
    for found, wanted in zip(ringcomm.run_ranks(rank, 2, 2, timeout=30), expected, strict=True):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters_can_be_offloaded(dtype: torch.dtype) -> None:
    def rank(comm: ringcomm.Communicator, offload: bool) -> torch.Tensor:
        model = nn.ParameterList([torch.arange(1, 7).to(dtype) * (1 + 2j)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage=1, comm=comm, offload=offload)
        for _ in range(2):
            model[0].abs().pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0][1].mul_(1j)
        return model[0].detach().clone()

    plain, offloaded = (ringcomm.run_ranks(rank, 2, offload, timeout=30) for offload in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(plain, offloaded, strict=True))
