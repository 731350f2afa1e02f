"""Very many calls of random sizes, every element of every result checked on the device."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.on_gpu import EMULATED, PLACE, communicators, in_threads, synchronize, together

pytestmark = in_threads
CALLS = 60 if EMULATED else 20_000
MOST = 300 if EMULATED else 16_384


@pytest.mark.parametrize("apart", ["1", "2"], ids=["visible", "staged"])
@pytest.mark.parametrize("world_size", [2] if EMULATED else [2, 4])
def test_many_calls_of_random_sizes(world_size: int, apart: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets that carry their own flag arrive whole or not at all; nothing stale of an earlier call is ever taken, in
    the peers' buffers or in the staging areas."""
    monkeypatch.setenv("RINGCOMM_CUDA_APART", apart)  # the ranks meet on flags
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    torch.manual_seed(seed)
    calls = CALLS // (1 if world_size == 2 else 4)
    pool = [torch.randint(-1000, 1000, (4 * MOST,), device=PLACE).float() for _ in range(world_size)]  # sums are exact
    total = torch.stack(pool).sum(0)
    outs = [torch.empty(MOST + 32, device=PLACE) for _ in range(world_size)]
    wrong = torch.zeros((), dtype=torch.int64, device=PLACE)
    counts = {"oneshot": 0, "direct": 0, "ring": 0}
    with communicators(world_size) as comms:
        for i in range(calls):
            algorithm = chance.choices(("oneshot", "direct", "ring"), (6, 1, 1))[0]
            most = min(MOST, chance.choice((64, 2048, MOST)))
            count, at, shift = chance.randrange(1, most), chance.randrange(3 * MOST), chance.randrange(8)
            given = [x[at : at + count] for x in pool]
            taken = [out[shift : shift + count] for out in outs]
            together(
                comms,
                lambda c, a=algorithm, given=given, taken=taken: c.all_reduce(
                    given[c.rank], out=taken[c.rank], algorithm=a, async_op=True
                ),
            )
            want = total[at : at + count]
            for out in taken if i % 8 == 0 else taken[i % world_size :][:1]:
                wrong += (out != want).sum()
            counts[algorithm] += 1
        synchronize()
    assert int(wrong) == 0, f"{int(wrong)} elements are wrong in {calls} calls, seed {seed}"
    print(f"{calls} calls of {world_size} ranks: {counts}")
