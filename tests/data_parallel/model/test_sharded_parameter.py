"""Parameters of stage 3 between passes: what is read of them, and what is written into them and their views."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.data_parallel.model.sharded_parameter import ShardedView
from ringcomm.errors import MismatchError
from tests.support.seeded import seeded


def _model() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), 3)


def _write(change: Callable[[torch.Tensor], Any], stage: int, W: int, **options: Any) -> list[torch.Tensor]:
    """The first weight after ``change`` was made to it outside of a pass, and after a step that follows."""

    plain = _model()

    def run(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage=stage, comm=comm, **options)
        found = []
        for step in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
            optimizer.step()
            if step == 0:
                change(model[0].weight)
            found.append({name: x.clone() for name, x in model.state_dict().items()}["0.weight"])
        return found

    return ringcomm.run_ranks(run, W, ranks="threads")[0]


@torch.no_grad()
def _columns(w: torch.Tensor) -> None:
    w[:, :2].zero_()


@torch.no_grad()
def _rows(w: torch.Tensor) -> None:
    for k, row in enumerate(w):
        row.mul_(k)


@torch.no_grad()
def _transposed(w: torch.Tensor) -> None:
    w.t()[4] = 0
    w.T[1].fill_(2)
    w.mT.view(6, 2, 3)[:, 1] = 5


@torch.no_grad()
def _chunks(w: torch.Tensor) -> None:
    first, second = w.chunk(2)
    first.copy_(second)
    w.split([1, 5])[1].neg_()
    w.diagonal().fill_(7)


def _orthogonal(w: torch.Tensor) -> None:
    nn.init.orthogonal_(w, generator=torch.Generator().manual_seed(0))
    w.data.view(-1)[3:5] += 1
    w.detach()[0].sub_(w.detach()[1])


@torch.no_grad()
def _types(w: torch.Tensor) -> None:
    w.view(torch.int32)[0, 0] = 1 << 23
    torch.view_as_complex(w.view(6, 3, 2)).conj()[1] = 1 + 2j
    torch.add(w[0], 1, out=w[2])
    torch._foreach_mul_([w[3], w[4]], 2)


def _data(w: torch.Tensor) -> None:
    delta = nn.Parameter(torch.ones(6, 6))
    w.data += delta * 2  # as peft's merge_adapter
    w.data -= delta
    w.data[0] = delta.data[0]


@torch.no_grad()
def _arguments(w: torch.Tensor) -> None:
    w[w > 0.1] = 0.5
    w[torch.tensor([0, 2])] = w[torch.tensor([1, 1])]
    w[0].copy_(w[:, 1])
    w.unbind(1)[2].clamp_(max=w[0].max())


def _followed(w: torch.Tensor) -> None:
    row, column = w[1], w.t()[2]
    rest = row[2:].view(2, 2)
    with torch.no_grad():
        row.mul_(2)
        column[0] = 5
        rest[1].zero_()
        row.data.add_(1)
    row, rest = w[1], w[1][2:].view(2, 2)
    loss = (row * w[0]).sum() + rest.square().sum()
    (grad,) = torch.autograd.grad(loss, w)
    with torch.no_grad():
        w.sub_(grad)


CHANGES = [_followed, _columns, _rows, _transposed, _chunks, _orthogonal, _types, _data, _arguments]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_into_a_view_counts(change: Callable[[torch.Tensor], Any], stage: int) -> None:
    for expected, found in zip(_write(change, 0, 3), _write(change, stage, 3), strict=True):
        assert torch.equal(expected, found)


def _on_a_parameter(test: Callable[[Any, torch.Tensor], None]) -> None:
    plain = _model()

    def run(comm: ringcomm.Communicator) -> None:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage=3, comm=comm)
        test(model[0].weight, plain[0].weight)

    ringcomm.run_ranks(run, 2, ranks="threads")


def test_a_view_has_the_facts_of_a_view() -> None:
    def test(w: Any, plain: torch.Tensor) -> None:
        view, expected = w.detach().t()[1:, ::2], plain.detach().t()[1:, ::2]
        assert view.shape == expected.shape
        assert view.stride() == expected.stride()
        assert not view.is_contiguous()
        assert w.is_contiguous()
        assert w.stride() == (6, 1)
        copied = view.contiguous()
        copied.zero_()  # a copy, which is nobody's
        assert torch.equal(view + 0, expected)
        assert w.detach().contiguous().view(-1)[3] == plain.view(-1)[3]

    _on_a_parameter(test)


def test_a_view_is_no_parameter() -> None:
    """A module that keeps one has no parameter more."""

    def test(w: Any, plain: torch.Tensor) -> None:
        module = nn.Module()
        for number, view in enumerate((w.data, w.detach(), w[0], w.detach()[0])):
            assert not isinstance(view, nn.Parameter)
            setattr(module, f"kept{number}", view)
        assert not [*module.parameters()]
        assert w.data.mul_(1).add_(w.detach()) is not None
        with torch.no_grad():
            assert w.add_(w) is w

    _on_a_parameter(test)


def test_copies_are_plain_tensors() -> None:
    def test(w: Any, plain: torch.Tensor) -> None:
        file = io.BytesIO()
        torch.save(w, file)
        file.seek(0)
        for made in (copy.deepcopy(w), torch.load(file)):
            assert type(made) is nn.Parameter
            assert made.requires_grad
            assert torch.equal(made, plain)
        assert torch.equal(copy.deepcopy(w.detach()[1]), plain[1])
        assert copy.deepcopy(w.detach()[1].requires_grad_()).requires_grad

    _on_a_parameter(test)


def test_writes_that_would_be_lost_raise() -> None:
    def test(w: Any, plain: torch.Tensor) -> None:
        for array in (w.detach().numpy(), w.detach()[0].numpy(), w.detach().__array__()):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7
        with pytest.raises(ringcomm.InvalidArgumentError, match=r"t_: rank . got 0\.weight"):
            w.detach().t_()
        with pytest.raises(ringcomm.InvalidArgumentError, match=r"view\.copy_"):
            w.detach()[0].data = torch.zeros(6)
        with pytest.raises(ringcomm.InvalidArgumentError, match=r"zero_: .* view of 0\.weight that has a gradient"):
            w[0].zero_()

    _on_a_parameter(test)


@torch.no_grad()
def _negated_twice(w: torch.Tensor) -> None:
    w.neg_()
    w.neg_()


def test_master_weights_follow_at_the_step() -> None:
    """Not at each write, of which a later one may put back what there was: the bits that bfloat16 has not stay."""
    narrow = ringcomm.MixedPrecision(param_dtype=torch.bfloat16)
    expected = _write(_negated_twice, 0, 2, mixed_precision=narrow)
    assert all(map(torch.equal, expected, _write(lambda w: None, 0, 2, mixed_precision=narrow)))
    for stage in (1, 2, 3):
        assert all(map(torch.equal, expected, _write(_negated_twice, stage, 2, mixed_precision=narrow)))


def test_views_inside_of_whole() -> None:
    """A view made before reads and writes what is whole, and does not take it away."""

    def run(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        ringcomm.shard(model, None, stage=3, comm=comm)
        row = model[0].weight.detach()[1]
        with ringcomm.whole(model):
            row.fill_(2)
            assert torch.equal(model[0].weight[1], torch.full((6,), 2.0))
        assert row.sum() == 12

    ringcomm.run_ranks(run, 2, ranks="threads")


def _per_sample_gradients(model: nn.Module, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x[None],)).square().sum()

    found: dict[str, torch.Tensor] = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, torch.eye(6))
    return found


def test_transforms_of_torch_func() -> None:
    plain = _model()
    expected = _per_sample_gradients(plain, dict(plain.named_parameters()))

    def run(comm: ringcomm.Communicator) -> None:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage=3, comm=comm)
        with pytest.raises(ringcomm.UnsupportedError, match=r"view of 0\.weight .* pass {name: p\.detach"):
            _per_sample_gradients(model, {name: p.detach() for name, p in model.named_parameters()})
        for params in (
            dict(model.named_parameters()),
            {name: p.detach().clone() for name, p in model.named_parameters()},
        ):
            for name, found in _per_sample_gradients(model, params).items():
                assert torch.equal(found, expected[name])
        assert torch.equal(torch.func.vmap(model)(torch.eye(6)), plain(torch.eye(6)))

    ringcomm.run_ranks(run, 2, ranks="threads")


def test_a_view_outlives_its_stage_but_not_its_model() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage=3, comm=comm)
        view = model[0].weight.detach()[1]
        for stage in (1, 3):
            ringcomm.restage(model, optimizer, stage)
            view.fill_(stage)
            assert torch.equal(model.state_dict()["0.weight"][1], torch.full((6,), float(stage)))
        ringcomm.unshard(model)
        with pytest.raises(ringcomm.InvalidArgumentError, match="dropped or unsharded"):
            view.fill_(2)

    ringcomm.run_ranks(run, 2, ranks="threads")


def test_ranks_evaluate_different_things_inside_whole() -> None:
    """At stage 3, as often as each rank likes; the training goes on with the same bits."""
    plain = _model()

    def run(comm: ringcomm.Communicator, evaluates: bool) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage=3, comm=comm, units=[model[0], model[2]])
        for step in range(3):
            with ringcomm.whole(model) if evaluates else contextlib.nullcontext():
                for _ in range((comm.rank + step) % 3 if evaluates else 0):
                    assert torch.equal(model(torch.eye(6)), F.linear(model[:2](torch.eye(6)), *model[2].parameters()))
            assert type(model[0].weight).__name__ == "ShardedParameter"
            model(torch.full((2, 6), float(comm.rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [x.clone() for x in model.state_dict().values()]

    without, found = (ringcomm.run_ranks(run, 3, evaluates, ranks="threads")[0] for evaluates in (False, True))
    assert all(map(torch.equal, without, found))


@pytest.mark.parametrize("call", ["reads a parameter", "evaluates"])
def test_an_error_says_which_calls_are_collectives(call: str) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _model()
        ringcomm.shard(model, None, stage=3, comm=comm)
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            if comm.rank == 0:
                model[0].weight.norm() if call == "reads a parameter" else model(torch.ones(2, 6))

    with pytest.raises(ringcomm.MismatchError) as raised:
        ringcomm.run_ranks(run, 2, ranks="threads", timeout=20)
    if sys.version_info >= (3, 11):
        assert "At stage 3 these are collectives: forward" in str(raised.value.__notes__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an exception has notes from Python 3.11 on")
def test_an_error_of_one_rank_that_saves_says_that_state_dict_is_a_collective() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _model()
        _, optimizer = ringcomm.shard(model, torch.optim.Adam(model.parameters()), stage=1, comm=comm)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        if comm.rank == 0:
            optimizer.state_dict()
        comm.barrier()

    ended = ringcomm.run_ranks(run, 2, ranks="threads", timeout=20, return_exceptions=True)
    assert {*map(type, ended)} == {ringcomm.MismatchError}
    assert "At stage 1 these are collectives: " in str(ended[0].__notes__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an exception has notes from Python 3.11 on")
def test_a_model_after_its_communicator_was_closed() -> None:
    with ringcomm.init(rank=0, world_size=1) as comm:
        model = _model()
        ringcomm.shard(model, None, stage=3, comm=comm)
    for call in (lambda: model(torch.ones(2, 6)), model.state_dict):
        with pytest.raises(ringcomm.ClosedError) as raised:
            call()
        assert "Use and save the model before that" in str(raised.value.__notes__)


@pytest.mark.parametrize("call", ["reads a parameter", "state_dict", "whole"])
def test_a_barrier_of_the_program_is_not_the_one_before_a_gather(call: str) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _model()
        ringcomm.shard(model, None, stage=3, comm=comm)
        model(torch.ones(2, 6)).sum().backward()
        if comm.rank == 0 and call == "whole":
            with ringcomm.whole(model):
                pass
        elif comm.rank == 0:
            _ = model[0].weight.norm() if call == "reads a parameter" else model.state_dict()
        comm.barrier()

    text = r"rank 0 called barrier before a gather .*, rank 1 called barrier "
    with pytest.raises(ringcomm.MismatchError, match=text):
        ringcomm.run_ranks(run, 2, ranks="threads", timeout=20)


def _hard_update(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            q.data.copy_(p.data)
            q.lerp_(p * 2, 0.25)
            q.data[0].add_(p.data[0])
    return (a(x) - b(x + 1)).square().sum()


def _distance(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return a(x).sum() + b(x).sum() + sum(((p - q) * p[:1]).square().sum() for p, q in pairs)


def _others_weight(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(a(b(x)[:, :1].expand(-1, 6)), b.get_parameter("2.weight").t()).square().sum()


@pytest.mark.parametrize("loss_of", [_hard_update, _distance, _others_weight])
def test_two_models_in_one_operation(loss_of: Callable[..., torch.Tensor]) -> None:
    first, second = _model(), copy.deepcopy(_model()).requires_grad_(True)

    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        models = copy.deepcopy(first), copy.deepcopy(second)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1 + 0.1 * k) for k, model in enumerate(models)]
        for model, optimizer in zip(models, optimizers, strict=True):
            ringcomm.shard(model, optimizer, stage=stage, comm=comm)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3 * step + comm.rank))
            loss_of(*models, x).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [x.clone() for model in models for x in model.state_dict().values()]

    expected = ringcomm.run_ranks(run, 2, 0, ranks="threads", timeout=20)[0]
    for stage in (1, 2, 3):
        assert all(map(torch.equal, expected, ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=20)[0]))


def _averages_in_its_place(model: Any, average: list[torch.Tensor], folder: str | None) -> list[torch.Tensor]:
    """As the usual class for it does, which keeps `p.data`. Returns what was kept."""
    kept = [p.data for p in model.parameters()]
    for p, other in zip(model.parameters(), average, strict=True):
        p.data = other
    with torch.no_grad():
        model(torch.eye(6, dtype=average[0].dtype))
    saved = model.state_dict()
    assert all(torch.equal(x.to(other.dtype), other) for x, other in zip(saved.values(), average, strict=True))
    if folder is not None:
        ringcomm.checkpoint.save(folder, model)
    found = [own.clone() for own in kept]
    for p, own in zip(model.parameters(), kept, strict=True):
        p.data = own
    return found


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("wrap", ["ddp", 0, 1, 2, 3])
def test_averaged_weights_take_the_place_of_the_models(wrap: Any, narrow: bool, tmp_path: Any) -> None:
    """The training goes on as if they had never been there, to the last bit of the master weights."""
    plain = _model()
    precision = ringcomm.MixedPrecision(param_dtype=torch.bfloat16) if narrow else None

    def run(comm: ringcomm.Communicator, evaluates: bool) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if wrap == "ddp":
            wrapped: nn.Module = ringcomm.DistributedDataParallel(model, comm, mixed_precision=precision)
        else:
            wrapped, _ = ringcomm.shard(model, optimizer, stage=wrap, comm=comm, mixed_precision=precision)
        for step in range(3):
            wrapped(torch.full((2, 6), float(comm.rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                folder = None if wrap == "ddp" else f"{tmp_path}/{step}"
                own = [p.detach().clone() for p in model.parameters()]
                kept = _averages_in_its_place(model, [x * 0.5 for x in own], folder)
                assert all(map(torch.equal, own, kept))
        return [x.clone() for x in model.state_dict().values()]

    without, found = (ringcomm.run_ranks(run, 2, evaluates, ranks="threads")[0] for evaluates in (False, True))
    assert all(map(torch.equal, without, found))


def test_what_was_kept_of_a_parameter_is_memory() -> None:
    """`kept` of `kept = p.data; p.data = other` can be written into, and is the parameter's memory again, once it is
    put back."""

    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage=stage, comm=comm)
        p, q = (model[i].weight for i in (0, 2))
        kept, row, found = p.data, p.data[0], []
        p.data = torch.full((6, 6), 7.0)
        row.add_(1)
        kept.view(-1)[-1] = 5
        found += [kept.clone(), p.detach().clone()]
        p.data = kept
        row.add_(1)
        p.data.mul_(2)
        found += [kept.clone(), p.detach().clone()]
        p.data, q.data = torch.cat([q.data, q.data]), p.data[:3]
        return [*found, p.detach().clone(), q.detach().clone()]

    plain = _model()
    expected = ringcomm.run_ranks(run, 2, 0, ranks="threads", timeout=20)[0]
    for W in (1, 2, 3):
        for found in ringcomm.run_ranks(run, W, 3, ranks="threads", timeout=20):
            assert all(map(torch.equal, expected, found))


def test_what_is_kept_of_whole_stays() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage=3, comm=comm)
        with ringcomm.whole(model):
            kept = [p.detach() for p in model.parameters()]
            array = model[0].weight.detach().numpy()
        model(torch.eye(6))
        assert all(map(torch.equal, kept, plain.parameters()))
        assert array.sum() == plain[0].weight.detach().numpy().sum()
        with ringcomm.whole(model):
            model[0].weight.data = torch.ones(6, 6)
        assert model[0].weight.sum() == 36
        with ringcomm.whole(model):
            model.load_state_dict(plain.state_dict())
        model[0].bias.data = model[0].weight.data[1]
        assert torch.equal(model[0].bias + 0, plain[0].weight[1])
        assert torch.equal(model[0].weight + 0, plain[0].weight)

    plain = _model()
    ringcomm.run_ranks(run, 2, ranks="threads", timeout=20)


@pytest.mark.parametrize("keep", [False, True])
def test_an_array_of_a_gathered_parameter(keep: bool) -> None:
    """A forward hook that logs a weight through NumPy: torch never again resizes memory that an array has shared."""

    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model, kept, found = copy.deepcopy(plain), [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage=stage, comm=comm)

        def log(module: Any, *args: Any) -> None:
            array = module.weight.detach().cpu().numpy()
            found.append(torch.tensor(array))
            if keep:
                kept.append((array, array.copy()))

        model[0].register_forward_hook(log)
        for _ in range(3):
            model(torch.eye(6)[comm.rank :]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with ringcomm.whole(model):
            log(model[2])
            found += [p.detach().clone() for p in model.parameters()]
        if stage == 3:
            assert all((array == copied).all() for array, copied in kept)
        return found

    plain = _model()
    expected = ringcomm.run_ranks(run, 2, 0, ranks="threads", timeout=20)[0]
    for found in ringcomm.run_ranks(run, 2, 3, ranks="threads", timeout=20):
        assert all(map(torch.equal, expected, found))


def test_values_that_torch_reads_without_torch_function_are_right() -> None:
    """A view has a copy of its values, for functions that read memory themselves."""

    def test(w: Any, plain: torch.Tensor) -> None:
        view, expected = w.detach()[0], plain.detach()[0]
        assert torch.equal(torch.tensor(view), expected)
        x = torch.ones(6, requires_grad=True)
        (x * 1).backward(view)
        assert torch.equal(x.grad, expected)
        assert f"{view[0]:.3f}" == f"{expected[0]:.3f}"
        assert torch.equal(torch.func.vmap(lambda x: w.detach().t() @ x)(torch.eye(6)), plain.detach())

    _on_a_parameter(test)


def test_a_view_can_have_a_gradient() -> None:
    def test(w: Any, plain: torch.Tensor) -> None:
        assert f"{w[0][0]:.3f}" == f"{plain[0][0]:.3f}"
        view = w.detach()[1].requires_grad_()
        optimizer = torch.optim.SGD([view], lr=0.1)
        (view * 2).sum().backward()
        assert torch.equal(view.grad, torch.full((6,), 2.0))
        optimizer.step()
        assert torch.equal(w.detach()[1] + 0, plain.detach()[1] - 0.2)  # as in torch: the same memory
        assert (nn.Parameter(w.data[0]) * 1).requires_grad

    _on_a_parameter(test)


def test_a_view_lies_where_it_was_made() -> None:
    """Also where what has chosen it is changed later."""

    def test(w: Any, plain: torch.Tensor) -> None:
        row, sizes = torch.tensor(0), [2, 4]
        first, (_, rest) = w.data[row], w.data.split(sizes)
        row += 1
        sizes[:] = [4, 2]
        first.fill_(9)
        rest.fill_(8)
        expected = plain.detach().clone()
        expected[0], expected[2:] = 9, 8
        assert torch.equal(w.detach() + 0, expected)
        view = w.data
        for _ in range(300):
            view = view[:]
        assert torch.equal(view + 0, expected)

    _on_a_parameter(test)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["evaluates", "trains", "loads"])
def test_ranks_run_different_programs_inside_whole(stage: int, what: str) -> None:
    """Also with buffers, and after what all ranks do together."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def run(comm: ringcomm.Communicator) -> None:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage, comm)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with ringcomm.whole(model):
                if what == "trains":
                    with torch.enable_grad():
                        model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if what == "loads":
                    model.load_state_dict(plain.state_dict())
                model.eval()
                for _ in range(comm.rank):
                    model(x)
                model.train()
            count = torch.ones(3)
            comm.all_reduce(count)
            assert float(count[0]) == 2

    ringcomm.run_ranks(run, 2, timeout=20)


