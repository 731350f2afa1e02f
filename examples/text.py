"""The text that `train_gpt.py` reads, and how its windows are dealt out: the same ones on every mesh."""

import torch

import ringcomm
from ringcomm.context import shard_sequence

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and the tokens that follow them, (windows, context) each."""


def read_text(path: str | None) -> torch.Tensor:
    """Bytes of a file, or of Python's own language reference."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        with open(path, "rb") as file:
            data = file.read()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def printable(data: bytes) -> str:
    """Text for a terminal: line ends stay, and what is no printable character becomes a dot."""
    return "".join(
        c if c == "\n" or (c.isprintable() and c != "\ufffd") else "." for c in data.decode(errors="replace")
    )


class Batches:
    """Random windows of the text. Every rank draws those of the whole step from one generator and takes its own, so
    that what is trained on depends on the number of micro-batches of all ranks together, and not on the mesh.

    Args:
        batch: windows in a micro-batch.
        passes: micro-batches of a rank in a step; rank d of dp has the d-th run of so many.
        mesh: its axis dp deals out micro-batches, and its axis cp parts of every window.
    """

    def __init__(
        self, text: torch.Tensor, batch: int, passes: int, context: int, seed: int, mesh: ringcomm.Mesh
    ) -> None:
        if len(text) <= context + 1:
            raise SystemExit(f"train_gpt: the text has {len(text)} bytes, expected more than --context {context} + 1")
        self.text, self.context, self.mesh = text, context, mesh
        self.shape = (mesh.size("dp"), passes, batch)
        self.generator = torch.Generator().manual_seed(1000 * seed)

    def draw(self) -> list[Batch]:
        """This rank's micro-batches of the next step."""
        starts = torch.randint(len(self.text) - self.context - 1, self.shape, generator=self.generator)
        offsets = torch.arange(self.context + 1)
        windows = [self.text[each[:, None] + offsets].long() for each in starts[self.mesh.coordinates["dp"]]]
        return [(self.part(each[:, :-1]), self.part(each[:, 1:])) for each in windows]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Of whole windows, what this rank's attention begins with."""
        return shard_sequence(x, self.mesh["cp"]) if self.mesh.size("cp") > 1 else x
