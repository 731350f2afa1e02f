"""`ringcomm memory`: computes the bytes on each rank at every stage from the number of parameters alone.

    P parameters on W ranks           stage 0   1     2     3
    parameters    c P, c bytes each   all       all   all   1/W
    gradients     4 P                 all       all   1/W   1/W
    optimizer     s P (adamw 8)       all       1/W   1/W   1/W
    master        4 P in 16 bits      all       1/W   1/W   1/W

Activations, alignment, buffers and a step's temporary memory
are not included; `ringcomm.memory` plans them for a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ringcomm.errors import InvalidArgumentError
from ringcomm.tools.bench.options import parse_count, positive

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STATE_BYTES = {"adamw": 8, "momentum": 4, "sgd": 0}


def bytes_per_rank(numel: int, world_size: int, stage: int, precision: str, optimizer: str) -> dict[str, float]:
    """Returns the bytes that a rank keeps between two steps, by kind.

    Args:
        precision: "fp32", or "bf16" or "fp16" over float32 master weights and gradients.
        optimizer: "adamw", "momentum" (SGD with momentum) or "sgd".
    """
    compute = COMPUTE_BYTES[precision]
    share = [numel / world_size if stage >= least else numel for least in (3, 2, 1)]
    return {
        "parameters": compute * share[0],
        "master": (4 if compute < 4 else 0) * share[2],
        "gradients": 4 * share[1],
        "optimizer": STATE_BYTES[optimizer] * share[2],
    }


def transformer_numel(layers: int, width: int, vocabulary: int) -> int:
    """Number of parameters of a transformer with tied embeddings: 12 width**2 per layer, without biases, norms and
    positions."""
    return 12 * layers * width**2 + vocabulary * width


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ringcomm memory",
        description="Bytes on each rank at every stage, in GiB, without activations.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parameters", nargs="?", type=parse_count, help="how many, such as 125M, 7B or 7e9")
    parser.add_argument("--world", nargs="+", type=positive, default=[1, 8, 64], metavar="W", help="numbers of ranks")
    parser.add_argument("--precision", choices=COMPUTE_BYTES, default="bf16", help="of forward and backward")
    parser.add_argument("--optimizer", choices=STATE_BYTES, default="adamw")
    transformer = parser.add_argument_group(
        "a transformer in place of a number", "12 layers width^2 + vocabulary width parameters"
    )
    for name in ("layers", "width", "vocabulary"):
        transformer.add_argument(f"--{name}", type=positive)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns: its exit status, 0. Raises: InvalidArgumentError: not one model, in one way."""
    args = _parser().parse_args(list(argv))
    shape = (args.layers, args.width, args.vocabulary)
    if (args.parameters is None) == (None in shape) or (args.parameters is not None and shape != (None,) * 3):
        raise InvalidArgumentError(
            "memory: got neither or both of a number and a transformer, expected one; pass 7B, or --layers, --width "
            "and --vocabulary"
        )
    numel = transformer_numel(*shape) if args.parameters is None else args.parameters
    print(f"{numel:,} parameters, {args.precision}, {args.optimizer}; GiB on each rank")
    kinds = list(bytes_per_rank(numel, 1, 0, args.precision, args.optimizer))
    titles = ("ranks", "stage", *kinds, "sum")
    widths = [max(8 if i > 1 else 5, len(title)) for i, title in enumerate(titles)]
    print(" ".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    for world_size in args.world:
        for stage in range(4):
            found = bytes_per_rank(numel, world_size, stage, args.precision, args.optimizer)
            figures = [f"{nbytes / 2**30:.2f}" for nbytes in (*found.values(), sum(found.values()))]
            cells = (str(world_size), str(stage), *figures)
            print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return 0