def test_a_gather_that_fails_leaves_the_parameters_in_shards() -> None:
    """What is raised is the reason, and the next pass of all ranks is right."""

    def run(comm: ringcomm.Communicator) -> torch.Tensor:
        model = _model()
        ringcomm.shard(model, None, 3, comm)
        if comm.rank:
            comm.barrier()
        else:
            with pytest.raises(MismatchError, match="barrier"):
                model(torch.ones(2, 6))
            assert isinstance(model[0].weight, ShardedView)
        return model

    with pytest.raises(MismatchError, match="barrier"):
        ringcomm.run_ranks(run, 2, ranks="threads", timeout=10)


def test_operations_without_values_need_no_other_rank() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _model()
        ringcomm.shard(model, None, 3, comm)
        if comm.rank == 0:
            p = model[0].weight
            assert p.new_zeros(2, 3).tolist() == [[0] * 3] * 2
            one = torch.ones((), dtype=torch.float64)
            assert one.to(p).dtype == one.type_as(p).dtype == p.dtype
            assert one.expand_as(p).shape == torch.ones(p.numel()).view_as(p).shape == p.shape
            assert torch.ones_like(p).shape == torch.empty_like(p).shape == p.shape
            assert torch.result_type(p, model[0].bias) == p.new_tensor([1]).dtype == p.dtype
            assert (p.is_signed(), p.is_inference(), p.dim_order()) == (True, False, (0, 1))
            assert type(torch.full_like(p, 3)) is torch.Tensor
            assert torch.full_like(p, 3).is_contiguous()
        comm.barrier()

    ringcomm.run_ranks(run, 2, timeout=10)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_on_the_nodes_that_accumulate_gradients(stage: int) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model, seen, together = copy.deepcopy(plain), [], []
        ringcomm.shard(model, None, stage, comm)
        nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
        for node in nodes:
            node.register_hook(lambda *_: seen.append(1))
        torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), lambda grads: together.append(grads))
        view = model[0].weight[1:]
        assert torch.equal(view + 0, plain[0].weight[1:])
        (model(torch.ones(2, 6)).sum() + view.sum()).backward()
        assert (len(seen), len(together)) == (4, 1)
        assert all(isinstance(grad, torch.Tensor) for grad in together[0])

    plain = _model()
    ringcomm.run_ranks(run, 2, timeout=10)


