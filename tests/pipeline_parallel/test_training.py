"""Pipelines and what else training brings: checkpoints, autocast, loss scaling, buffers, memory, bytes on the wire."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.pipeline_parallel.check import times
from ringcomm.pipeline_parallel.messages import Messages
from ringcomm.pipeline_parallel.microbatches import Replicate
from ringcomm.pipeline_parallel.pipeline import Pipeline
from tests.pipeline_parallel.test_runner import (
    SCHEDULES,
    Block,
    Gradients,
    Net,
    check_step,
    cross_entropy,
    cuts,
    differing,
    gradients,
    make,
    numbers,
    on_ranks,
    plain,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def stages(schedule: str) -> list[str]:
    """Cuts of four blocks for two ranks."""
    return cuts(4 if schedule == "interleaved" else 2, 4)


class Row(nn.Module):
    """Blocks in a loop; each may be checkpointed as a whole."""

    def __init__(self, blocks: list[nn.Module], how: str = "") -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList(blocks), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return x.square().mean()


def row(kind: type[nn.Module] = Block, how: str = "") -> Row:
    return make(lambda: Row([kind(6) for _ in range(4)], how))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=False)


# ---- recomputation and types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", ["inside", "around"])
def test_activation_checkpoints(schedule: str, where: str) -> None:
    model = row(Checkpointed) if where == "inside" else row(how="around")
    check_step(model, stages(schedule), 2, numbers(6, 6), schedule=schedule)


def test_a_checkpoint_that_cuts_the_graph_is_refused() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(InvalidArgumentError, match="use_reentrant=False"):
        on_ranks(row(how="reentrant"), ["blocks.1"], 2, lambda pipe, rank: pipe.step(x), microbatches=2)


class Detached(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def test_a_stage_that_cuts_the_graph_is_refused() -> None:
    model = make(lambda: Row([Block(6), Detached(6)]))
    model.blocks[1].requires_grad_(False)
    with pytest.raises(InvalidArgumentError, match="no tensor that requires a gradient"):
        on_ranks(model, ["blocks.1"], 2, lambda pipe, rank: pipe.step(torch.randn(4, 6)), microbatches=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_autocast(schedule: str) -> None:
    around = partial(torch.autocast, "cpu", torch.bfloat16)
    check_step(row(), stages(schedule), 2, numbers(6, 6), around=around, schedule=schedule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    check_step(row().to(dtype), cuts(2, 4), 2, numbers(6, 6, dtype=dtype), schedule="zero-bubble")


@pytest.mark.parametrize("calls", [True, False])
def test_a_loss_that_scales_itself(calls: bool) -> None:
    model, x = row(), torch.randn(6, 6)
    _, expected = plain(model, [lambda net, a=a: net(a) for a in x.chunk(3)], 3)
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank_main(comm: Communicator) -> Gradients:
        scaler, mesh = ringcomm.GradScaler(init_scale=1024.0), ringcomm.init_mesh(pp=2, dp=1, comm=comm)
        loss = scaler.scale if calls else lambda output: output
        pipe = Pipeline(ringcomm.split(models[comm.rank], cuts(2, 4)), mesh["pp"], microbatches=3, loss=loss)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        ringcomm.shard(pipe, optimizer, stage=0, mesh=mesh)
        pipe.step(x)
        if not calls:
            with pytest.raises(InvalidArgumentError, match="before any call of scale"):
                scaler.unscale_(optimizer)
            return {}
        scaler.unscale_(optimizer)
        found = gradients(pipe)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0
        return found

    done = ringcomm.run_ranks(rank_main, 2, timeout=30)
    assert not calls or differing(done, expected) == []


@pytest.mark.parametrize("overflow", [False, True])
def test_loss_scaling(overflow: bool) -> None:
    model, x = row(), torch.randn(6, 6)
    if overflow:
        x[0] = float("inf")
    _, expected = plain(model, [lambda net, a=a: net(a) for a in x.chunk(3)], 3)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(pipe: Pipeline, rank: int) -> tuple[float, Gradients]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        pipe.step(x, scaler=scaler)
        scaler.unscale_(optimizer)
        found = gradients(pipe)
        scaler.step(optimizer)
        scaler.update()
        if not overflow:
            assert all(torch.equal(p, start[n] - found[n]) for n, p in pipe.named_parameters())
        return scaler.get_scale(), found

    done = on_ranks(model, cuts(2, 4), 2, step, microbatches=3)
    assert [scale for scale, _ in done] == [512.0 if overflow else 1024.0] * 2
    if not overflow:
        assert differing([found for _, found in done], expected) == []


# ---- parts that are not trained ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_stage(schedule: str, frozen: int) -> None:
    model = row()
    for block in [*model.blocks][2 * frozen : 2 * frozen + 2]:
        block.requires_grad_(False)
    check_step(model, stages(schedule), 2, numbers(6, 6), schedule=schedule)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 4),
            nn.BatchNorm1d(4, affine=False),  # no parameters, and buffers to be saved
            nn.ReLU(inplace=True),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Linear(4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


@pytest.mark.parametrize("at", [["body.3"], ["body.1"], ["body.2"], ["body.5"]])
def test_batch_norm(at: list[str]) -> None:
    model, x = make(Normed), torch.randn(12, 4)
    expected = copy.deepcopy(model)
    for part in x.chunk(3):
        expected(part).backward()

    def step(pipe: Pipeline, rank: int) -> dict[str, torch.Tensor]:
        pipe.step(x)
        pipe.eval()
        assert not pipe.model.training
        pipe.evaluate(x)
        return {name: value.clone() for name, value in pipe.state_dict().items()}

    done = on_ranks(model, at, 2, step, microbatches=3)
    assert sorted([*done[0], *done[1]]) == sorted(expected.state_dict())  # every name on one rank
    buffers = dict(expected.named_buffers())
    for found in done:
        assert all(torch.equal(value, buffers[name]) for name, value in found.items() if name in buffers)
    assert int(buffers["body.1.num_batches_tracked"]) == 3
    check_step(model, at, 2, x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_hook_of_spectral_norm(schedule: str) -> None:
    """It writes into the module's buffers and attributes, which only the stage of the module has."""
    blocks = [nn.utils.spectral_norm(nn.Linear(6, 6)) for _ in range(3)]
    model, x = make(lambda: Row([*blocks])), torch.randn(6, 6)

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients, dict[str, torch.Tensor]]:
        return pipe.step(x), gradients(pipe), pipe.state_dict()

    ((loss, expected, values),) = on_ranks(model, [], 1, step, microbatches=3)
    done = on_ranks(model, ["blocks.1", "blocks.2"], 3, step, microbatches=3, schedule=schedule)
    assert all(torch.equal(found, loss) for found, _, _ in done)
    assert differing([found for _, found, _ in done], expected) == []
    assert all(torch.equal(found, values[name]) for _, _, state in done for name, found in state.items())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_dropout_draws_as_one_process_where_one_rank_has_all(schedule: str) -> None:
    model = make(lambda: Row([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(2)]))
    check_step(model, [], 1, numbers(6, 6), around=torch.random.fork_rng, schedule=schedule)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1) * self.scale


