"""Mixed precision: element types on the wire, as exact as they say, and those of buffers; torch's policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import MixedPrecision
from ringcomm.data_parallel.memory import predict

WORLD = 3
WIRES = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}  # half an ulp


class Given(nn.Module):
    """A parameter whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(7, 50))
        self.second = nn.Parameter(torch.zeros(33))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (self.first * first).sum() + (self.second * second).sum()


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    magnitudes = 10 ** torch.empty(7, 50).uniform_(-2, 2, generator=generator)
    return torch.randn(7, 50, generator=generator) * magnitudes, torch.randn(33, generator=generator) * 1e-6


def means(stage: int, wire: str, bucket_cap_mb: float) -> list[dict[str, torch.Tensor]]:
    """What SGD with lr = -1 from zero leaves in the parameters."""
    models = [Given() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> dict[str, torch.Tensor]:
        model = models[comm.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        precision = MixedPrecision(reduce_dtype=getattr(torch, wire))
        ringcomm.shard(model, optimizer, stage, comm, mixed_precision=precision, bucket_cap_mb=bucket_cap_mb)
        (-model(*given(comm.rank))).backward()
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    return ringcomm.run_ranks(rank, WORLD, timeout=20)


@pytest.mark.parametrize("wire", WIRES)
def test_a_narrow_wire_gives_the_same_bits_at_every_stage_and_bucket_size(wire: str) -> None:
    expected = means(0, wire, 25)[0]
    for stage in range(4):
        for cap in (25, 0.0001):
            for got in means(stage, wire, cap):
                assert all(torch.equal(got[name], expected[name]) for name in expected), (stage, cap)


@pytest.mark.parametrize("wire", WIRES)
def test_a_narrow_wire_rounds_as_it_says(wire: str) -> None:
    found = means(2, wire, 25)[0]
    everyone = [given(rank) for rank in range(WORLD)]
    narrow = torch.finfo(getattr(torch, wire))
    for name, each in zip(("first", "second"), zip(*everyone, strict=True), strict=True):
        stacked = torch.stack(each).double()
        # Each rank's value rounds once to the wire, and the mean once more; the smallest step is the type's own.
        scale = float(stacked.abs().max()) / narrow.max if narrow.bits == 8 else 1.0
        step = narrow.smallest_normal * narrow.eps * scale
        bound = WIRES[wire] * (stacked.abs().mean(0) + stacked.mean(0).abs()) * 1.07 + step
        error = (found[name].double() - stacked.mean(0)).abs()
        assert bool((error <= bound).all()), name
        assert float(error.max()) > 0, "nothing was rounded: it did not travel in that type"


def test_an_8_bit_wire_loses_what_is_small_beside_the_largest() -> None:
    def lost(small: float) -> bool:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ringcomm.shard(model, optimizer, 0, mixed_precision=MixedPrecision(reduce_dtype=torch.float8_e4m3fn))
        first = torch.full((7, 50), small)
        first[0, 0] = 1.0
        (-model(first, torch.ones(33))).backward()
        optimizer.step()
        return float(model.first.detach()[1, 1]) == 0

    assert lost(2.0**-19)
    assert not lost(2.0**-17)


@pytest.mark.parametrize(
    "wrong",
    [
        {"param_dtype": torch.int8},
        {"reduce_dtype": torch.int32},
        {"master_dtype": "fp32"},
        {"buffer_dtype": torch.int8},
    ],
)
def test_other_types_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ringcomm.InvalidArgumentError, match=f"MixedPrecision: got {next(iter(wrong))}="):
        MixedPrecision(**wrong)


class Scaled(nn.Module):
    """Buffers of every kind: in a submodule, of a batch norm, of another type, and on meta until it is initialised."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6)
        self.inner.register_buffer("scale", torch.full((6,), 1.1))
        self.register_buffer("shift", torch.full((6,), 0.3, device=device))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))

    def reset_parameters(self) -> None:
        self.shift = torch.full((6,), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.inner(torch.relu(self.norm(self.linear(x)))) * self.inner.scale + self.shift * self.mask


CAST = {"shift", "inner.scale"}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, torch.Tensor]:
    """Two steps; checks the buffers' types."""
    for step in range(2):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3 * rank + step))
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            assert (buffer.dtype == torch.bfloat16) == (name.removeprefix("module.") in CAST), name
    assert int(dict(model.named_buffers())["module.steps" if hasattr(model, "module") else "steps"]) == 2
    return {name.removeprefix("module."): x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_are_cast_at_every_stage(device: str) -> None:
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    models = [[Scaled(device) for _ in range(WORLD)] for _ in range(4)]
    state = Scaled().state_dict()
    del state["shift"]
    for stage in models:
        for model in stage:
            model.load_state_dict(state, strict=False)

    def rank(comm: ringcomm.Communicator) -> list[dict[str, torch.Tensor]]:
        found = []
        for stage, of_ranks in enumerate(models):
            model = of_ranks[comm.rank]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ringcomm.shard(model, optimizer, stage, comm, mixed_precision=precision)
            found.append(trained(model, optimizer, comm.rank))
        return found

    for found in ringcomm.run_ranks(rank, WORLD, timeout=60):
        assert found[0]["shift"].equal(torch.full((6,), 0.3).bfloat16())
        for stage in found[1:]:
            assert all(stage[name].equal(x) for name, x in found[0].items() if "running" not in name)


def test_policies_of_torch_are_accepted_everywhere() -> None:
    from torch.distributed.fsdp import MixedPrecision as OfFSDP1
    from torch.nn.parallel.distributed import _MixedPrecision as OfDDP

    bf16 = torch.bfloat16
    ours = MixedPrecision(bf16, bf16, buffer_dtype=bf16)
    policies = {
        "ours": ours,
        "FSDP1": OfFSDP1(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        "DDP": OfDDP(param_dtype=bf16, buffer_dtype=bf16),  # gradients travel in param_dtype
    }
    models = {name: [Scaled() for _ in range(WORLD)] for name in policies}
    wrapped = {name: [Scaled() for _ in range(WORLD)] for name in policies}
    state = Scaled().state_dict()

    def rank(comm: ringcomm.Communicator) -> list[dict[str, torch.Tensor]]:
        found = []
        for name, policy in policies.items():
            model, ddp = models[name][comm.rank], wrapped[name][comm.rank]
            for each in (model, ddp):
                each.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ringcomm.shard(model, optimizer, 3, comm, mixed_precision=policy)
            found.append(trained(model, optimizer, comm.rank))
            each = ringcomm.DistributedDataParallel(ddp, comm, mixed_precision=policy)
            found.append(trained(each, torch.optim.SGD(each.parameters(), lr=0.1), comm.rank))
        return found

    for found in ringcomm.run_ranks(rank, WORLD, timeout=60):
        for other in found[1:]:
            assert all(other[name].equal(x) for name, x in found[0].items() if "running" not in name)


class Auxiliary(nn.Module):
    """Appends a loss to a list, and changes a dictionary that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: torch.Tensor, t: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
        seen["losses"].append(self.linear(h.to(self.linear.weight.dtype)).float().square().mean())
        seen["types"] = (*seen["types"], h.dtype, t.dtype)
        seen["hidden"].append(h)
        seen.pop("removed", None)
        return h.float() + 1.0


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Auxiliary() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        kept = torch.zeros(3)
        self.seen: dict[str, Any] = {"losses": [], "hidden": [], "types": (), "kept": kept, "removed": kept}
        h = x.float()
        for block in self.blocks:
            h = block(h, x.float(), self.seen)
        assert self.seen["kept"] is kept
        return sum(self.seen["losses"]) + h.sum()


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_call_changes_in_a_cast_list_or_dictionary_is_changed_in_the_callers(
    stage: int, cap: float | None
) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = WithAuxiliary()
        ringcomm.shard(model, None, stage, comm, mixed_precision=MixedPrecision(torch.bfloat16), bucket_cap_mb=cap)
        model(torch.ones(2, 6)).backward()
        assert model.seen.keys() == {"losses", "hidden", "types", "kept"}
        assert [x.dtype for x in model.seen["hidden"]] == [torch.bfloat16] * 3
        assert [x.dtype for x in model.seen["losses"]] == [torch.float32] * 3
        assert model.seen["types"] == (torch.bfloat16,) * 6
        assert all(p.grad is not None for p in model.parameters())

    ringcomm.run_ranks(rank, 2, timeout=20)


def test_which_inputs_are_cast() -> None:
    """Those of the model alone by FSDP1's default and by DDP's policy, as in torch."""
    from torch.distributed.fsdp import MixedPrecision as OfFSDP1
    from torch.distributed.fsdp import MixedPrecisionPolicy as OfFSDP2
    from torch.nn.parallel.distributed import _MixedPrecision as OfDDP

    bf16, f32 = torch.bfloat16, torch.float32
    policies: dict[tuple[torch.dtype, torch.dtype], list[Any]] = {  # of the model's inputs, and of the blocks'
        (bf16, bf16): [
            MixedPrecision(bf16), OfFSDP2(bf16), OfFSDP1(bf16, cast_forward_inputs=True),
            MixedPrecision(bf16, cast_root_forward_inputs=True),
        ],
        (bf16, f32): [
            OfFSDP1(bf16), OfDDP(bf16), MixedPrecision(bf16, cast_forward_inputs=False, cast_root_forward_inputs=True),
        ],
        (f32, bf16): [
            OfFSDP1(bf16, cast_forward_inputs=True, cast_root_forward_inputs=False),
            MixedPrecision(bf16, cast_root_forward_inputs=False),
        ],
        (f32, f32): [
            MixedPrecision(bf16, cast_forward_inputs=False), OfFSDP2(bf16, cast_forward_inputs=False),
            OfFSDP1(bf16, cast_root_forward_inputs=False),
        ],
    }  # fmt: skip

    def rank(comm: ringcomm.Communicator) -> None:
        for (root, inner), some in policies.items():
            for policy in some:
                sharded, composed = WithAuxiliary(), WithAuxiliary()
                ringcomm.shard(sharded, None, 3, comm, mixed_precision=policy)
                for each in (*composed.blocks, composed):
                    ringcomm.fully_shard(each, comm=comm, mp_policy=policy)
                for model in (sharded, composed):
                    model(torch.ones(2, 6))
                    assert (model.x.dtype, model.seen["types"][1]) == (root, inner), policy

    ringcomm.run_ranks(rank, 2, timeout=20)


def test_buffers_that_are_cast_come_back_and_which_are_not() -> None:
    """8-bit floats have scales of their own; a tensor made in inference mode takes no other data."""

    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Linear(4, 4)
        model.register_buffer("table", torch.full((4,), 1.1))
        model.register_buffer("packed", torch.ones(4).to(torch.float8_e4m3fn))
        with torch.inference_mode():
            model.register_buffer("made", torch.full((4,), 1.1))
        ringcomm.shard(model, None, 2, comm, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
        types = {"table": torch.bfloat16, "packed": torch.float8_e4m3fn, "made": torch.bfloat16}
        assert {name: b.dtype for name, b in model.named_buffers()} == types
        model(torch.ones(2, 4)).sum().backward()
        ringcomm.unshard(model)
        assert model.table.equal(torch.full((4,), 1.1).bfloat16().float())
        assert model.made.dtype == torch.float32

    ringcomm.run_ranks(rank, 2, timeout=20)


def test_buffers_that_keep_their_type() -> None:
    """Those that DDP ignores, and those of a module that fully_shard got with another policy."""
    precision = MixedPrecision(buffer_dtype=torch.float64)

    def rank(comm: ringcomm.Communicator) -> None:
        model = Scaled()
        model._ddp_params_and_buffers_to_ignore = ["shift"]
        ringcomm.DistributedDataParallel(model, comm, mixed_precision=precision)
        assert model.shift.dtype == torch.float32
        assert model.inner.scale.dtype == torch.float64
        model = Scaled()
        ringcomm.fully_shard(model.inner, comm=comm, mp_policy=MixedPrecision(buffer_dtype=torch.bfloat16))
        ringcomm.fully_shard(model, comm=comm, mp_policy=precision)
        assert model.shift.dtype == torch.float64
        assert model.inner.scale.dtype == torch.bfloat16
        assert model.norm.running_mean is not None
        assert model.norm.running_mean.dtype == torch.float32

    ringcomm.run_ranks(rank, WORLD, timeout=20)


def test_what_is_refused_of_torchs_policies() -> None:
    from torch.distributed.fsdp import MixedPrecision as OfFSDP1

    for policy, why in (
        (OfFSDP1(param_dtype=torch.int8), "got param_dtype=torch.int8, expected one of"),
        (OfFSDP1(torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm]), "leaves out LayerNorm, expected"),
    ):
        with pytest.raises(ringcomm.InvalidArgumentError, match=f"^MixedPrecision: .*{why}"):
            ringcomm.shard(nn.Linear(2, 2), None, 0, mixed_precision=policy)


def test_a_prediction_for_something_else_is_refused() -> None:
    with pytest.raises(ringcomm.InvalidArgumentError, match="predict: got mixed_precision='bf16'"):
        predict(nn.Linear(2, 2), 2, 4, mixed_precision="bf16")


def test_something_else_is_no_policy() -> None:
    refused = pytest.raises(
        ringcomm.InvalidArgumentError, match=r"expected a ringcomm\.MixedPrecision,.* policy of torch"
    )
    with refused:
        ringcomm.shard(nn.Linear(2, 2), None, 0, mixed_precision="bf16")
    with refused:
        ringcomm.fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)
