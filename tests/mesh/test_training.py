"""Data, tensor and pipeline parallel and the ZeRO stages together: the bits, or the numbers, of one plain process."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm.data_parallel.memory import predict
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.data_parallel.optim.grad_scaler import GradScaler
from ringcomm.data_parallel.shard import restage
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.precision import MixedPrecision
from ringcomm.modules.shard_spec import ShardSpec
from tests.support.choice import slow
from tests.support.mesh import cases
from tests.support.mesh.cases import Job, Net, make, mean_loss, pieces_of, plain, plain_gradients, plain_step

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 2
Parts = dict[str, tuple[ShardSpec, torch.Tensor]]


class Result:
    """A rank's losses, norms and parts of the parameters."""

    def __init__(self, curve: tuple[list[float], list[float]], parts: Parts) -> None:
        self.losses, self.norms, self.parts = *curve, parts

    def wrong(self, whole: dict[str, torch.Tensor], same: bool = True) -> list[str]:
        """Names of parameters that differ from those of the whole model."""

        def agrees(a: torch.Tensor, b: torch.Tensor) -> bool:
            return torch.equal(a, b) if same else torch.allclose(a, b, rtol=2e-5, atol=2e-6)

        return [name for name, (cut, x) in self.parts.items() if not agrees(pieces_of(whole[name], cut, x), x)]


def trained(job: Job, steps: int = STEPS) -> Result:
    curve = job.train(0, steps)
    return Result(curve, job.parts())


@functools.cache
def expected() -> tuple[list[list[torch.Tensor]], list[float], dict[str, torch.Tensor]]:
    """Of one plain process."""
    model = make()
    losses, norms, _ = plain(model, 0, STEPS)
    return losses, norms, model.state_dict()


@functools.cache
def of_tensor_parallel(tp: int) -> list[Result]:
    """By rank of a tensor parallel group, nothing else."""
    return cases.run({"tp": tp}, lambda model, mesh: trained(Job(model, mesh)))


def check(results: list[Result], ranks: int) -> None:
    """Against one plain process, bit by bit."""
    losses, norms, whole = expected()
    for each in results:
        assert each.losses == [mean_loss(step, ranks) for step in losses]
        assert each.norms == norms
        assert each.wrong(whole) == []


def same(a: Result, b: Result) -> bool:
    """The bits of what both have."""
    names = a.parts.keys() & b.parts.keys()
    alike = all(torch.equal(a.parts[name][1], b.parts[name][1]) for name in names)
    return len(names) > 0 and alike and a.losses == b.losses and a.norms == b.norms


SHAPES = [
    (dp, tp, pp) for tp in (1, 2, 4) for dp in (1, 2, 4) for pp in (1, 2, 4) if dp * tp * pp <= 8
]  # fmt: skip


# All axes; without tp, and so with the bits of one process; the longest pipeline.
USUAL = ((2, 2, 2), (2, 1, 2), (1, 1, 4))


@pytest.mark.parametrize(("dp", "tp", "pp"), [shape if shape in USUAL else slow(*shape) for shape in SHAPES])
def test_every_mesh_and_stage(dp: int, tp: int, pp: int) -> None:
    def body(model: Net, mesh: Any) -> tuple[int, list[Result]]:
        models = [model, *(copy.deepcopy(model) for _ in range(3))]
        return mesh.coordinates["tp"], [trained(Job(each, mesh, stage)) for stage, each in enumerate(models)]

    ranks = cases.run({"pp": pp, "dp": dp, "tp": tp}, body)
    everything = [result for _, results in ranks for result in results]
    assert {name for each in everything for name in each.parts} == set(expected()[2])
    if tp == 1:
        check(everything, dp)
        return
    losses, norms, whole = expected()
    for number, results in ranks:
        for each in results:
            assert each.losses == pytest.approx([mean_loss(step, dp) for step in losses], rel=1e-5)
            assert each.norms == pytest.approx(norms, rel=1e-5)
            assert each.wrong(whole, same=False) == []
            alone = of_tensor_parallel(tp)[number]
            assert each.norms == alone.norms  # the other axes and stages add no rounding errors of their own
            assert [name for name, (_, x) in each.parts.items() if not torch.equal(x, alone.parts[name][1])] == []


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_schedules(schedule: str, chunks: int, dp: int) -> None:
    def body(model: Net, mesh: Any) -> list[Result]:
        models = [(0, model), (3, copy.deepcopy(model))]
        return [trained(Job(each, mesh, stage, schedule=schedule, chunks=chunks)) for stage, each in models]

    check([result for results in cases.run({"pp": 2, "dp": dp}, body) for result in results], dp)