class Cropped(nn.Module):
    """Hands a crop of a transposed tensor to a module that adds along the dimension that is the outer one in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.last = nn.Linear(8, 64), Mean(), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)).transpose(1, 2)[:, 8:32, 1:]
        return self.last(self.mean(h)).square().mean()


def test_a_crop_of_a_transposed_tensor_is_laid_out_as_in_one_process() -> None:
    check_step(make(Cropped), ["mean"], 2, numbers(16, 33, 8), 4, ties="exact")


class AsksForType(nn.Module):
    """Computes with the type of a weight of the last stage, and of a buffer there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = torch.finfo(self.last.weight.dtype).eps + torch.finfo(self.last.scale.dtype).eps
        return (self.last(self.first(x) + small * 1e6) * self.last.scale).square().mean()


def test_a_pipeline_that_is_converted_has_one_type_on_all_ranks() -> None:
    model = make(AsksForType)
    x = torch.randn(6, 6, dtype=torch.float64)
    loss, _ = plain(copy.deepcopy(model).double(), [lambda net, a=a: net(a) for a in x.chunk(3)], 3)
    found = on_ranks(model, ["last"], 2, lambda pipe, rank: pipe.double().step(x), microbatches=3)
    assert all(torch.equal(each, loss) for each in found)


class Counting(Row):
    """Looks at all parameters, of which one lies in two stages and one is frozen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = [p.numel() for p in self.parameters() if p.requires_grad]
        names = [name for name, _ in self.named_parameters()]
        return super().forward(x) * (sum(wanted) / 100) + len(names)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_counts_the_parameters_of_all_stages(schedule: str) -> None:
    model = make(lambda: Counting([Block(6) for _ in range(4)]))
    model.blocks[3].norm.weight = model.blocks[0].norm.weight
    model.blocks[1].mlp[0].weight.requires_grad_(False)
    check_step(model, stages(schedule), 2, numbers(6, 6), schedule=schedule, ties="exact")


class Noised(nn.Module):
    """Hands on what it is given, but for what it draws in its own forward pass and takes off again at its end."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for each in (self.first[0], *self.blocks):
            nn.init.eye_(each.weight), nn.init.zeros_(each.bias)
        self.register_buffer("noise", torch.zeros(2, 4))

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            noise = torch.empty_like(x).normal_()
            return torch.cat([noise.mul_(2)[:, :2], noise[:, 2:].uniform_()], 1)
        if self.how == "buffer":
            return nn.init.normal_(self.noise).clone()
        if self.how == "distribution":
            return torch.distributions.Normal(x.new_zeros(4), 1.0).sample(x.shape[:1])
        return (
            nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
            if self.how == "dropout"
            else torch.randn_like(x)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu") if self.how == "a mode" else nullcontext():
            return self.taken_off(x)

    def taken_off(self, x: torch.Tensor) -> torch.Tensor:
        total = self.drawn(x)
        h = self.first(x + 1) * 0 + total  # which draws within a module
        for block in self.blocks:
            if self.how == "leaves out" and self.training and block is self.blocks[0] and torch.rand(()) < 0.5:
                continue
            noise = torch.randn_like(x)
            h, total = block(h + noise), total + noise
        return (h - total).square().mean()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["drawn", "in place", "buffer", "distribution", "dropout", "leaves out", "a mode"])