@pytest.mark.parametrize("stage", [0, 3])
def test_saved_parameters_can_be_read_from_the_graph(stage: int) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage, comm)
        loss = model(torch.ones(2, 6))
        node = loss.grad_fn
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_mat")]
        assert any(torch.equal(x, plain[2].weight.t()) for x in saved if torch.is_tensor(x))
        loss.sum().backward()
        model(torch.ones(2, 6)).sum().backward()

    plain = _model()
    ringcomm.run_ranks(run, 2, timeout=10)


class _Unusual(nn.Module):
    """Complex views, conjugates, and a momentum copy whose data is assigned in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
        self.pairs = nn.Parameter(torch.randn(4, 4, 2))
        self.query, self.key = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.key.data = self.key.data * 0.9 + self.query.data * 0.1
        mixed = (self.c * self.c.conj()).real + self.c.real * self.c.imag + torch.view_as_complex(self.pairs).abs()
        y = torch.einsum("jk,ij->ik", torch.view_as_complex(self.pairs), x.to(torch.cfloat)).real
        return (x @ mixed + y + x @ self.key) @ self.query


def test_complex_views_and_data_that_forward_assigns() -> None:
    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        ringcomm.shard(model, optimizer, stage, comm)
        found = []
        for step in range(3):
            loss = model(torch.full((2, 4), float(comm.rank + step))).square().sum()
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            for p in model.parameters():  # what zero_grad was before torch had it
                assert p.grad is not None
                p.grad.detach_()
                p.grad.zero_()
        file = io.BytesIO()
        torch.save(dict(model.named_parameters()), file)
        file.seek(0)
        return [*found, *torch.load(file).values(), model.key.type(torch.float64)]

    torch.manual_seed(0)
    plain = _Unusual()
    expected = ringcomm.run_ranks(run, 2, 0, ranks="threads", timeout=20)[0]
    assert all(x.isfinite().all() for x in expected)
    for stage in (1, 2, 3):
        assert all(map(torch.equal, expected, ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=20)[0]))


def test_views_of_a_view_after_its_data_was_replaced() -> None:
    def test(w: Any, plain: torch.Tensor) -> None:
        view, expected = w[0], plain[0]
        w.data = torch.zeros(6, 6)
        assert torch.equal(view[1:] + 0, expected[1:])

    _on_a_parameter(test)


def _penalty(way: str, params: list[torch.Tensor]) -> torch.Tensor:
    penalties = []
    for p in params:
        ones = torch.ones(2, p.shape[-1])
        if way == "the parameter":
            penalties.append(p.square().sum())
        elif way == "a view":
            penalties.append((ones @ p.t()).square().sum())
        elif way == "an element":
            penalties.append(p[0].square().sum())
        else:
            penalties.append(nn.functional.linear(ones, p).square().sum())
    return torch.stack(penalties).sum()


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("way", ["the parameter", "a view", "an element", "a function"])
def test_a_penalty_with_a_backward_pass_of_its_own(way: str, reshard_after_forward: bool, blocks: bool) -> None:
    """The parameters that it saves are freed when the loss's backward pass ends."""

    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        units = [model[0], model[2]] if blocks else []
        ringcomm.shard(model, optimizer, stage, comm, units=units, reshard_after_forward=reshard_after_forward)
        for _ in range(2):
            loss = model(torch.linspace(-1, 1, 8).view(2, 4) * (comm.rank + 1)).square().mean()
            penalty = _penalty(way, [p for p in model.parameters() if p.dim() == 2])
            loss.backward()
            penalty.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    expected, *others = [ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=20)[0] for stage in (0, 2, 3)]
    assert all(x.isfinite().all() for x in expected)
    for found in others:
        assert all(map(torch.equal, expected, found))


