"""A small GPT over bytes, and the text that it reads: what `train_gpt.py` trains."""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder over bytes; the output layer shares the embedding's weight."""

    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(self._init)
        for block in self.blocks:
            for last in (block.proj, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.token.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> str:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)])
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[0, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)[None]], 1)
        return printable(bytes(tokens[0].tolist()))


def printable(data: bytes) -> str:
    """Text for a terminal: line ends stay, and what is no printable character becomes a dot."""
    return "".join(
        c if c == "\n" or (c.isprintable() and c != "\ufffd") else "." for c in data.decode(errors="replace")
    )


def read_text(path: str | None) -> torch.Tensor:
    """Bytes of a file, or of Python's own language reference."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        with open(path, "rb") as file:
            data = file.read()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Batches:
    """Random windows of the text; every rank draws its own, the same for every copy of the model."""

    def __init__(self, text: torch.Tensor, batch: int, context: int, seed: int) -> None:
        if len(text) <= context + 1:
            raise SystemExit(f"train_gpt: the text has {len(text)} bytes, expected more than --context {context} + 1")
        self.text, self.batch, self.context = text, batch, context
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.text) - self.context - 1, (self.batch,), generator=self.generator)
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
