"""Times steps of torch's CPU optimizers on one flat shard, as one parameter and in cache blocks, against a copy of the
same bytes.

    OMP_NUM_THREADS=1 python -m benchmarks.training.optimizer          # results/optimizer.txt

A step of Adam reads the parameter, the gradient and two moments, and writes three of them: 28 bytes per float32
element. The copy moves as many bytes with memcpy, so its rate is the limit. Kinds take turns; the table shows median
(min-max).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ringcomm.data_parallel.optim.cache_blocks import BLOCK


def step_of(
    numel: int, block: int | None = None, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: bool
) -> Callable[[], None]:
    values, gradient = torch.randn(numel), torch.randn(numel)
    params = [torch.nn.Parameter(part) for part in values.split(block or numel)]
    for param, part in zip(params, gradient.split(block or numel), strict=True):
        param.grad = part
    optimizer = cls(params, lr=1e-3, **options)  # type: ignore[call-arg]

    def run() -> None:
        optimizer.step()

    return run


def copy_of(nbytes: int) -> Callable[[], None]:
    source, target = torch.ones(nbytes // 2, dtype=torch.uint8), torch.ones(nbytes // 2, dtype=torch.uint8)

    def run() -> None:
        target.copy_(source)

    return run


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--numel", type=int, default=20_000_000)
    p.add_argument("--turns", type=int, default=11)
    a = p.parse_args()
    kinds = {
        "AdamW(fused=True)": step_of(a.numel, fused=True),
        "AdamW(foreach=True)": step_of(a.numel, foreach=True),
        "AdamW()": step_of(a.numel),
        **{f"AdamW(), blocks of {1 << bits:,}": step_of(a.numel, 1 << bits) for bits in range(14, 20)},
        **{
            f"{cls.__name__}(){words}": step_of(a.numel, block, cls)
            for cls in (torch.optim.RMSprop, torch.optim.Adagrad)
            for words, block in (("", None), (f", blocks of {BLOCK:,}", BLOCK))
        },
        "copy of the same bytes": copy_of(28 * a.numel),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(a.turns + 2):
        for name, run in kinds.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    print(f"# {a.numel:,} elements of float32, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    print(f"# {'':28s} {'ms, median (min-max)':>26s} {'GB/s':>6s}")
    for name, each in seconds.items():
        median = statistics.median(each)
        spread = f"{1e3 * median:.1f} ({1e3 * min(each):.1f}-{1e3 * max(each):.1f})"
        rate = f" {28 * a.numel / median / 1e9:6.1f}" if name.startswith(("AdamW", "copy")) else ""
        print(f"  {name:28s} {spread:>26s}{rate}")


if __name__ == "__main__":
    main()