def test_a_parameter_that_stays_gathered_after_forward_has_memory() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = nn.Linear(4, 4, bias=False)
        ringcomm.shard(model, None, 3, comm)
        model(torch.ones(1, 4)).sum()
        assert model.weight.data_ptr() == model.weight.untyped_storage().data_ptr() != 0
        with torch.no_grad():
            row = model.weight[0]
            model.weight.fill_(comm.world_size)
        assert row.tolist() == model.weight[1].tolist() == [2.0] * 4

    ringcomm.run_ranks(run, 2, ranks="threads", timeout=20)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_torch_func_inside_whole(stage: int) -> None:
    """torch.func refuses hooks on saved tensors."""

    def run(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage, comm)
        x = torch.ones(6)
        model(x)  # parameters may stay gathered
        with ringcomm.whole(model), torch.enable_grad():
            params = {name: p.detach().clone() for name, p in model.named_parameters()}
            loss = lambda params: torch.func.functional_call(model, params, x).sum()  # noqa: E731
            return [torch.func.jacrev(model)(x), *torch.func.grad(loss)(params).values()]

    plain = _model()
    for found in ringcomm.run_ranks(run, 2, ranks="threads", timeout=20):
        params = dict(plain.named_parameters())
        expected = torch.autograd.grad(plain(torch.ones(6)).sum(), list(params.values()))
        assert all(map(torch.equal, found[1:], expected))
        assert found[0].shape == (3, 6)


