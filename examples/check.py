"""Repeats the training in one process and compares the results with those of the mesh: `train_gpt.py --check`."""

import argparse

import torch
from mesh import axes_of
from report import train
from training import Training, batches_of, power_of_two, sharded_training

import ringcomm

TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
"""Relative tolerance of the final loss, for meshes that add in an order other than that of one process."""


def same_bits(training: Training) -> bool:
    """Whether the mesh must produce the bits of one process with the same number of micro-batches. It need not do so
    with tp and cp, which split sums; with dp, if its tree of sums differs from the tree over all micro-batches; and
    with float16, whose loss scale differs."""
    mesh, passes = training.mesh, training.measure.passes
    if mesh.size("tp") > 1 or mesh.size("cp") > 1 or training.scaler.is_enabled():
        return False
    return mesh.size("dp") == 1 or (power_of_two(mesh.size("dp")) and power_of_two(passes))


def check(a: argparse.Namespace, training: Training, state: dict[str, torch.Tensor], text: torch.Tensor) -> bool:
    """Trains once more on this rank alone, prints the difference, and returns whether the difference is as expected.

    Args:
        state: all parameters at the end of the mesh's training.
    """
    mesh = ringcomm.init_mesh(dict.fromkeys(axes_of(a, 1), 1), ringcomm.init(0, 1))
    micro_batches = training.mesh.size("dp") * training.measure.passes
    alone = argparse.Namespace(
        **{**vars(a), "dp": 1, "tp": 1, "pp": 1, "cp": 1, "accumulate": 1, "micro_batches": micro_batches}
    )
    reference = sharded_training(alone, "one process", mesh, 0)
    batches = batches_of(alone, text, mesh)
    done = reference.resume(a.resume, batches) if a.resume else 0
    train(alone, [reference], batches, done, task="one process")
    expected = reference.model.state_dict()
    off = max(float((state[name] - x).abs().max()) for name, x in expected.items())
    loss = abs(training.loss - reference.loss) / reference.loss
    same = training.losses == reference.losses and all(torch.equal(state[name], x) for name, x in expected.items())
    found = "the same bits" if same else f"loss off by {loss:.1e} of itself, parameters by up to {off:.1e}"
    wanted = "the same bits" if same_bits(training) else f"a loss within {TOLERANCE[a.precision]:g} of itself"
    print(f"check: one process, {micro_batches} micro-batches, loss {reference.loss:.5f}: {found}; expected {wanted}")
    return same if same_bits(training) else loss <= TOLERANCE[a.precision]
