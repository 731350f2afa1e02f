"""Times steps of torch's CPU optimizers on one flat shard against a copy of the same bytes: the cost of `offload=True`.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizer                   # results/optimizer.txt

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


def step_of(kind: dict[str, bool], numel: int) -> Callable[[], None]:
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], lr=1e-3, **kind)

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
    p.add_argument("--numel", type=int, default=10_000_000)
    p.add_argument("--turns", type=int, default=21)
    a = p.parse_args()
    kinds = {
        "AdamW(fused=True)": step_of({"fused": True}, a.numel),
        "AdamW(foreach=True)": step_of({"foreach": True}, a.numel),
        "AdamW(foreach=False)": step_of({"foreach": False}, a.numel),
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
    print(f"# {'':24s} {'ms, median (min-max)':>26s} {'GB/s':>6s}")
    for name, each in seconds.items():
        median = statistics.median(each)
        spread = f"{1e3 * median:.1f} ({1e3 * min(each):.1f}-{1e3 * max(each):.1f})"
        print(f"  {name:24s} {spread:>26s} {28 * a.numel / median / 1e9:6.1f}")


if __name__ == "__main__":
    main()