def test_tied_gradients_that_are_added_once_a_step() -> None:
    def body(model: Net, mesh: Any) -> list[Result]:
        models = [model, *(copy.deepcopy(model) for _ in range(3))]
        return [trained(Job(each, mesh, stage, ties="sum")) for stage, each in enumerate(models)]

    losses, norms, whole = expected()
    for results in cases.run({"pp": 2, "dp": 2}, body):
        for each in results:
            assert each.losses == pytest.approx([mean_loss(step, 2) for step in losses], rel=1e-6)
            assert each.norms == pytest.approx(norms, rel=1e-6)
            assert each.wrong(whole, same=False) == []
            assert same(each, results[0])


@pytest.mark.parametrize(
    "axes",
    [  # training/test_train_mesh.py has cp beside tp
        {"pp": 2, "dp": 2, "cp": 2},
        *(slow({"cp": 2}), slow({"dp": 2, "cp": 2, "tp": 2}), slow({"pp": 2, "cp": 2, "tp": 2})),
    ],
    ids=str,
)
def test_context_parallel(axes: dict[str, int]) -> None:
    def body(model: Net, mesh: Any) -> list[Result]:
        return [
            trained(Job(each, mesh, stage))
            for stage, each in ((0, copy.deepcopy(model)), (1, copy.deepcopy(model)), (3, model))
        ]

    losses, norms, whole = expected()
    for results in cases.run(axes, body):
        for each in results:
            assert each.losses == pytest.approx([float(torch.stack(step).mean()) for step in losses], rel=1e-5)
            assert each.norms == pytest.approx(norms, rel=1e-5)
            assert each.wrong(whole, same=False) == []
            assert same(each, results[0])


def test_a_stage_that_some_microbatches_leave_out() -> None:
    """The tree of a parameter's gradients has zeros where a micro-batch has none, as in one process."""

    class Sometimes(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x) if int(tokens[0, 0]) % 2 else x)

    torch.manual_seed(3)
    model = Sometimes()
    once = copy.deepcopy(model)
    losses, grads = [], []
    for x, y in zip(*(each.chunk(cases.MICROBATCHES) for each in cases.batch(3)), strict=True):
        once.zero_grad()
        loss = cases.loss_of(once(x), y) / cases.MICROBATCHES
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in once.norm.parameters()])
    assert sum(any(bool(g.any()) for g in some) for some in grads) not in (0, cases.MICROBATCHES)
    a, b, c, d = grads
    wanted = [(w + x) + (y + z) for w, x, y, z in zip(a, b, c, d, strict=True)]

    def body(model: Any, mesh: Any, schedule: str) -> list[torch.Tensor]:
        job = Job(model, mesh, 0, schedule=schedule)
        job.forward_backward(3)
        return [p.grad.clone() for p in job.pipe.model.norm.parameters()]

    for schedule in ("1f1b", "zero-bubble"):
        found = cases.run({"pp": 2}, lambda model, mesh, s=schedule: body(model, mesh, s), model)[1]
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


