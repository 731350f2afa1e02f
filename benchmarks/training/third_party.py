"""Checks that third-party models and training loops, unmodified and randomly configured, give the same bits at every
stage.

    OMP_NUM_THREADS=1 python -m benchmarks.training.third_party --seeds 20 --write     # results/third_party.md

A configuration is a seed: the model's sizes, dropout, accumulation, clipping, activation checkpointing, autocast and
the optimizer are drawn from it. Three processes train each configuration with torch's DDP over the backend "ringcomm"
and at the stages 0 to 3. Every loss, the text that the model generates, every final parameter and buffer, and the file
that `save_pretrained` writes must have the same bits on each rank. The programs are those of
tests/support/training/third_party.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.training.third_party import DDP, PROGRAMS, WAYS, verdicts

STAGES = [way for way in WAYS if way != DDP]
RESULT = Path(__file__).resolve().parents[1] / "results" / "third_party.md"


@dataclass
class Row:
    """The results of one program over all seeds."""

    name: str
    equal: Counter[str | int] = field(default_factory=Counter)
    refused: Counter[str | int] = field(default_factory=Counter)
    ran: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, seed: int, found: dict[str | int, str]) -> None:
        """Adds the result of one configuration."""
        self.ran += 1
        for way, told in found.items():
            self.equal[way] += told == "equal"
            self.refused[way] += told.startswith("refused")
            if told != "equal" and not told.startswith("refused"):
                self.failures.append(f"{self.name}, seed {seed}, {way if way == DDP else f'stage {way}'}: {told}")

    def cell(self, way: str | int) -> str:
        """Returns "yes", "refused", or the number of configurations that agree."""
        if self.equal[way] == self.ran:
            return "yes"
        return "refused" if self.refused[way] == self.ran else f"{self.equal[way]} of {self.ran}"

    def line(self) -> str:
        """Returns a row of the table."""
        package = PROGRAMS[self.name].package
        version = importlib.metadata.version(package.replace("_", "-")).split("+")[0]
        cells = [self.name, f"{package.replace('_', '-')} {version}", str(self.ran), *map(self.cell, STAGES)]
        return f"| {' | '.join(cells)} |"


def table(rows: list[Row]) -> str:
    """Returns the result as Markdown."""
    stages = " | ".join(f"stage {stage}" for stage in STAGES)
    head = [
        "# Third-party models and loops: the same bits as torch's DDP?",
        "",
        "Three ranks, random small configurations; all losses and the final state, compared bit by bit with",
        'torch\'s `DistributedDataParallel` over the backend "ringcomm". Made by `benchmarks/training/third_party.py`.',
        "",
        f"| model or loop | package | configurations | {stages} |",
        f"|---|---|--:|{'---|' * len(STAGES)}",
    ]
    return "\n".join([*head, *(row.line() for row in rows), ""])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=5, help="random configurations of each program")
    p.add_argument("--first", type=int, default=0, help="the first seed")
    p.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these programs alone")
    p.add_argument("--write", action="store_true", help=f"into results/{RESULT.name}")
    a = p.parse_args()
    rows = [Row(name) for name in a.only or PROGRAMS]
    for row in rows:
        for seed in range(a.first, a.first + a.seeds):
            row.add(seed, verdicts(row.name, seed))
        print(row.line(), flush=True)
    failures = [told for row in rows for told in row.failures]
    print(*failures, sep="\n")
    if a.write:
        RESULT.write_text(table(rows))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