def test_later_stages_have_the_numbers_that_forward_draws(how: str, schedule: str) -> None:
    """Ranks as threads take turns at one generator."""
    x = torch.zeros(6, 4, dtype=torch.float64)

    def step(pipe: Pipeline, rank: int) -> tuple[float, ...]:
        return float(pipe.step(x)), float(pipe.evaluate(x).loss)

    model = Noised(how).double()
    at, ranks = (cuts(4, 4), 2) if schedule == "interleaved" else (["blocks.1", "blocks.3"], 3)
    for found in on_ranks(model, at, ranks, step, microbatches=3, schedule=schedule):
        assert found == pytest.approx((0.0, 0.0), abs=1e-9)


class DrawsOnce(Noised):
    """In its first forward pass alone, or in a function that is checkpointed."""

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.kept = torch.randn_like(x)
        return self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x if self.how == "checkpoint" else x + self.drawn(x))
        for block in self.blocks:
            if self.how == "checkpoint":
                h = checkpoint(lambda h, block=block: block(h + torch.randn_like(h)), h, use_reentrant=False)
            else:
                h = block(h)
        return h.square().mean()


@pytest.mark.parametrize(
    ("how", "at", "schedule", "text"),
    [
        ("once", cuts(4, 4), "interleaved", r"stage 2, whose forward drew random numbers 0 times before blocks.2, exp"),
        ("checkpoint", ["blocks.2"], "1f1b", r"begins with blocks.2 inside a checkpointed function that dr"),
    ],
)
def test_draws_that_stages_do_not_share_are_refused(how: str, at: list[str], schedule: str, text: str) -> None:
    def step(pipe: Pipeline, rank: int) -> None:
        pipe.step(torch.ones(4, 4))

    with pytest.raises(InvalidArgumentError, match=text):
        on_ranks(make(DrawsOnce, how), at, 2, step, ["first", "blocks.*"], microbatches=2, schedule=schedule)


