"""gpu.json: what the stages of `make gpu` found, written as it is found by processes that may end at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LABEL = "N ranks sharing one GPU (L2/HBM)"
BEGUN = "begun"
LOST = 70
"""Exit status of a stage's process that cannot use the GPU any more and has more to do."""


def default_path(name: str = "gpu") -> Path:
    """In $OUT where that is set, for runs on another machine that bring back that folder alone."""
    return Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results") / f"{name}.json"


class Document:
    """Parts by name, each a mapping; one file, replaced at every change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """All of it."""
        try:
            return dict(json.loads(self.path.read_text()))
        except FileNotFoundError:
            return {"label": LABEL}

    def part(self, name: str) -> dict[str, Any]:
        """One part; empty where nothing has been put there."""
        return dict(self.read().get(name, {}))

    def put(self, part: str, values: Mapping[str, Any]) -> None:
        """Adds to a part, or replaces there."""
        with self._changing() as document:
            document[part] = document.get(part, {}) | dict(values)

    def clear(self, *parts: str) -> None:
        """Empties some parts."""
        with self._changing() as document:
            for part in parts:
                document.pop(part, None)

    def end(self, part: str) -> None:
        """Says that this process leaves nothing of a part undone."""
        self.put("ended", {part: os.getpid()})

    def bury(self, part: str, why: str) -> list[str]:
        """Says of what was begun in a part and never ended why it did not; its names."""
        names = [name for name, said in self.part(part).items() if said == BEGUN]
        if names:
            self.put(part, dict.fromkeys(names, f"FAIL: {why}"))
        return names

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # closing it lets go
            document = self.read()
            yield document
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(document, indent=1) + "\n")
            os.replace(beside, self.path)
        finally:
            os.close(folder)