# ---- accumulation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_accumulation_over_several_steps_of_the_pipeline(stage: int) -> None:
    model, numbers = make(), (5, 6, 7, 8)
    optimizer = cases.adamw(model)
    each = [plain_gradients(model, number)[1] for number in numbers]
    a, b, c, d = ([g.clone() for g in grads] for grads in each)
    norm = plain_step(model, optimizer, [(w + x) + (y + z) for w, x, y, z in zip(a, b, c, d, strict=True)])

    def body(model: Net, mesh: Any) -> Result:
        job = Job(model, mesh, stage)
        with ringcomm.no_sync(job.pipe):
            with ringcomm.no_sync(job.pipe):  # nested
                job.forward_backward(numbers[0])
            for number in numbers[1:-1]:
                sent = dict(sharded_model_of(job.pipe).ranks.traffic)
                job.forward_backward(number)
                reduced = dict(sharded_model_of(job.pipe).ranks.traffic)
                kinds = ("all_reduce calls", "reduce_scatter calls", "flags calls")
                assert [sent.get(kind) for kind in kinds] == [reduced.get(kind) for kind in kinds]
        job.forward_backward(numbers[-1])
        return Result(([], [job.clip_and_step()]), job.parts())

    for result in cases.run({"pp": 2}, body):
        assert result.norms == [norm]
        assert result.wrong(model.state_dict()) == []
    for result in cases.run({"pp": 2, "dp": 2}, body):  # ranks add up their own micro-batches first
        assert result.norms == pytest.approx([norm], rel=1e-6)
        assert result.wrong(model.state_dict(), same=False) == []


# ---- precision, memory --------------------------------------------------------------------------------------------

AXES = {"pp": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_mixed_precision(stage: int) -> None:
    half = MixedPrecision(torch.bfloat16, output_dtype=torch.float32)

    def of(axes: dict[str, int], stage: int) -> list[Result]:
        return cases.run(axes, lambda model, mesh: trained(Job(model, mesh, stage, mixed_precision=half)))

    without_pipeline = of({"dp": 2, "tp": 2}, 0)
    for number, result in enumerate(of(AXES, stage)):
        assert same(result, without_pipeline[number % 4])


def test_mixed_precision_of_an_input_that_every_stage_uses() -> None:
    class Masked(Net):
        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.token(tokens)
            for block in self.blocks:
                x = x + block(x) * mask
            return self.head(self.norm(x))

    def body(model: Net, mesh: Any) -> float:
        job = Job(model, mesh, 1, mixed_precision=MixedPrecision(torch.bfloat16, output_dtype=torch.float32))
        x, y = cases.batch(0)
        return float(job.pipe.step(x, torch.linspace(0, 1, len(x))[:, None, None], target=y))

    torch.manual_seed(0)
    model = Masked()
    assert cases.run({"pp": 2}, body, model) == cases.run({"pp": 1}, body, model) * 2


@pytest.mark.parametrize(
    "settings",
    [{"offload": True}, {"reshard_after_forward": False}, slow({"bucket_cap_mb": 1.0}), {"atom": "tensor"}],
    ids=lambda each: next(iter(each)),
)
def test_settings_that_change_no_bits(settings: dict[str, Any]) -> None:
    def body(model: Net, mesh: Any) -> list[Result]:
        return [trained(Job(each, mesh, stage, **settings)) for stage, each in ((1, model), (3, copy.deepcopy(model)))]

    for results in cases.run({"pp": 2, "dp": 2}, body):
        check(results, 2)


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, slow(AXES)], ids=str)
def test_activation_checkpointing(axes: dict[str, int]) -> None:
    def body(model: Net, mesh: Any) -> list[Result]:
        return [trained(Job(each, mesh, stage)) for stage, each in ((0, model), (3, copy.deepcopy(model)))]

    plain_ones = cases.run(axes, body)
    for mine, theirs in zip(cases.run(axes, body, checkpointed=True), plain_ones, strict=True):
        assert same(mine[0], theirs[0])
        assert same(mine[1], theirs[0])


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, slow(AXES)], ids=str)
def test_restage_while_training(axes: dict[str, int]) -> None:
    def body(model: Net, mesh: Any) -> tuple[Result, Result]:
        unchanged = trained(Job(copy.deepcopy(model), mesh), 4)
        job, losses, norms = Job(model, mesh), [], []
        for step, stage in enumerate((0, 3, 1, 2)):
            restage(job.pipe, job.optimizer, stage)
            loss, norm = job.train(step, step + 1)
            losses, norms = losses + loss, norms + norm
        return unchanged, Result((losses, norms), job.parts())

    for unchanged, moved in cases.run(axes, body):
        assert same(unchanged, moved)


