"""The modules of `training.programs`: ordinary PyTorch code, which knows nothing of how it is trained."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.training.programs import Block, Call, Program

LENGTH = 3  # of a sequence
BATCH = 2
Bag = dict[str, Any]


class DataParallelGroup:
    """What the ranks of this process are."""

    are_threads = True  # which share torch's generator, and the cache of autocast


class Boom(Exception):
    """Raised inside of forward, to be caught by the loop."""


class Body(nn.Module):
    """What a block computes: ``h`` and ``memory`` of shape (batch, length, width), ``bag`` with a list and a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return torch.tanh(self.linear(h))

    @property
    def weight_owner(self) -> nn.Module:
        """The module whose ``weight`` of (width, width) is tied and read."""
        return self.linear


class Residual(Body):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return h + self.out(F.gelu(self.linear(self.norm(h))))


class Twice(Body):
    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return h + self.linear(torch.sin(self.linear(h))) + F.linear(h, self.linear.weight.t())


class Normed(Body):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__(width)
        made = {"layer_norm": nn.LayerNorm, "batch_norm": nn.BatchNorm1d, "group_norm": lambda n: nn.GroupNorm(2, n)}
        self.norm = made[kind](width)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        h = self.linear(h)
        if isinstance(self.norm, nn.LayerNorm):
            return self.norm(h)
        return self.norm(h.reshape(-1, h.shape[-1])).view(h.shape)


class Recurrent(Body):
    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__(width)
        self.rnn = kind(width, width, batch_first=True)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return self.linear(self.rnn(h)[0])


class Conv(Body):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return F.silu(self.conv(self.linear(h).transpose(1, 2))).transpose(1, 2)


class Attention(Body):
    """torch's own, whose forward reads the weight of its child ``out_proj``."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        other = h if memory is None else memory
        return h + self.attention(self.linear(h), other, other, need_weights=False)[0]


class Cross(Body):
    """Uses ``memory`` twice."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        memory = h if memory is None else memory
        weights = (self.linear(h) @ self.key(memory).transpose(1, 2)).softmax(-1)
        return h + weights @ self.value(memory)


class Film(Body):
    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        memory = h if memory is None else memory
        return h * torch.sigmoid(self.linear(memory)) + memory


class Dropout(Body):
    """Ranks that are threads share torch's generator: an element is then dropped by its own lowest bits."""

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        h = self.linear(h)
        if not self.training or not DataParallelGroup.are_threads:
            return F.dropout(h, 0.25, self.training)
        bits = h.detach().contiguous().view(torch.int16 if h.element_size() == 2 else torch.int32)
        return h * ((bits & 3) != 0).to(h.dtype) * (4 / 3)


class Experts(Body):
    """The data pick the expert, so that ranks pick others."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        gates = self.linear(h).softmax(-1)
        chosen = int((h.detach().float().abs().sum() * 8).nan_to_num(0, 0)) % 3
        bag["losses"].append(gates.square().mean())
        return h + self.experts[chosen](h) * gates[..., :1]


class Attribute(Body):
    """Leaves an auxiliary loss in an attribute."""

    aux: torch.Tensor | None = None

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        found = self.linear(h)
        self.aux = found.square().mean()
        return torch.tanh(found)


class Appends(Body):
    """Appends an auxiliary loss to a list that it was given."""

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        found = self.linear(h)
        bag["losses"].append(found.abs().mean())
        return h + found.sigmoid()


class Cache(Body):
    """Writes a key into a dict that it was given, and reads those of the blocks before."""

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        cache = bag["cache"]
        key = self.linear(h)
        for other in cache.values():
            h = h + 0.5 * torch.sin(other)
        cache[len(cache)] = key
        return h + key.tanh()


class Running(Body):
    """Computes with a buffer that it writes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        h = self.linear(h)
        out = h - self.mean.clone()
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.detach().float().mean((0, 1)), 0.25)
                self.count += 1
        return out