def _penalty_of_a_changed_parameter(model: nn.Module) -> None:
    loss, penalty = model(torch.ones(2, 6)).mean(), model[0].weight.square().sum()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    loss.backward()
    penalty.backward()


def _loss_of_a_changed_parameter(model: nn.Module) -> None:
    loss = model(torch.ones(2, 6, requires_grad=True)).mean()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    loss.backward()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("run", [_penalty_of_a_changed_parameter, _loss_of_a_changed_parameter])
def test_autograd_refuses_a_parameter_that_was_written_to(stage: int, run: Callable[[nn.Module], None]) -> None:
    def on_rank(comm: ringcomm.Communicator) -> None:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage, comm)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(model)

    plain = _model()
    ringcomm.run_ranks(on_rank, 2, ranks="threads", timeout=20)


def test_a_sparse_matrix_times_a_parameter() -> None:
    def run(comm: ringcomm.Communicator, stage: int) -> torch.Tensor:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage, comm)
        loss, graph = model(torch.ones(2, 6)).mean(), torch.eye(6).to_sparse()
        (torch.sparse.mm(graph, model[0].weight).square().sum() + loss).backward()
        return model[0].weight.grad.clone()

    plain = _model()
    expected, found = (ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=20)[0] for stage in (0, 3))
    assert torch.equal(expected, found)


