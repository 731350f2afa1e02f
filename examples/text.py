"""Reads the text of `train_gpt.py`, and distributes its windows over the ranks. Every mesh trains on the same
windows."""

import torch

import ringcomm
from ringcomm.context import shard_sequence

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and the tokens that follow them, each (windows, context)."""


def read_text(path: str | None) -> torch.Tensor:
    """Returns the bytes of a file, or of Python's own language reference."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        with open(path, "rb") as file:
            data = file.read()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def printable(data: bytes) -> str:
    """Formats text for a terminal: line ends stay, and characters that are not printable become dots."""
    return "".join(
        c if c == "\n" or (c.isprintable() and c != "\ufffd") else "." for c in data.decode(errors="replace")
    )


class Batches:
    """Random windows of the text. Every rank draws the windows of the whole step from one generator and takes its own,
    so that the training data depend on the total number of micro-batches, and not on the mesh.

    Args:
        batch: windows in a micro-batch.
        passes: micro-batches of a rank in a step; rank d of dp gets the d-th group of them.
        mesh: the axis dp distributes micro-batches, and the axis cp distributes the parts of every window.
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
        """Returns this rank's micro-batches of the next step."""
        starts = torch.randint(len(self.text) - self.context - 1, self.shape, generator=self.generator)
        offsets = torch.arange(self.context + 1)
        windows = [self.text[each[:, None] + offsets].long() for each in starts[self.mesh.coordinates["dp"]]]
        return [(self.part(each[:, :-1]), self.part(each[:, 1:])) for each in windows]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of complete windows: with context parallelism, its pieces of the sequence."""
        return shard_sequence(x, self.mesh["cp"]) if self.mesh.size("cp") > 1 else x
