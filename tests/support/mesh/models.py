"""The models of `mesh.programs`: those of `training.models`, with more blocks, tokens, and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.mesh.programs import Program
from tests.support.training import models
from tests.support.training.models import BODIES, Bag, Body, Net, unwrapped, wrapped
from tests.support.training.programs import Call

VOCABULARY = 13  # which no number of ranks divides
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Gated(Body):
    """A feed-forward layer whose gate lies before its values in one layer's outputs."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.linear
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, width)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        gate, value = self.up(self.norm(h)).chunk(2, -1)
        return h + self.linear(gate.sigmoid() * value)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Heads(Body):
    """Attention of several heads, with a norm of each head's queries."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.num_heads, self.attend = 4 if width % 12 else 6, causal
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(width // self.num_heads)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self.qkv(self.norm(h)).chunk(3, -1))
        return h + self.linear(self.attend(self.q_norm(q), k, v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """The weights of all experts in two parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 2 * width, width))
        self.down_proj = nn.Parameter(torch.ones(2, width, width))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("bsi,eoi->ebso", h, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebsi,eoi->ebso", gate.tanh() * up, self.down_proj)


class Mixture(Body):
    """All experts, each as much as the data say; leaves a loss of the router."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.router, self.experts = nn.Linear(width, 2), Experts(width)

    def forward(self, h: torch.Tensor, memory: torch.Tensor | None, bag: Bag) -> torch.Tensor:
        gates = self.router(h).softmax(-1)
        bag["losses"].append(gates.square().mean())
        return self.linear(h) + (gates.movedim(-1, 0).unsqueeze(-1) * self.experts(h)).sum(0)


BODIES.update({"gated": Gated, "heads": Heads, "mixture": Mixture})


class Stem(nn.Module):
    """Tokens and their positions.

    Attributes:
        places: positions of this rank's part of the sequence, where it has a part.
    """

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.places: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1]) if self.places is None else self.places
        return self.token(tokens) + self.position(places)


class MeshNet(Net):
    """The model of a program.

    Attributes:
        keep: (batch, length), 0 or 1: what counts of each block's output.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program.model, 0)
        width, self.mesh_program = program.model.width, program
        self.hooked: list[torch.Tensor] = []
        self.states: list[torch.Tensor] = []
        self.keep: torch.Tensor | None = None
        if "root.gain" in program:
            self.gain = nn.Parameter(torch.ones(len(program.model.blocks), width))
        if "root.table" in program:
            self.register_buffer("table", torch.linspace(0.5, 1.5, width), persistent=False)
        if "root.prompt" in program:
            self.prompt = nn.Parameter(torch.ones(program.length, width))
        if "root.second" in program:
            self.second = nn.Linear(width, 2)
        if "text" in program:
            self.stem = Stem(width, program.length)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            if "tied_head" in program:
                self.head.weight = self.stem.token.weight
        if "root.late" in program:
            self._modules = {"head": self.head, **self._modules}
        for number, what in program.hooks:
            block = self.block(number)
            if what in ("collect", "change"):
                block.register_forward_hook(self.collect if what == "collect" else changed)
            elif what == "pre":
                block.register_forward_pre_hook(smaller)
            else:
                block.body.linear.register_full_backward_hook(half)

    def has_gradient(self, value: torch.Tensor) -> bool:
        """Looks at no tensor of another stage."""
        return torch.is_grad_enabled()

    def collect(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook."""
        self.hooked.append(unwrapped(output)[0])

    def forward(self, x: torch.Tensor, step: int = 0, keep: torch.Tensor | None = None) -> Any:
        self.hooked.clear()
        self.keep, self.states = keep, []
        value, extra = unwrapped(super().forward(x, step))
        value = value[:, value.shape[1] - x.shape[1] :]
        total = value.mean() * 0 if extra is None else extra
        for each in self.hooked:
            total = total + each.square().mean()
        if self.states:
            total = total + torch.stack(self.states).mean(0).square().mean()
        if "root.second" in self.mesh_program:
            total = total + self.second(value[..., : self.program.width]).square().mean()
        extras = self.hooked or self.states or "root.second" in self.mesh_program
        return wrapped("tuple" if extras else self.program.output, value, total)

    def called(self, call: Call, h: torch.Tensor, *others: Any) -> torch.Tensor:
        """With code of the model itself around the block."""
        program = self.mesh_program
        if "root.prompt" in program and h.shape[1] == program.length:
            h = torch.cat([self.prompt.expand(len(h), -1, -1), h], 1)
        value = super().called(call, h, *others)
        if "root.gain" in program:
            value = value * self.gain[[block.number for block in self.program.blocks].index(call.block)].tanh()
        if "root.table" in program:
            value = value * self.table
        if self.keep is not None:
            keep = F.pad(self.keep, (h.shape[1] - self.keep.shape[1], 0), value=1.0)
            value = value * keep.unsqueeze(-1)
        if "root.states" in program:
            self.states.append(value)
        return value


def changed(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that gives another output."""
    if isinstance(output, torch.Tensor):
        return output * 0.75
    return None


def smaller(module: nn.Module, args: Any) -> Any:
    """A forward pre-hook that gives another input."""
    return (args[0] * 0.9, *args[1:]) if args and isinstance(args[0], torch.Tensor) else None


def half(module: nn.Module, grads: Any, _: Any) -> Any:
    """A backward hook that gives another gradient."""
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


def build(program: Program) -> MeshNet:
    """The model with its initial values."""
    net = MeshNet(program)
    models.initialise(net, program.model.seed * 8, 0.5)
    return net.double()


def build_on_meta(program: Program) -> tuple[MeshNet, Callable[[nn.Module], None]]:
    """The model without values, and the ``init_fn`` that gives them to a module."""
    with torch.device("meta"):
        net = MeshNet(program).double()
    full = build(program)
    values = {**dict(full.named_parameters(remove_duplicate=False)), **dict(full.named_buffers())}
    names = {id(module): name for name, module in net.named_modules()}

    def fill(module: nn.Module) -> None:
        path = names.get(id(module), "")  # a pipeline stands for the model itself
        for key, x in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            x.copy_(values[f"{path}.{key}" if path else key])

    return net, fill


def batch(program: Program, step: int, number: int) -> list[torch.Tensor]:
    """The whole batch of a pass: inputs, targets, and the mask where the program has one."""
    generator = torch.Generator().manual_seed((program.seed * 64 + step) * 64 + number)
    if "text" in program:
        tokens = torch.randint(VOCABULARY, (program.rows, program.length), generator=generator)
        found = [tokens, tokens.roll(1, 1)]
    else:
        shape = (program.rows, program.length, program.model.width)
        found = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    if "root.keep" in program:
        found.append((torch.rand(found[0].shape[:2], generator=generator) < 0.8).double())
    return found


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A mean over rows and tokens."""
    value, extra = unwrapped(output)
    if target.is_floating_point():
        loss = (value - target).square().mean()
    else:
        loss = F.cross_entropy(value.flatten(0, 1), target.flatten())
    return loss if extra is None else loss + 0.1 * extra