@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_hybrid(stage: int) -> None:
    flat = cases.run({"dp": 4, "tp": 2}, lambda model, mesh: trained(Job(model, mesh)))
    axes = {"replicate": 2, "shard": 2, "tp": 2}
    for mine, theirs in zip(cases.run(axes, lambda model, mesh: trained(Job(model, mesh, stage))), flat, strict=True):
        assert same(mine, theirs)


# ---- loss scaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [slow({"pp": 2}), {"pp": 2, "tp": 2}], ids=["pp", "pp and tp"])
def test_parameters_that_are_assigned_keep_their_places(axes: dict[str, int]) -> None:
    def body(model: Net, mesh: Any, assigned: bool) -> Any:
        job = Job(model, mesh, 1, assigned=assigned)
        return job.train(0, 2), job.parts()

    expected, found = (cases.run(axes, functools.partial(body, assigned=assigned)) for assigned in (False, True))
    for (numbers, parts), (others, their_parts) in zip(expected, found, strict=True):
        assert others == numbers
        assert {name: part for name, (part, _) in parts.items()} == {name: it for name, (it, _) in their_parts.items()}
        assert all(torch.equal(x, their_parts[name][1]) for name, (_, x) in parts.items())


@pytest.mark.parametrize("where", [slow((0, 0, 1)), (0, 1, 0), (1, 0, 0)], ids=["tp", "dp", "pp"])
@pytest.mark.parametrize("stage", [0, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(where: tuple[int, int, int], stage: int) -> None:
    half = MixedPrecision(torch.float16, output_dtype=torch.float32)

    def body(model: Net, mesh: Any) -> Any:
        job = Job(model, mesh, stage, mixed_precision=half, offload=stage == 2)
        scaler = GradScaler(init_scale=1024.0, growth_interval=1000)
        here = (mesh.coordinates["pp"], mesh.coordinates["dp"], mesh.coordinates["tp"]) == where
        overflows = [False]
        for p in list(job.pipe.parameters())[-1:]:
            p.register_hook(lambda g: g * float("inf") if here and overflows[0] else g)
        scales, norms, params = [], [], [job.parts()]
        for step in range(3):
            overflows[0] = step == 1
            job.forward_backward(step, scaler)
            scaler.unscale_(job.optimizer)
            norms.append(float(ringcomm.clip_grad_norm_(job.pipe, 0.5)))
            scaler.step(job.optimizer)
            scaler.update()
            job.optimizer.zero_grad()
            scales.append(scaler.get_scale())
            params.append(job.parts())
        moved = [any(not torch.equal(a[k][1], b[k][1]) for k in a) for a, b in itertools.pairwise(params)]
        return scales, norms, moved

    ranks = cases.run(AXES, body)
    for scales, norms, moved in ranks:
        assert scales == [1024.0, 512.0, 512.0]
        assert moved == [True, False, True]
        assert norms[0] == pytest.approx(expected()[1][0], rel=0.02)
        assert norms[0] == ranks[0][1][0]
        assert norms[2] == ranks[0][1][2]


# ---- one step -----------------------------------------------------------------------------------------------------


def test_evaluation_frees_the_gathered_parameters() -> None:
    def body(model: Net, mesh: Any) -> tuple[float, float]:
        job = Job(model, mesh, 3)
        x, y = cases.batch(0)
        found = job.pipe.evaluate(x, target=y)
        flat = sharded_model_of(job.pipe)
        assert flat is not None
        assert not any(group.is_unsharded for group in flat.buckets)
        assert flat.sync.enabled
        again = job.train(0, 1)[0][0]
        assert not any(group.is_unsharded for group in flat.buckets)
        assert flat.communication_seconds > 0
        return float(found.loss), again

    model = make()
    losses = plain_gradients(model, 0)[0]
    for loss, _ in cases.run({"pp": 2, "dp": 2}, body):
        assert loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)


def test_a_step_that_fails_is_forgotten() -> None:
    def body(model: Net, mesh: Any) -> Result:
        job = Job(model, mesh, 3)
        flat = sharded_model_of(job.pipe)
        assert flat is not None

        def fails() -> None:
            with flat.interleaved():
                job.pipe.model(cases.batch(0)[0]).sum().backward()
                assert all(group.is_unsharded for group in flat.buckets)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert (flat.sync.enabled, flat.sync.microbatches) == (True, None)
        assert all(p.grad is None for p in job.pipe.parameters())
        assert not any(group.is_unsharded for group in flat.buckets)
        return trained(job)

    check(cases.run({"dp": 2}, body), 2)


def test_buffers_are_those_of_the_first_rank_of_each_stage() -> None:
    def body(model: Net, mesh: Any) -> tuple[int, dict[str, float]]:
        job = Job(model, mesh, 1)
        job.train(0, 1)
        job.pipe.train()
        told: dict[str, float] = {}
        flat = sharded_model_of(job.pipe)
        assert flat is not None
        with flat.interleaved():
            told = {name: float(b) for name, b in job.pipe.named_buffers()}
        return mesh.coordinates["pp"], told

    ranks = cases.run({"pp": 2, "dp": 2}, body, seen=True)
    for stage, told in ranks:
        assert len(told) == 2
        assert told == ranks[2 * stage][1]
    assert ranks[0][1] != ranks[2][1]


def test_memory_and_its_prediction() -> None:
    def body(model: Net, mesh: Any) -> None:
        job = Job(model, mesh, 2, accumulation="sequential", ties="sum")
        job.train(0, 2)
        found = ringcomm.memory(job.pipe)
        told = predict(job.pipe, 2, mesh["dp"].world_size)
        kept = ("parameters", "master", "gradients", "optimizer", "buffers")
        assert [getattr(found, name) for name in kept] == [getattr(told, name) for name in kept]

    cases.run(AXES, body)


# ---- other ways in ------------------------------------------------------------------------------------------------


def test_fully_shard_and_data_parallel_over_an_axis() -> None:
    def composed(model: Net, mesh: Any, over: Callable[[Any], dict[str, Any]]) -> Result:
        cases.parallelize(model, cases.PLAN, mesh["tp"])
        for block in model.blocks:
            ringcomm.fully_shard(block, **over(mesh))
        ringcomm.fully_shard(model, **over(mesh))
        optimizer = cases.adamw(model)
        x, y = (each.chunk(2)[mesh.coordinates["dp"]] for each in cases.batch(0))
        loss = cases.loss_of(model(x), y)
        loss.backward()
        if not over(mesh).get("mesh"):
            with pytest.raises(InvalidArgumentError, match="mesh=mesh"):
                ringcomm.clip_grad_norm_(model, 0.5)
            return Result(([], []), {})
        norm = float(ringcomm.clip_grad_norm_(model, 0.5))
        optimizer.step()
        found = {}
        with ringcomm.whole(model):
            for name, p in model.named_parameters(remove_duplicate=False):
                found[name] = (cases.part_of(p), p.detach().clone())
        return Result(([], [norm]), found)

    axes = {"dp": 2, "tp": 2}
    plain_model = make()
    norms = plain(plain_model, 0, 1)[1]
    for each in cases.run(axes, lambda model, mesh: composed(model, mesh, lambda mesh: {"mesh": mesh})):
        assert each.norms == pytest.approx(norms, rel=1e-5)
        assert each.wrong(plain_model.state_dict(), same=False) == []
    cases.run(axes, lambda model, mesh: composed(model, mesh, lambda mesh: {"comm": mesh["dp"]}))

    def wrapped(model: Net, mesh: Any) -> None:
        cases.parallelize(model, cases.PLAN, mesh["tp"])
        with pytest.raises(InvalidArgumentError, match="mesh of 2 axes"):
            ringcomm.DistributedDataParallel(model, device_mesh=mesh)
        ddp = ringcomm.DistributedDataParallel(model, comm=mesh["dp"])
        x, y = (each.chunk(2)[mesh.coordinates["dp"]] for each in cases.batch(0))
        cases.loss_of(ddp(x), y).backward()
        _, grads = plain_gradients(make_here, 0)
        for p, whole in zip(model.parameters(), (g for g in grads), strict=False):
            if p.requires_grad:
                mine = pieces_of(whole, cases.part_of(p), p)
                assert torch.allclose(p.grad, mine, rtol=1e-4, atol=1e-6)
                break
        with pytest.raises(InvalidArgumentError, match="mesh=mesh"):
            ringcomm.clip_grad_norm_(ddp, 0.5)

    make_here = make()
    cases.run(axes, wrapped)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}])
