"""Views of stage 3 parameters that autograd records, in random programs: the bits of stage 0 at every stage."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.errors import InvalidArgumentError
from tests.support.choice import drawn
from tests.support.seeded import seeded

pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[[torch.Tensor], torch.Tensor]

VIEWS: dict[str, Change] = {  # no elements twice: torch's new node after a write would sum in another order
    "rows": lambda v: v[1:] if v.dim() else v,
    "last": lambda v: v[..., -1] if v.dim() else v,
    "t": lambda v: v.t() if v.dim() <= 2 else v.mT,
    "flat": lambda v: v.flatten() if v.is_contiguous() else v[None],
    "pairs": lambda v: v.view(2, -1) if v.is_contiguous() and v.numel() % 2 == 0 else v.unsqueeze(-1),
    "reshaped": lambda v: v.reshape(-1)[: v.numel() - 1] if v.is_contiguous() else v,
    "diagonal": lambda v: v.diagonal() if v.dim() == 2 else v,
    "windows": lambda v: v.unfold(0, 2, 2) if v.dim() and v.shape[0] > 1 else v,
    "same": lambda v: v.view_as(v),
    "strided": lambda v: v.as_strided(v.shape, v.stride()),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {  # (the parameter, the view)
    "parameter": lambda w, v: w.mul_(0.5),
    "column": lambda w, v: w[:, 1].fill_(0.25),
    "data": lambda w, v: w.data.add_(0.125),
    "detached": lambda w, v: w.detach()[0].neg_(),
    "view": lambda w, v: v.mul_(0.75) if 0 not in v.stride() else None,
    "slice": lambda w, v: v[..., :1].zero_() if v.dim() and 0 not in v.stride() else None,
    "nothing": lambda w, v: None,
}
USES: dict[str, Change] = {
    "sin": lambda v: v.sin().sum(),
    "linear": lambda v: (v * torch.linspace(-1, 1, v.numel()).view(v.shape)).sum(),
    "square": lambda v: v.square().mean(),
    "slice": lambda v: v[..., :1].exp().sum() if v.dim() else v.exp(),
    "checkpoint": lambda v: checkpoint(lambda x: x.tanh().sum(), v, use_reentrant=False),
}


LEAVES: dict[str, Change] = {
    "parameter": lambda p: p,
    "data": lambda p: nn.Parameter(p.data),
    "detached": lambda p: p.detach().requires_grad_(),
}


def _run(
    comm: ringcomm.Communicator, plain: nn.Module, stage: int, leaf: str, chain: list[str], events: list[Any]
) -> list[Any]:
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.0001)
    w = LEAVES[leaf](model[0].weight)
    v, found = w, []
    for name in chain:
        v = VIEWS[name](v)
    for write, use, after in events:
        loss = USES[use](v)
        with torch.no_grad():
            WRITES[write](w, v)
        loss = loss + USES[after](v)
        try:
            # Of a view only without a write, after which torch makes its node again, and this graph has the old one.
            of = [v, w] if write == "nothing" and v is not w else [w]
            found += torch.autograd.grad(loss, of, retain_graph=True)
            loss.backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            found.append(torch.tensor(-1.0))
        if w.grad is not None:
            found.append(w.grad.clone())
        optimizer.step()
        w.grad = None
        found += [v.detach().clone(), w.detach().clone()]
    return found


EVENT = st.tuples(*(st.sampled_from(sorted(each)) for each in (WRITES, USES, USES)))


@drawn(40)
@given(
    st.sampled_from(["parameter", *LEAVES]),
    st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=3),
    st.lists(EVENT, min_size=1, max_size=3),
)
def test_random_programs(leaf: str, chain: list[str], events: list[Any]) -> None:
    plain = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 5)
    wanted, found = (
        ringcomm.run_ranks(_run, 2, plain, stage, leaf, chain, events, ranks="threads", timeout=30) for stage in (0, 3)
    )
    for a, b in zip(wanted, found, strict=True):
        assert [*map(torch.equal, a, b)] == [True] * len(a)


@pytest.mark.parametrize("kind", ["unbind", "expand", "complex", "init", "grad", "step"])
def test_the_gradient_through_a_view_after_a_write(kind: str) -> None:
    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ringcomm.shard(model, optimizer, stage, comm)
        w = model[2].weight
        if kind == "unbind":
            views = w.unbind()
            w.data.mul_(0.5)
        elif kind == "expand":
            views = (w[1].expand(3, 4),)
            with torch.no_grad():
                w.mul_(0.5)
        elif kind == "complex":
            views = (torch.view_as_complex(w.view(4, 2, 2)).conj().imag[1:],)
            with torch.no_grad():
                views[0].mul_(0.5)
        elif kind == "init":
            views = (w.reshape(2, 8)[1], w.t()[1:])
            with torch.no_grad():
                nn.init.constant_(views[0], 2.0)
        elif kind == "grad":
            views = (w.t(), w[1:])
            found = torch.autograd.grad(views[0].sin().sum() + views[1].exp().sum(), [*views, w], retain_graph=True)
            return [*found, *torch.autograd.grad(views[1].exp().sum(), [views[0], w], allow_unused=True)[1:]]
        else:
            views = (w[0], model[2].bias[1:])
            (model(torch.ones(4)).sum() + views[0].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        sum(((k + 2) * v.sin()).sum() for k, v in enumerate(views)).backward()
        optimizer.step()
        assert w.grad is not None
        return [w.grad.clone(), w.detach().clone(), *(v.detach().clone() for v in views)]

    wanted, found = (ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=30)[1] for stage in (0, 3))
    assert [*map(torch.equal, wanted, found)] == [True] * len(wanted)


def test_a_write_into_a_slice_between_forward_and_backward_is_refused() -> None:
    def run(comm: ringcomm.Communicator, stage: int) -> None:
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 5)
        ringcomm.shard(model, None, stage, comm)
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            model[2].weight[0] = 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        model[2].weight.data[0] = 1.0  # not counted, as in torch
        loss.backward()

    for stage in (0, 3):
        ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=30)


def _net() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 5)


def _at_stages_0_and_3(run: Callable[[Any, nn.Module, Any], list[torch.Tensor]], **options: Any) -> None:
    """Asserts that ``run(comm, model, optimizer)`` returns the same bits on both ranks at both stages."""

    def rank(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ringcomm.shard(model, optimizer, stage, comm, **options)
        return [x.detach().clone() for x in run(comm, model, optimizer)]

    wanted, found = (ringcomm.run_ranks(rank, 2, stage, ranks="threads", timeout=30) for stage in (0, 3))
    for a, b in zip(wanted, found, strict=True):
        assert [*map(torch.equal, a, b)] == [True] * len(a)


def test_ranks_that_use_views_where_nothing_is_sent_stay_together() -> None:
    def in_whole(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p = model[2].weight
        v = p[0]
        with torch.no_grad():
            p.mul_(2)
        with ringcomm.whole(model):
            if comm.rank == 0:
                v.sum()
        return [v * 1]

    def in_forward(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        row = model[2].weight[0]
        with torch.no_grad():
            model[2].weight.mul_(2)
        model[2].register_forward_hook(lambda module, args, out: out + row if comm.rank else out)
        return [model(torch.ones(1, 4)) * 0, row * 1]

    _at_stages_0_and_3(in_whole, bucket_cap_mb=0.0001)
    _at_stages_0_and_3(in_forward, bucket_cap_mb=0.0001)


@torch.no_grad()
def _scale_rows(v: torch.Tensor) -> None:
    for k, row in enumerate(v):
        row.mul_(k)


WRITTEN: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "init": lambda model, p: nn.init.constant_(p.data, 3.0),
    "init slice": lambda model, p: nn.init.zeros_(p.data[0]),
    "slice of two": lambda model, p: torch.broadcast_tensors(model[0].weight.data, p.data)[1][0].fill_(2.0),
    "rows": lambda model, p: _scale_rows(p.t()),
    "out": lambda model, p: torch.no_grad()(torch.mul)(p[1:], 2, out=p[1:]),
    "leaf init": lambda model, p: nn.init.constant_(nn.Parameter(p.data), 0.25),
    "load": lambda model, p: model.load_state_dict({key: x * 2 for key, x in model.state_dict().items()}),
    "replaced": lambda model, p: setattr(p, "data", p.data * 2),
}


@pytest.mark.parametrize("way", [*WRITTEN, "whole", "forward"])
def test_a_view_sees_every_write(way: str) -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p = model[2].weight
        v, kept = p[0], p.detach()
        if way == "whole":
            with ringcomm.whole(model):
                p.data.fill_(7.0)
        elif way == "forward":
            with torch.no_grad():
                model[2].register_forward_hook(lambda *_: p.data[0].mul_(2))
                model(torch.ones(1, 4))
        else:
            WRITTEN[way](model, p)
        return [v * 1, p[0] * 1, kept * 1]

    _at_stages_0_and_3(run, bucket_cap_mb=0.0001)


def test_views_of_a_parameter_share_one_copy() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(64, 64))
        ringcomm.shard(model, None, 3, comm)
        w = model[0].weight
        views = [w[:, 0], w.diagonal(), *w.chunk(4, 1), *w.unbind(1), w.data[:, 1:3].requires_grad_()]
        with torch._C.DisableTorchFunctionSubclass():
            sizes = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in views}
        assert [*sizes.values()] == [64 * 64 * 4]
        with torch.no_grad():
            w.fill_(2.0)
        assert torch.equal(torch.stack([v.sum() for v in views[2:6]]), torch.full((4,), 2048.0))
        del views, sizes
        assert model[0].weight._ringcomm.data.copy() is None

    ringcomm.run_ranks(run, 2, ranks="threads", timeout=30)


@pytest.mark.parametrize(
    "slice_of", [lambda p: p.data[:, 0].requires_grad_(), lambda p: p.detach()[0].expand(3, 4).requires_grad_()]
)
def test_slices_with_gaps_as_leaves(slice_of: Change) -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p = model[0].weight
        leaf = slice_of(p)
        with torch.no_grad():
            p.mul_(2)
        leaf.sin().sum().backward()
        assert leaf.grad is not None
        return [leaf, leaf.grad]

    _at_stages_0_and_3(run)


def test_views_inside_of_transforms() -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p, x = model[2].weight, torch.linspace(-1, 1, 8).view(2, 4)
        found = [torch.vmap(lambda x: x * p[0])(x), torch.vmap(lambda x: (x * p.t()).sum(0))(x)]
        sum(y.sum() for y in found).backward()
        v = p[1]
        with torch.no_grad():
            p.mul_(2)
        found += [p.grad, torch.func.grad(lambda x: (x * v).sum())(x[0]), torch.vmap(lambda x: x * v)(x)]
        return found

    _at_stages_0_and_3(run)


def test_views_where_saved_tensor_hooks_are_disabled() -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p = model[2].weight
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            v = p.t()[1:]
            with torch.no_grad():
                p.mul_(2)
            v.sin().sum().backward()
            with pytest.raises(RuntimeError, match="not here"), torch.autograd.graph.save_on_cpu():
                pass
        return [v, p.grad]

    _at_stages_0_and_3(run)


def test_programs_read_leaves_and_views_while_autograd_runs() -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p, x = model[2].weight, torch.ones(2, 4, requires_grad=True)
        leaf, v, found = nn.Parameter(p.data), p[:, :2], []
        for way in (lambda loss: torch.autograd.grad(loss, [leaf, v, p]), lambda loss: loss.backward(inputs=[leaf])):
            loss = checkpoint(lambda x: (x @ leaf).tanh().sum() + (x @ v).square().sum(), x, use_reentrant=False)
            loss.register_hook(lambda grad, seen=found: seen.append(leaf.sin()))
            found += way(loss) or [leaf.grad]
        return found

    _at_stages_0_and_3(run)


def _collect(place: Any) -> None:
    for _ in range(50):
        gc.collect()
        if not place.alive:
            break
        time.sleep(0.05)  # another rank may collect at the moment


def test_views_of_a_dropped_model_and_of_an_unsharded_one() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _net()
        ringcomm.shard(model, None, 3, comm)
        p = model[2].weight
        v, values = p[1:], p.detach().clone()
        ringcomm.unshard(model)
        for use in (lambda: v * 1, lambda: v[1:], lambda: v.sum()):
            with pytest.raises(InvalidArgumentError, match="dropped or unsharded"):
                use()
        assert v.detach().shape == v.data.shape == (3, 4)
        ringcomm.shard(model, None, 3, comm)
        v = model[2].weight[1:]
        place = v._ringcomm
        del model, p
        _collect(place)
        assert torch.equal(v[1:] * 1, values[2:])
        model = _net()
        ringcomm.shard(model, None, 3, comm)
        v = model[2].weight[1:]
        with torch.no_grad():
            model[2].weight.mul_(2)
        place = v._ringcomm
        del model
        _collect(place)
        with pytest.raises(InvalidArgumentError, match="dropped or unsharded"):
            v.sum()
        assert v.detach().shape == (3, 4)

    ringcomm.run_ranks(run, 2, ranks="threads", timeout=30)


def test_a_sharded_parameter_refuses_writes_that_would_be_lost() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _net()
        ringcomm.shard(model, None, 3, comm)
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(model[0].weight)

    ringcomm.run_ranks(run, 2, ranks="threads", timeout=30)


def test_a_tensor_made_before_its_data_was_replaced_is_not_saved() -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = _net()
        ringcomm.shard(model, None, 3, comm, bucket_cap_mb=0.0001)
        leaf = nn.Parameter(model[0].weight.data)
        model[2].register_forward_hook(
            lambda _, args, out: out + checkpoint(torch.mm, args[0], leaf, use_reentrant=False)
        )
        loss = model(torch.ones(2, 4)).sum()
        with torch.no_grad():
            leaf.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model[0].weight.data = torch.ones(4, 4)
        with pytest.raises(InvalidArgumentError, match="was replaced"):
            model(torch.ones(2, 4))

    ringcomm.run_ranks(run, 2, ranks="threads", timeout=30)


def test_the_gradient_of_a_leaf_is_summed_as_by_torch() -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        leaf = model[2].weight.detach().requires_grad_()
        ((leaf * leaf).sum() + leaf.softmax(-1).square().sum() + (leaf * leaf.detach()).sin().sum()).backward()
        assert leaf.grad is not None
        found = [leaf.grad.clone()]
        kept = model[2].weight.data.view(2, -1).requires_grad_()
        loss = (kept * kept.detach()).sum()
        with torch.no_grad():
            model[2].weight.mul_(2)  # p.data has another version counter
        loss.backward()
        loss = (kept * kept.detach()).sum()
        kept.detach()[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        rows = model[2].weight.detach()[1:].requires_grad_()
        loss = rows.sin().sum()
        rows.detach()[0].neg_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return found

    _at_stages_0_and_3(run)


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda d: d.norm(),
    "slice": lambda d: d[0] * 2,
    "clone": lambda d: d.clone(),
    "copy": lambda d: copy.deepcopy(d),
    "add_": lambda d: d.add_(1),
    "init": lambda d: nn.init.zeros_(d),
}


@pytest.mark.parametrize("use", ALIASES)
@pytest.mark.parametrize("when", ["between", "hook", "forward"])
def test_aliases_of_a_parameter_while_its_unit_is_gathered(use: str, when: str) -> None:
    def run(comm: Any, model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        p, found = model[2].weight, []
        kept = p.detach(), p.data

        def read() -> None:
            with torch.no_grad():
                for each in (*kept, p.detach(), p.data):
                    found.append(torch.as_tensor(ALIASES[use](each)).detach().clone())

        x = torch.linspace(-1, 1, 4, requires_grad=True)
        if when == "forward":
            model[0].register_forward_pre_hook(lambda *_: read())
        loss = model(x).square().sum()
        if when == "between":
            read()
        if when == "hook":
            loss.register_hook(lambda _: read())
        try:
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            found.append(torch.tensor(-1.0))
        return [*found, p.detach()]

    _at_stages_0_and_3(run)


@pytest.mark.parametrize("way", ["view and parameter", "views", "error"])
def test_ranks_that_gather_a_unit_for_different_reasons_stay_together(way: str) -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p = model[2].weight
        v, u = p[0], model[2].bias[1:]
        with torch.no_grad():
            p.mul_(2)
        if way == "view and parameter":
            (v, p)[comm.rank].norm()
        elif way == "views":
            (v, u)[comm.rank].norm()
        elif comm.rank:
            p.norm()
        else:
            with pytest.raises(IndexError):
                p[7]
        return [v * 1, u * 1]

    _at_stages_0_and_3(run, bucket_cap_mb=0.0001)


def test_a_leaf_and_a_parameter_of_one_operation_have_their_own_versions() -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        first = model[0].weight
        loss = (first @ nn.Parameter(model[2].weight.data)).sum()
        with torch.no_grad():
            first.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return [first]

    _at_stages_0_and_3(run, bucket_cap_mb=0.0001)


@pytest.mark.parametrize("way", ["linear", "row", "parameter", "power"])
def test_an_operation_that_saves_a_view_of_its_input_has_the_input_s_version(way: str) -> None:
    def run(comm: Any, model: nn.Module, _: Any) -> list[torch.Tensor]:
        p = model[0].weight
        data, x = p.data, torch.ones(2, 4, requires_grad=True)
        if way == "row":
            loss = nn.functional.linear(x, data[1:3]).sum()
        elif way == "power":  # saves both
            loss = p.pow(data.t()).sum()
        else:
            loss = nn.functional.linear(x, data).sum()
        if way == "parameter":  # is not counted by `p.data`
            with torch.no_grad():
                p.mul_(2)
            loss.backward()
            return [x.grad]
        with torch.no_grad():
            (p if way == "power" else data).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return [p]

    _at_stages_0_and_3(run)


def test_views_of_views_that_an_operation_makes_beside_a_parameter() -> None:
    def run(comm: Any, model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        p = model[0].weight
        found = [*torch.broadcast_tensors(p[0], model[2].weight), *torch.atleast_2d(p[1], model[0].bias)]
        sum(x.sin().sum() for x in found).backward()
        optimizer.step()
        with torch.no_grad():
            p.mul_(2)
        return [x * 1 for x in found]

    _at_stages_0_and_3(run, bucket_cap_mb=0.0001)


def test_training_with_views_leaves_and_averages_that_are_kept() -> None:
    """A slice of the head in a penalty of every step, a leaf that trains the embedding's values with its own optimizer,
    rows that are normalised in place, and averages of the parameters."""
    plain = seeded(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 20)))

    def run(comm: ringcomm.Communicator, stage: int) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.0005)
        averages = [p.detach().clone() for p in model.parameters()]
        leaf, head = nn.Parameter(model[0].weight.data[:8]), model[4].weight[:6]
        leaf_optimizer = torch.optim.SGD([leaf], 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(comm.rank)
        for step in range(9):
            x = torch.randint(20, (4, 5), generator=generator)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            (loss + (head @ head.t() - torch.eye(6)).square().mean() + model[1].weight[:4].square().sum()).backward()
            ringcomm.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                leaf.square().mean().backward()
                leaf_optimizer.step()
                leaf_optimizer.zero_grad()
                with torch.no_grad():
                    rows = model[3].weight[:4]
                    rows.div_(rows.norm(dim=1, keepdim=True) / 0.5)
                    for average, p in zip(averages, model.parameters(), strict=True):
                        average.lerp_(p.detach(), 0.1)
        return [*averages, leaf.detach().clone(), *(x.clone() for x in model.state_dict().values())]

    wanted, *others = (ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=30)[1] for stage in range(4))
    for found in others:
        assert [*map(torch.equal, wanted, found)] == [True] * len(wanted)