class Scalar(Body):
    """Parameters without dimensions, of one element, and of none."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.ones(0, width))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return self.linear(h) * self.gain + self.shift + self.nothing.sum()


class Double(Body):
    """Parameters of another type beside."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.wide = nn.Linear(width, width).double()

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(h.float()) + self.wide(h.double()).to(torch.float32)


class WeightNorm(Body):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return torch.tanh(self.normed(self.linear(h)))


class Tokens(Body):
    """An embedding whose weight also makes the logits."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.embedding = nn.Embedding(5, width)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        ids = (h.detach().float().abs().sum(-1) * 4).nan_to_num(0, 0).long() % 5
        h = self.linear(h) + self.embedding(ids)
        return (h @ self.embedding.weight.t()).softmax(-1) @ self.embedding.weight + h


class Nested(Body):
    """Blocks inside of the block, of which one is called twice."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        first = self.linear(h)
        for block in self.inner:
            h = h + block(first)
        return self.inner[0](h) + first


class Alias(Nested):
    """One of the blocks inside has two names."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.again = self.inner[0]


class LowRank(Body):
    """A frozen weight with two small ones beside it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return h + self.linear(h) + self.up(self.down(h))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] * weight.mean(), ((grads[0] * x).sum() / weight.numel()).expand(weight.shape).to(weight.dtype)


class Function(Body):
    """A function of autograd that saves a parameter."""

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return self.linear(h) + _Scaled.apply(h, self.linear.weight)


class _Ignores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight.mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Undefined(Body):
    """A parameter that backward comes to without a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.ignored = nn.Parameter(torch.ones(width))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        return _Ignores.apply(self.linear(h), self.ignored)


class View(Body):
    """A view of a parameter leaves the block, for blocks behind it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.table = nn.Parameter(torch.ones(width, width))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        h = self.linear(h)
        for view in bag["views"]:
            h = h + view.sum(0) * h.sigmoid()
        bag["views"].append(self.table[:2] if len(bag["views"]) % 2 else self.linear.weight.t())
        return h * self.table.mean()


class Partly(Body):
    """Has parameters that no rank, or only some ranks, use."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.never = nn.Linear(width, width)
        self.sometimes = nn.Parameter(torch.ones(width))

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        out = self.linear(h)
        return out * self.sometimes if float(h.detach().float().sum()) > 0 else out


BODIES: dict[str, Any] = {
    "dense": Body,
    "residual": Residual,
    "twice": Twice,
    "layer_norm": lambda width: Normed(width, "layer_norm"),
    "batch_norm": lambda width: Normed(width, "batch_norm"),
    "group_norm": lambda width: Normed(width, "group_norm"),
    "lstm": lambda width: Recurrent(width, nn.LSTM),
    "gru": lambda width: Recurrent(width, nn.GRU),
    "conv": Conv,
    "attention": Attention,
    "cross": Cross,
    "film": Film,
    "dropout": Dropout,
    "experts": Experts,
    "attribute": Attribute,
    "appends": Appends,
    "cache": Cache,
    "running": Running,
    "scalar": Scalar,
    "double": Double,
    "weight_norm": WeightNorm,
    "tokens": Tokens,
    "nested": Nested,
    "alias": Alias,
    "lora": LowRank,
    "function": Function,
    "undefined": Undefined,
    "partly": Partly,
    "view": View,
}


@dataclass
class Output:
    """What a block returns as a dataclass."""

    value: torch.Tensor
    extra: torch.Tensor | None = None
    nothing: None = None


def wrapped(kind: str, value: torch.Tensor, extra: torch.Tensor) -> Any:
    """What a block returns."""
    if kind == "dict":
        return {"value": value, "extra": [extra], "nothing": None}
    if kind == "dataclass":
        return Output(value, extra)
    return (value, None, extra) if kind == "tuple" else value


def unwrapped(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The value and what came with it."""
    if isinstance(output, dict):
        return output["value"], output["extra"][0]
    if isinstance(output, Output):
        return output.value, output.extra
    return (output[0], output[2]) if isinstance(output, tuple) else (output, None)