@pytest.mark.parametrize("keep", [lambda p: p[0], lambda p: p.detach()[1:], lambda p: p.data])
def test_training_after_a_view_was_taken_in_inference_mode(keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The view keeps the memory that it was taken in; the parameters that are gathered next must be trainable."""

    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage, comm, units=[model[0], model[2]])
        kept: list[torch.Tensor] = []

        def take(module: Any, _: Any) -> None:
            kept.append(module.weight[:2])

        for _ in range(3):
            with torch.inference_mode():
                kept.extend(keep(p) for p in model.parameters())
                hook = model[0].register_forward_pre_hook(take)
                model(torch.ones(2, 6))
                hook.remove()
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = _model()
    expected, found = (ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=20)[0] for stage in (0, 3))
    assert all(map(torch.equal, expected, found))


def _detached_leaf(p: torch.Tensor) -> torch.Tensor:
    return p.detach().requires_grad_()


@pytest.mark.parametrize("leaf_of", [_detached_leaf, lambda p: nn.Parameter(p.data)])
def test_a_leaf_that_shares_a_parameters_values_has_a_gradient_of_its_own(
    leaf_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    plain, x = _model(), torch.linspace(-1, 2, 12).view(2, 6)

    def train(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        ringcomm.shard(model, None, stage, comm)
        leaf, found = leaf_of(model[0].weight), []
        optimizer = torch.optim.AdamW([leaf], 0.1)
        for _ in range(3):
            loss = F.linear(x, leaf).tanh().square().sum() + model(x).sum()
            optimizer.zero_grad()
            loss.backward()
            assert leaf.grad is not None
            found += [loss.detach(), leaf.grad.clone()]
            optimizer.step()
        for change in (lambda: leaf.mul_(2), lambda: F.relu(leaf, inplace=True)):
            with pytest.raises(RuntimeError, match="leaf"):
                change()
        loss = F.linear(x, leaf).square().sum()
        found += torch.autograd.grad(loss, [leaf], retain_graph=True)
        leaf.grad = None
        loss.backward(inputs=[leaf])
        assert leaf.grad is not None
        copied = copy.deepcopy(leaf)
        assert copied.requires_grad
        assert isinstance(copied, nn.Parameter) == isinstance(leaf, nn.Parameter)
        found += [leaf.grad, torch.ones(6, 6).mul(other=leaf).detach(), copied.detach()]
        return [*found, *(x.clone() for x in model.state_dict().values())]

    wanted, found = (ringcomm.run_ranks(train, 2, stage)[0] for stage in (0, 3))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("stage", [0, 3])
def test_torch_nn_init_writes_into_a_slice(stage: int) -> None:
    def rank(comm: ringcomm.Communicator) -> torch.Tensor:
        model = _model()
        ringcomm.shard(model, None, stage, comm)
        nn.init.constant_(model[0].bias[2:4], 1.0)
        nn.init.uniform_(model[0].bias[:2], 7.0, 7.0)
        return model.state_dict()["0.bias"].clone()

    found = ringcomm.run_ranks(rank, 2)[1]
    assert torch.equal(found[:4], torch.tensor([7.0, 7.0, 1.0, 1.0]))
    assert torch.equal(found[4:], _model()[0].bias[4:])
