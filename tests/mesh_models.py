"""The models of `mesh_programs`: those of `training_models`, with more blocks, tokens, and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import training_models
from mesh_programs import Program
from torch import nn
from torch.nn import functional as F
from training_models import BODIES, Bag, Body, Net, unwrapped, wrapped

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
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.model, 0)
        width = program.model.width
        self.hooked: list[torch.Tensor] = []
        if "text" in program:
            self.stem = Stem(width, program.length)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            if "tied_head" in program:
                self.head.weight = self.stem.token.weight
        for number, what in program.hooks:
            self.block(number).register_forward_hook(self.collect if what == "collect" else changed)

    def has_gradient(self, value: torch.Tensor) -> bool:
        """Looks at no tensor of another stage."""
        return torch.is_grad_enabled()

    def collect(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook."""
        self.hooked.append(unwrapped(output)[0])

    def forward(self, x: torch.Tensor, step: int = 0) -> Any:
        self.hooked.clear()
        value, extra = unwrapped(super().forward(x, step))
        total = value.mean() * 0 if extra is None else extra
        for each in self.hooked:
            total = total + each.square().mean()
        return wrapped("tuple", value, total) if self.hooked else wrapped(self.program.output, value, total)


def changed(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that gives another output."""
    if isinstance(output, torch.Tensor):
        return output * 0.75
    return None


def build(program: Program) -> MeshNet:
    """The model with its initial values."""
    net = MeshNet(program)
    training_models.initialise(net, program.model.seed * 8, 0.5)
    return net.double()


def batch(program: Program, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a pass: inputs and targets."""
    generator = torch.Generator().manual_seed((program.seed * 64 + step) * 64 + number)
    if "text" in program:
        tokens = torch.randint(VOCABULARY, (program.rows, program.length), generator=generator)
        return tokens, tokens.roll(1, 1)
    shape = (program.rows, program.length, program.model.width)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A mean over rows and tokens."""
    value, extra = unwrapped(output)
    if target.is_floating_point():
        loss = (value - target).square().mean()
    else:
        loss = F.cross_entropy(value.flatten(0, 1), target.flatten())
    return loss if extra is None else loss + 0.1 * extra
