"""Cross-entropy of logits that are cut over the ranks equals torch's: losses, gradients, what is sent, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ringcomm.errors import InvalidArgumentError, ShapeError
from ringcomm.tensor_parallel.layers import ColumnParallelLinear
from ringcomm.tensor_parallel.loss import vocab_parallel_cross_entropy
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import Colwise
from tests.support.mesh.tensor_cases import close, on_ranks, sent, tensor_of

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS = [2, 3, 4]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize(
    ("vocabulary", "shape", "ignore"), [(24, (5,), -100), (25, (2, 7), 3), (2, (4,), -1), (24, (), 0)]
)
def test_cross_entropy(
    vocabulary: int, shape: Any, ignore: int, smoothing: float, reduction: str, dtype: torch.dtype, world_size: int
) -> None:
    logits = (tensor_of(*shape, vocabulary, seed=0, dtype=dtype) * 30).requires_grad_()
    target = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))
    if shape:
        target.view(-1)[1] = ignore
    flat = logits.reshape(-1, vocabulary), target.reshape(-1)
    loss = F.cross_entropy(*flat, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing)
    c = tensor_of(*loss.shape, seed=3, dtype=dtype)
    loss.backward(c)

    def rank(comm: Any) -> None:
        width = -(-vocabulary // world_size)
        padded = F.pad(logits.detach(), (0, width * world_size - vocabulary), value=7.0)
        mine = padded[..., comm.rank * width : (comm.rank + 1) * width].clone().requires_grad_()
        found = vocab_parallel_cross_entropy(
            mine, target, comm, vocabulary=vocabulary, ignore_index=ignore, reduction=reduction,
            label_smoothing=smoothing,
        )  # fmt: skip
        assert found.shape == (target.shape if reduction == "none" else ())
        assert close(found.reshape(loss.shape), loss)
        sums = 3 if smoothing else 2
        assert sent(comm) == {"all_reduce calls": 2, "all_reduce elements": (1 + sums) * target.numel()}
        found.backward(c.view(found.shape))
        gradient = F.pad(logits.grad, (0, width * world_size - vocabulary))
        assert mine.grad is not None
        assert close(mine.grad, gradient[..., comm.rank * width : (comm.rank + 1) * width])
        assert not sent(comm)

    on_ranks(rank, world_size)


def test_cross_entropy_of_ignored_rows_alone_and_of_bfloat16() -> None:
    logits = tensor_of(3, 24, seed=0).bfloat16()

    def rank(comm: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        mine = logits.chunk(3, -1)[comm.rank].clone().requires_grad_()
        nothing = vocab_parallel_cross_entropy(mine, torch.full((3,), -100), comm)
        loss = vocab_parallel_cross_entropy(mine, torch.tensor([0, 9, 23]), comm)
        loss.backward()
        return nothing, loss, mine.grad

    wide = logits.float().requires_grad_()
    expected = F.cross_entropy(wide, torch.tensor([0, 9, 23]))
    expected.backward()
    for number, (nothing, loss, gradient) in enumerate(on_ranks(rank, 3)):
        assert bool(nothing.isnan())  # as torch's
        assert loss.dtype == torch.float32
        assert close(loss, expected)
        assert gradient is not None
        assert gradient.dtype == torch.bfloat16
        assert close(gradient, wide.grad.chunk(3, -1)[number], torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"vocabulary": 25}, {"label_smoothing": 0.2}, {"ignore_index": 3}])
def test_cross_entropy_of_a_padded_layer(options: Any) -> None:
    """Whose first output is watched; and with another layer of as many columns, which class counts is asked."""
    torch.manual_seed(0)
    whole, others = nn.Linear(6, 25).double(), [nn.Linear(6, 25).double() for _ in range(3)]
    x, target = tensor_of(8, 6, seed=1, dtype=torch.float64), torch.arange(8) * 3
    expected = F.cross_entropy(whole(x), target, **{key: each for key, each in options.items() if key != "vocabulary"})

    def rank(comm: Any) -> None:
        model = nn.Sequential(others[comm.rank])
        model[0].load_state_dict(whole.state_dict())
        parallelize(model, {"0": Colwise(pad=True)}, comm)
        for logits in (model(x), model(x).detach()):
            assert close(vocab_parallel_cross_entropy(logits, target, comm, **options), expected)
        other = ColumnParallelLinear(6, 27, comm=comm)
        if comm.rank == 0:
            del other  # on one rank: what is found must not depend on whether a layer still lives
        if "vocabulary" not in options:
            with pytest.raises(InvalidArgumentError, match="9 columns of logits, which layers of 25 and of 27 outputs"):
                vocab_parallel_cross_entropy(model(x), target, comm, **options)
        given = {"vocabulary": 25, **options}
        assert close(vocab_parallel_cross_entropy(model(x), target, comm, **given), expected)

    on_ranks(rank, 3)


def test_cross_entropy_refuses() -> None:
    def rank(comm: Any) -> None:
        logits, target = torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
        for error, sentence, args, options in [
            (ShapeError, r"shape \(4, 8\) and a target of \(3,\)", (logits, target[:3]), {}),
            (InvalidArgumentError, "got a target of 24, expected 0 to 23, or ignore_index", (logits, target + 24), {}),
            (InvalidArgumentError, "got a target of 20, expected 0 to 19", (logits, target + 20), {"vocabulary": 20}),
            (InvalidArgumentError, "got reduction='avg'", (logits, target), {"reduction": "avg"}),
            (InvalidArgumentError, "got label_smoothing=1.5", (logits, target), {"label_smoothing": 1.5}),
            (InvalidArgumentError, "got vocabulary=25, expected 1 to the 24", (logits, target), {"vocabulary": 25}),
        ]:
            with pytest.raises(error, match=sentence):
                vocab_parallel_cross_entropy(*args, comm, **options)
        assert not sent(comm)

    on_ranks(rank, 3)
