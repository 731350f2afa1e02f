"""Views of stage 3 parameters that autograd records, in random programs: the bits of stage 0 at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
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