def test_a_norm_and_an_overflow_without_a_mesh_are_refused(axes: dict[str, int]) -> None:
    def body(model: Net, mesh: Any) -> None:
        if "tp" in axes:
            cases.parallelize(model, cases.PLAN, mesh["tp"])
            module: torch.nn.Module = model
        else:
            module = cases.Pipeline(cases.split(model, ["blocks.2"]), mesh["pp"], microbatches=2, loss=cases.loss_of)
        for parameters in (module, list(module.parameters()), cases.adamw(module)):
            with pytest.raises(InvalidArgumentError, match=r"ringcomm.shard\(model, optimizer, stage=0, mesh=mesh\)"):
                ringcomm.clip_grad_norm_(parameters, 1.0)
        scaler, optimizer = GradScaler(), cases.adamw(module)
        scaler.scale(torch.zeros(()))
        with pytest.raises(InvalidArgumentError, match=r"GradScaler: .* an overflow needs the other ranks"):
            scaler.unscale_(optimizer)

    cases.run(axes, body)
    cases.run({"dp": 2}, lambda model, mesh: ringcomm.clip_grad_norm_(model, 1.0))  # one of a plain model is torch's


def test_join_and_unknown_axes_are_refused() -> None:
    def joins(model: Net, mesh: Any) -> None:
        job = Job(model, mesh, 1)
        with pytest.raises(UnsupportedError, match="cut along pp and tp"), ringcomm.join(job.pipe):
            pass

    cases.run({"pp": 2, "tp": 2}, joins)

    def unknown(model: Net, mesh: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="the axis 'expert', expected dp, shard, cp"):
            ringcomm.shard(model, cases.adamw(model), 1, mesh=mesh)

    cases.run({"dp": 1, "expert": 2}, unknown)


@pytest.mark.parametrize("stage", [slow(0), slow(1), 3])
def test_a_frozen_stage(stage: int, tmp_path: Any) -> None:
    """The rank's optimizer has no parameters; clipping and checkpoints work on."""

    def body(model: Net, mesh: Any) -> float:
        for block in model.blocks[2:]:
            block.requires_grad_(False)
        model.norm.requires_grad_(False)
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
        job = Job(model, mesh, stage)
        (norm,) = job.train(0, 1)[1]
        ringcomm.checkpoint.save(tmp_path / "x", job.pipe, job.optimizer)
        ringcomm.checkpoint.load(tmp_path / "x", job.pipe, job.optimizer)
        assert job.train(1, 2)[1][0] > 0
        return norm

    first, *others = cases.run({"pp": 2, "dp": 2}, body)
    assert first > 0
    assert others == [first] * 3