class Wrapper(nn.Module):
    """A block: takes its arguments in one of several ways, and returns one of several kinds of output."""

    fails = False

    def __init__(self, block: Block, width: int) -> None:
        super().__init__()
        self.block = block
        self.body = BODIES[block.kind](width)

    def forward(
        self,
        h: Any,
        memory: torch.Tensor | None = None,
        unused: torch.Tensor | None = None,
        bag: Bag | None = None,
        inplace: bool = False,
    ) -> Any:
        if isinstance(h, dict):
            h, (memory, unused, bag) = h["h"], h["others"]
        del unused
        bag = {"losses": [], "cache": {}, "views": []} if bag is None else bag
        if inplace:
            h.add_(0.25)
        value = self.body(h, memory, bag)
        if self.fails:
            raise Boom
        return wrapped(self.block.output, value, value.sin().mean(-1))


class Net(nn.Module):
    """The model of a program."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__()
        self.program, self.rank = program, rank
        width = program.width
        self.stem = nn.Linear(width, width)
        self.read_first = {call.block for call in program.calls if "read_weight" in call.flags and call.block % 2}
        made = [Wrapper(block, width) for block in program.blocks]
        keys = [f"b{block.number}" for block in program.blocks]
        as_dict = "module_dict" in program
        self.blocks = nn.ModuleDict(dict(zip(keys, made, strict=True))) if as_dict else nn.ModuleList(made)
        for block in program.blocks:
            if block.tied_to is not None:
                self.block(block.number).body.weight_owner.weight = self.block(block.tied_to).body.weight_owner.weight
        if "shared" in program:
            self.alias = made[0]
        self.head = nn.Linear(width, width)
        for wrapper in made:
            _freeze(wrapper, wrapper.block.frozen)

    def block(self, number: int) -> Any:
        """The block of a number, which may not be its place: shrinking leaves blocks out."""
        return next(module for module in self.blocks.children() if module.block.number == number)

    def forward(self, x: torch.Tensor, step: int = 0) -> Any:
        program, losses = self.program, []
        memory = torch.tanh(self.stem(x)) if "memory" in program else None
        bag: Bag = {"losses": losses, "cache": {}, "views": []}
        factors = {block: self.factor(block) for block in self.read_first}
        h, saved = self.stem(x), []
        for call in program.calls:
            if ("step_skip" in call.flags and step % 2) or (
                "rank_skip" in call.flags and (self.rank + step) % program.world_size == 0
            ):
                continue
            if "skip" in call.flags:
                h = h + saved.pop() if saved else h
                saved.append(h)
            h = self.called(call, h, memory, bag, factors)
        if "shared" in program:
            h = unwrapped(self.alias(h, None, None, bag))[0]
        h = self.head(h + sum(saved))
        total = wide(h).sum() * 0
        for loss in losses:
            total = total + wide(loss)
        return wrapped(program.output, h, total)

    def has_gradient(self, value: torch.Tensor) -> bool:
        """Whether it takes hooks."""
        return value.requires_grad

    def factor(self, number: int) -> torch.Tensor:
        """Of a weight that is read outside of its block."""
        return 1 + 0.1 * self.block(number).body.weight_owner.weight.mean()

    def called(
        self, call: Call, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag, factors: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """The result of one block."""
        block = self.block(call.block)
        if "no_grad_call" in call.flags:
            with torch.no_grad():
                h = h + 0.1 * unwrapped(block(h, memory, None, bag))[0]
        value, extra = unwrapped(self.asked(call, block, h, memory, bag))
        if extra is not None and "unused_output" not in call.flags:
            bag["losses"].append(extra.square().mean())
        if isinstance(block.body, Attribute) and block.body.aux is not None and not call.checkpoint:
            bag["losses"].append(block.body.aux)
        if "read_weight" in call.flags:
            value = value * (factors[call.block] if call.block in factors else self.factor(call.block))
        if "detach" in call.flags:
            value = value + value.detach().sin()
        if "grad_hook" in call.flags and self.has_gradient(value):
            value.register_hook(lambda grad: grad * 0.5)
        return value

    def asked(self, call: Call, block: nn.Module, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> Any:
        """What the block returns, called in one of several ways."""
        memory = memory if "memory" in call.flags else None
        unused = h * 2 if "unused_argument" in call.flags else None
        inplace = "inplace" in call.flags
        arguments: tuple[Any, ...] = (h * 1.0 if inplace else h, memory, unused, bag, inplace)
        if call.checkpoint and inplace:
            arguments = (h, memory, unused, bag, False)
        if "nested" in call.flags:
            arguments = ({"h": arguments[0], "others": [memory, unused, bag]},)
        elif "keywords" in call.flags and call.checkpoint != "reentrant":
            names = dict(zip(("memory", "unused", "bag", "inplace"), arguments[1:], strict=True))
            if call.checkpoint:
                return checkpoint(
                    block,
                    arguments[0],
                    use_reentrant=False,
                    preserve_rng_state=not DataParallelGroup.are_threads,
                    **names,
                )
            return block(arguments[0], **names)
        if call.checkpoint:
            reentrant = call.checkpoint == "reentrant"
            return checkpoint(
                block, *arguments, use_reentrant=reentrant, preserve_rng_state=not DataParallelGroup.are_threads
            )
        return block(*arguments)


def wide(x: torch.Tensor) -> torch.Tensor:
    """In 32 bits or more."""
    return x if x.dtype == torch.float64 else x.float()


def _freeze(block: nn.Module, which: str) -> None:
    params = list(block.parameters())
    for p in params[:1] if which == "first" else params if which == "all" else []:
        p.requires_grad_(False)


def build(program: Program, rank: int) -> Net:
    """The model with its initial values, which other ranks have too unless the program wants them to differ."""
    net = Net(program, rank)
    generator = initialise(net, program.seed * 8 + (rank if "init_differs" in program else 0))
    with torch.no_grad():
        if "no_broadcast" in program:  # torch's DDP then leaves the initial buffers as they are, too
            generator.manual_seed(program.seed)
        for name, buffer in net.named_buffers():
            if "mean" in name:
                buffer.uniform_(-0.1, 0.1, generator=generator)
    if "memory_format" in program:
        reorder_memory(net, random.Random(program.seed))
    return net.bfloat16() if "half" in program else net


def reorder_memory(net: nn.Module, drawn: random.Random) -> None:
    """Puts the dimensions of about half of the parameters into another order in memory."""
    for p in net.parameters():
        order = drawn.sample(range(p.dim()), p.dim())
        if drawn.random() < 0.5:
            p.data = p.data.permute(order).contiguous().permute([order.index(dim) for dim in range(p.dim())])


def initialise(net: nn.Module, seed: int, most: float = 0.7) -> torch.Generator:
    """Gives all parameters values, and returns what drew them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.uniform_(-most, most, generator=generator)
            if "norm.weight" in name:
                p += 1
    return generator


def batch(program: Program, rank: int, step: int, number: int) -> torch.Tensor:
    """A rank's input for one forward pass of a step."""
    key = ((program.seed * 64 + step) * 64 + number) * 8 + rank
    x = torch.randn(BATCH, LENGTH, program.width, generator=torch.Generator().manual_seed(key))
    return x.bfloat16() if "half" in program else x


def loss_of(output: Any) -> torch.Tensor:
    """The loss: of the value, and of what came with it."""
    value, extra = unwrapped(output)
    loss = (wide(value) - 0.5).square().mean()
    return loss if extra is None else loss + 0.1 * wide(extra)