# ---- evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation() -> None:
    model, x = make(Net, 4), tokens(6)
    expected = torch.cat([model(a) for a in x.chunk(3)]).detach()
    loss = sum(cross_entropy(model(a), a) / 3 for a in x.chunk(3)).detach()

    def evaluate(pipe: Pipeline, rank: int) -> Any:
        only_output = pipe.evaluate(x)
        target = {"target": x} if rank == 1 else {}  # the last stage's rank alone has it
        both = pipe.evaluate(*([x] if rank == 0 else []), **target)
        assert only_output.loss is None
        assert all(p.grad is None for p in pipe.parameters())
        assert both.output is None or both.output.grad_fn is None
        return only_output.output, both

    done = on_ranks(model, cuts(2, 4), 2, evaluate, microbatches=3, loss=cross_entropy, ties="exact")
    assert done[0][0] is None
    assert torch.equal(done[1][0], expected)
    assert torch.equal(done[1][1].output, expected)
    assert all(torch.equal(both.loss, loss) for _, both in done)


class Overwrites(nn.Module):
    """Returns what each micro-batch writes into one tensor, large enough to be read where it lies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        if how == "buffer":
            self.register_buffer("kept", torch.zeros(1 << 20))
        else:
            self.kept = torch.zeros(1 << 20)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        if self.how == "result":  # of the micro-batch before
            self.kept.detach().mul_(2)
            self.kept = h
            return h, x
        self.kept.fill_(float(x.detach().sum()))
        return h, self.kept


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.linear(h) * beside.mean()


class Overwritten(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = Overwrites(how), Slow(), Overwrites(how), Slow()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fourth(*self.third(self.second(*self.first(x)))).square().mean()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["buffer", "attribute"])
def test_the_next_micro_batch_may_overwrite_what_a_stage_returned(how: str, schedule: str) -> None:
    at, ranks = ["second", "third", "fourth"], 2 if schedule == "interleaved" else 4
    x = numbers(10, 4, dtype=torch.float64)
    check_step(make(Overwritten, how).double(), at, ranks, x, 5, schedule=schedule)


class ReusesItsResult(torch.autograd.Function):
    """Computes the gradient in the memory of its result, which it saved, as in-place activations do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        factor = 1 - y
        return y.mul_(factor).mul_(grad)


class Reusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.activation = Activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.activation(self.first(x))).square().mean()


