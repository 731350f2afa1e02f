"""The table of architectures, for a few families: what it says, and that it would see wrong values.

`benchmarks/training/architectures.py` is the long form.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support import forked
from tests.support.choice import slow

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

WORKS = {
    "apertus": ("tp, its plan", "pp, middle", "cp", "together", "generate"),
    "mixtral": ("tp, its plan", "pp, elsewhere", "cp", "together", "generate"),  # elsewhere: inside of a block
    "m2m_100": ("tp, our plan", "pp, middle", "together", "generate"),
}
REFUSED = {("m2m_100", "cp"): "an embedding of positions"}


def write_table(*words: str) -> None:
    sys.argv = ["architectures", *words]
    importlib.import_module("benchmarks.training.architectures").main()


@pytest.mark.timeout(500)  # its process has 450
@pytest.mark.parametrize("families", [["m2m_100"], slow([*WORKS])], ids=" ".join)  # works and is refused
def test_some_families(families: list[str], tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    done = forked.run(write_table, "--only", *families, "--limit", "400", "--json", str(path), limit_s=450)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(path.read_text())
    for name, columns in ((name, WORKS[name]) for name in families):
        assert [column for column in columns if found[name][column][0] != "works"] == [], found[name]
    for (name, column), said in REFUSED.items():
        assert found[name][column][0] == "refused"
        assert said in found[name][column][1]
        assert said in done.stdout.replace("\n", " ")


def test_wrong_values_are_seen() -> None:
    from benchmarks.training import architectures as table

    family = table.Family("llama", "causal")
    expected = family.trained(table.own_loss, 1)
    again = table.steps(family.copies(1)[0], family.batches, [])
    family.compare([again], expected)
    with pytest.raises(table.Wrong, match="a loss of"):
        family.compare([([*again[0][:-1], again[0][-1] * (1 + 1e-3)], again[1])], expected)
    with pytest.raises(table.Wrong, match="1 parameters are on no rank"):
        family.compare([(again[0], {name: p for name, p in again[1].items() if name != "lm_head.weight"})], expected)
    with torch.no_grad():
        again[1]["model.norm.weight"] += 1e-4
    with pytest.raises(table.Wrong, match=r"model\.norm\.weight moved by .* and is off by 0.0001"):
        family.compare([again], expected)