class Activation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReusesItsResult.apply(x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_backward_may_use_the_memory_of_what_was_sent(schedule: str) -> None:
    x = numbers(16, 4, dtype=torch.float64)
    check_step(make(Reusing).double(), ["second"], 2, x, 8, schedule=schedule)


def test_a_result_that_needs_a_gradient_must_not_be_overwritten() -> None:
    x = torch.randn(1 << 18, 4)
    with pytest.raises(InvalidArgumentError, match=r"shape \(65536, 4\), a result of its stage or the g"):
        on_ranks(make(Overwritten, "result"), ["second"], 2, lambda pipe, rank: pipe.step(x), microbatches=4)


def test_a_loss_of_the_output_alone_and_none_at_all() -> None:
    model, x = make(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), torch.randn(4, 3)

    def evaluate(pipe: Pipeline, rank: int) -> Any:
        return pipe.evaluate(x)

    with_loss = on_ranks(model, ["1"], 2, evaluate, microbatches=2, loss=lambda output: output.mean())
    assert all(each.loss is not None for each in with_loss)
    without = on_ranks(model, ["1"], 2, evaluate, microbatches=2)
    assert all(each.loss is None for each in without)
    assert torch.equal(without[1].output, torch.cat([model(a) for a in x.chunk(2)]))


# ---- memory and messages -------------------------------------------------------------------------------------------


def test_parameters_of_other_ranks_are_freed() -> None:
    model = make(Net, 8)
    names = [name for name, _ in model.named_parameters()]

    def rank_main(comm: Communicator) -> tuple[list[str], list[str]]:
        mine = make(Net, 8)
        refs = {name: weakref.ref(p.untyped_storage()) for name, p in mine.named_parameters()}
        pipe = Pipeline(ringcomm.split(mine, cuts(4)), comm, microbatches=2, loss=cross_entropy)
        pipe.step(tokens(4), target=tokens(4))
        gc.collect()
        alive = sorted(name for name, ref in refs.items() if ref() is not None)
        held = [name for name, _ in pipe.named_parameters()]
        assert [*pipe.state_dict()] == held
        return alive, held

    done = ringcomm.run_ranks(rank_main, 4, timeout=30)
    parts = [held for _, held in done]
    assert parts[0] == [*names[:2], *[n for n in names if n.startswith(("blocks.0.", "blocks.1."))]]
    assert parts[3][-3:] == ["norm.weight", "norm.bias", "head.weight"]
    assert sorted(name for held in parts for name in held) == sorted([*names, "head.weight"])
    for alive, held in done:
        assert alive == sorted("token.weight" if name == "head.weight" else name for name in held)


class Counted(Block):
    """Counts the results that are alive."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.alive, self.most = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.alive += 1
        self.most = max(self.most, self.alive)

        def gone() -> None:
            self.alive -= 1

        weakref.finalize(output.untyped_storage(), gone)
        return output


def test_no_more_is_held_than_the_schedule_says_and_nothing_afterwards() -> None:
    model, x = make(lambda: Row([Counted(6) for _ in range(3)])), torch.randn(8, 6)

    def step(pipe: Pipeline, rank: int) -> tuple[int, int]:
        pipe.step(x)
        gc.collect()
        block = pipe.model.blocks[rank]
        return block.most, block.alive

    done = on_ranks(model, ["blocks.1", "blocks.2"], 3, step, microbatches=8)
    assert all(alive <= 1 for _, alive in done), done  # a communicator keeps its last message until the next one
    # what has been handed on is let go of once it has arrived: as many as are on their way, not as many as are open
    assert all(most <= 3 for most, _ in done), done
    assert done[2][0] == 1


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)])
@pytest.mark.parametrize("static", [False, True])
def test_bytes_on_the_wire(schedule: str, chunks: int, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, p, m, b, s, h = make(Net, 8, 6, tied=False), 2, 3, 2, 5, 6
    x = tokens(m * b, s)
    heads: list[int] = []
    sends = Messages._send_head
    monkeypatch.setattr(Messages, "_send_head", lambda self, *a: (heads.append(self.comm.rank), sends(self, *a))[1])

    def step(pipe: Pipeline, rank: int) -> list[int]:
        found = []
        for _ in range(2):
            before = pipe.messages.sent_nbytes
            pipe.step(x, target=x)
            found.append(pipe.messages.sent_nbytes - before)
        return found

    done = on_ranks(
        model, cuts(p * chunks), p, step, microbatches=m, schedule=schedule, loss=cross_entropy, static_shapes=static
    )
    boundaries = p * chunks - 1
    for number in range(2):  # forward the activations, back their gradients
        assert sum(found[number] for found in done) == boundaries * m * 2 * s * b * h * 4
    assert len(heads) == boundaries * (1 if static else 2 * m)


def test_the_timeline_has_every_action_in_order() -> None:
    model, x = make(Net, 4), tokens(6)

    def step(pipe: Pipeline, rank: int) -> Any:
        pipe.step(x, target=x)
        return pipe.schedule, pipe.timeline()

    (schedule, rows), (_, again) = on_ranks(model, cuts(2, 4), 2, step, microbatches=3, loss=cross_entropy)
    assert rows == again
    assert [[action for action, _, _ in row] for row in rows] == [[a for a, _, _ in row] for row in times(schedule)]
    assert min(start for row in rows for _, start, _ in row) == 0.0
    for row in rows:
        edges = [edge for _, start, end in row for edge in (start, end)]
        assert edges == sorted(edges)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_hooks_on_parameters(schedule: str) -> None:
    def hooked() -> Row:
        model = row()
        for p in model.parameters():
            p.register_hook(lambda grad: grad * 2)
            if p.dim() == 1:
                p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
        return model

    x, whole = torch.randn(6, 6), hooked()
    for part in x.chunk(3):
        (whole(part) / 3).backward()
    models = [hooked() for _ in range(2)]  # a copy would have no hooks

    def rank_main(comm: Communicator) -> Gradients:
        pipe = Pipeline(ringcomm.split(models[comm.rank], cuts(2, 4)), comm, microbatches=3, schedule=schedule)
        pipe.step(x)
        return gradients(pipe)

    assert differing(ringcomm.run_ranks(rank_main, 2, timeout=30), gradients(whole)) == []


def test_compiled_blocks() -> None:
    x, start = torch.randn(6, 6), row()
    _, expected = plain(start, [lambda net, a=a: net(a) for a in x.chunk(3)], 3)
    models = [copy.deepcopy(start) for _ in range(2)]
    for model in models:
        for i in range(4):
            model.blocks[i] = torch.compile(model.blocks[i], backend="eager")

    def rank_main(comm: Communicator) -> Gradients:
        pipe = Pipeline(ringcomm.split(models[comm.rank], cuts(2, 4)), comm, microbatches=3)
        pipe.step(x)
        return {name.replace("_orig_mod.", ""): grad for name, grad in gradients(pipe).items()}

    assert differing(ringcomm.run_ranks(rank_main, 2, timeout=60), expected) == []


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_model_that_is_cut_is_refused(wrapped: bool) -> None:
    model: Any = row()
    if wrapped:
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="compile its blocks"):
        ringcomm.split(model, [f"_orig_mod.{name}" if wrapped else name for name in cuts(2, 4)])


class WithInput(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Skip(nn.Module):
    """The last stage uses the model's input again, as the first stage has returned it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WithInput(6), Block(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, x = self.blocks[0](x)
        return (self.blocks[1](made) * x).square().mean()


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_an_input_gets_its_gradient_on_the_rank_of_the_first_stage(schedule: str, has_graph: bool) -> None:
    """For instance a trained prompt, which all micro-batches share."""

    model, values = make(Skip), torch.randn(6, 6)

    def gradient(run: Callable[[torch.Tensor], Any]) -> torch.Tensor | None:
        given = values.clone().requires_grad_()
        run(given * 2 if has_graph else given)
        return given.grad

    def one_process(x: torch.Tensor) -> None:
        losses = [copy.deepcopy(model)(part) / 3 for part in x.tensor_split(3)]
        torch.autograd.backward(losses)

    def rank_main(comm: Communicator) -> torch.Tensor | None:
        stages = ringcomm.split(copy.deepcopy(model), ["blocks.1"], carry=["blocks.0"])
        return gradient(Pipeline(stages, comm, microbatches=3, schedule=schedule).step)

    wanted = gradient(one_process)
    assert wanted is not None
    first, last = ringcomm.run_ranks(rank_main, 2)
    assert torch.equal(first, wanted)
    assert last is None


def test_a_replicated_prompt_and_a_target_get_gradients() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(6), Block(6)])

        def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x + prompt))

    model, x, values = make(Prompted), torch.randn(4, 6), torch.randn(6)

    def rank_main(comm: Communicator) -> list[torch.Tensor | None]:
        prompt, target = values.clone().requires_grad_(), x.clone().requires_grad_()
        stages = ringcomm.split(copy.deepcopy(model), ["blocks.1"])
        pipe = Pipeline(stages, comm, microbatches=2, loss=lambda y, t: (y - t).square().mean())
        pipe.step(x, Replicate(prompt.exp()), target=target)
        return [prompt.grad, target.grad]

    prompt, target = values.clone().requires_grad_(), x.clone().requires_grad_()
    output = copy.deepcopy(model)(x, prompt.exp())
    (output - target).square().mean().backward()
    (first, _), (_, last) = ringcomm.run_ranks(rank_main, 2)
    assert prompt.grad is not None
    assert target.grad is not None
    assert torch.allclose(first, prompt.grad)
    assert torch.allclose(last, target.grad)
