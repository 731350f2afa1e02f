"""Models on the meta device that are cut first, and initialised or loaded afterwards, a module at a time: the same as
one process that has everything."""

from __future__ import annotations

import copy
import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import checkpoint
from ringcomm.comm.mesh import init_mesh
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.tensor_parallel.plan import parallelize
from tests.support import torch_ranks
from tests.support.choice import slow
from tests.support.mesh import cases
from tests.support.mesh.tensor_cases import close, difference, on_ranks, part
from tests.tensor_parallel.test_outputs import MODELS, built
from tests.tensor_parallel.test_transformers import GPT2, GPT_OSS, gpt_oss, llama, run, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **HEADS}


def mixtral() -> nn.Module:
    model = built("Mixtral", num_local_experts=4, **SMALL)
    model.set_experts_implementation("eager")  # the others multiply no float64
    return model


KINDS: dict[str, Any] = {
    "llama, tied": (lambda: llama(True), None),
    "qwen3, summed norms": (lambda: llama(False, "Qwen3"), None),
    "gemma, a scaled embedding": (lambda: built("Gemma", **SMALL), None),
    "mixtral, experts": (mixtral, None),
    "gpt2, Conv1D": (MODELS["gpt2"], GPT2),
    "gpt-oss, a parameter with a value for each head": (gpt_oss, GPT_OSS),
}


def emptied(whole: nn.Module) -> tuple[nn.Module, dict[nn.Module, str]]:
    """The same model as its constructor makes it on meta, and the names of its modules."""
    with torch.device("meta"):
        model = type(whole)(copy.deepcopy(whole.config)).double()
    assert all(p.is_meta for p in model.parameters())
    return model, {each: name for name, each in model.named_modules()}


class Loading:
    """An init_fn that reads a module's whole tensors, and notes how many it has read."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str], values: dict[str, torch.Tensor]) -> None:
        self.model, self.names, self.values, self.read = model, names, values, []

    def __call__(self, m: nn.Module) -> None:
        if m._buffers:
            self.model._init_weights(m)  # of transformers: what is in no state_dict
        for key, p in m._parameters.items():
            if p is not None:
                p.copy_(self.values[f"{self.names[self.place(m)]}.{key}"])
        self.read.append(m)

    def place(self, m: nn.Module) -> nn.Module:
        return m


def steps(model: nn.Module, optimizer: Any, clip: Any) -> list[float]:
    found = []
    for _ in range(3):
        found.append(float(run(model)[0]))
        found.append(float(clip(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_cut_and_then_loaded_trains_like_one_process(kind: str, stage: int) -> None:
    """dp=2 x tp=2; init_fn gets the modules that were there before the cut."""
    make, plan = KINDS[kind]
    whole = make()
    values = {name: x.clone() for name, x in whole.state_dict().items()}
    models = [emptied(whole) for _ in range(4)]
    expected = steps(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), torch.nn.utils.clip_grad_norm_)

    def rank(comm: Any) -> list[float]:
        mesh = init_mesh(dp=2, tp=2, comm=comm)
        model, names = models[comm.rank]
        parallelize(model, plan, mesh["tp"])
        assert all(p.is_meta for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loading = Loading(model, names, values)
        ringcomm.shard(model, optimizer, stage, mesh=mesh, init_fn=loading)
        assert not any(x.is_meta for x in [*model.parameters(), *model.buffers()])
        assert all(p.is_meta for m in loading.read if m not in {*model.modules()} for p in m.parameters())
        found = steps(model, optimizer, ringcomm.clip_grad_norm_)
        mesh.close()
        return found

    for found in on_ranks(rank, 4):
        assert found == pytest.approx(expected, rel=1e-5)  # transformers computes norms and routes in float32


class Scales(nn.Module):
    """A number for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = 4, nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.heads)


def test_a_module_with_a_vector_is_initialised_whole() -> None:
    """It counts all heads then, and those of the rank afterwards; in two places it is one."""

    def rank(comm: Any) -> None:
        mesh = init_mesh(dp=1, tp=2, comm=comm)
        with torch.device("meta"):
            model = nn.ModuleDict({"a": Scales(), "b": nn.Linear(2, 2)})
        model["c"] = model["a"]
        with pytest.raises(UnsupportedError, match=r"scale of shape \(4,\) on meta and of the module itself, expected"):
            parallelize(model["a"], {"scale": "colwise"}, mesh["tp"])
        parallelize(model, {"a.scale": "colwise", "c.scale": "colwise", "a": "heads", "c": "heads"}, mesh["tp"])
        assert model["a"] is model["c"]
        assert model["a"].scale.is_meta
        ringcomm.shard(model, None, 0, mesh=mesh)
        assert model["a"].scale.tolist() == [4.0, 4.0]
        assert model["a"].heads == 2
        mesh.close()

    on_ranks(rank, 2)


def test_rank_0_initialises_the_whole_for_all() -> None:
    """Each rank draws from a generator of its own; rank 0's draws count, for what is cut and for what is not."""
    plain = cases.make()

    def init_by(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return lambda m: [p.normal_(generator=generator) for p in m._parameters.values() if p is not None]

    init = init_by(0)
    with torch.no_grad():
        for each in [plain.token, plain.position, *plain.blocks.modules(), plain.norm]:  # the head is tied
            init(each)

    def rank(comm: Any) -> list[str]:
        mesh = init_mesh(dp=1, tp=2, comm=comm)
        with torch.device("meta"):
            model = cases.make()
        parallelize(model, cases.PLAN, mesh["tp"])
        ringcomm.shard(model, None, 0, mesh=mesh, init_fn=init_by(mesh["tp"].rank), bucket_cap_mb=1e-4)
        return [name for name, p in model.named_parameters() if not torch.equal(p, part(expected[name], p))]

    expected = dict(plain.named_parameters())
    found = on_ranks(rank, 2)
    assert found[0] == found[1]
    assert found == [[], []]


def test_reset_parameters_initialises_what_is_cut() -> None:
    def rank(comm: Any) -> list[torch.Tensor]:
        mesh = init_mesh(dp=1, tp=2, comm=comm)
        with torch.device("meta"):
            model = cases.make()
        parallelize(model, cases.PLAN, mesh["tp"])
        ringcomm.shard(model, None, 3, mesh=mesh)
        with ringcomm.whole(model):
            qkv = model.blocks[0].qkv.weight
            assert 0 < float(qkv.abs().max()) <= cases.WIDTH**-0.5  # nn.Linear's bound
            found = [model.position.weight.clone(), model.blocks[0].norm.weight.clone(), model.norm.bias.clone()]
        assert torch.isfinite(model(cases.batch(0)[0])).all()
        return found

    a, b = on_ranks(rank, 2)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("stage", [slow(0), 3])
def test_a_checkpoint_of_another_mesh_is_loaded_into_parts(tmp_path: Path, stage: int) -> None:
    """An odd vocabulary, which is padded; a forward pass before says what has no values."""
    whole = llama(True)

    def save(comm: Any) -> None:
        mesh = init_mesh(dp=1, comm=comm)
        model = copy.deepcopy(whole)
        ringcomm.shard(model, None, 0, mesh=mesh)
        checkpoint.save(tmp_path / "x", model)

    on_ranks(save, 1)
    logits = run(whole)[1]
    models = [emptied(whole)[0] for _ in range(4)]

    def rank(comm: Any) -> None:
        mesh = init_mesh(dp=2, tp=2, comm=comm)
        model = parallelize(models[comm.rank], None, mesh["tp"])
        for each in model.modules():
            if each._buffers:  # of positions, which are in no checkpoint
                each.to_empty(device="cpu", recurse=False)
                model._init_weights(each)
        ringcomm.shard(model, None, stage, mesh=mesh, init_fn=False)
        with pytest.raises(InvalidArgumentError, match=r"got .*model\.layers\.0.* from the meta device without values"):
            model(input_ids=tokens())
        checkpoint.load(tmp_path / "x", model)
        assert close(run(model)[1], logits)
        with ringcomm.whole(model):
            assert torch.isfinite(model.model.embed_tokens.weight).all()
        mesh.close()

    on_ranks(rank, 4)


def test_parts_are_loaded_without_a_mesh() -> None:
    """to_empty() gives memory to this rank's parts alone."""
    whole = built("Llama", **SMALL)
    models, sources = [emptied(whole)[0] for _ in range(2)], [copy.deepcopy(whole) for _ in range(2)]
    logits = run(whole)[1]

    def rank(comm: Any) -> float:
        state = parallelize(sources[comm.rank], None, comm).state_dict()
        model = parallelize(models[comm.rank], None, comm).to_empty(device="cpu")
        model.load_state_dict(state)
        for each in model.modules():
            if each._buffers:
                model._init_weights(each)
        return difference(run(model)[1], logits)

    assert max(on_ranks(rank, 2)) < 1e-12


# ---- memory ----------------------------------------------------------------------------------------------------------

LAYERS, FEATURES = 16, 1024  # of 4 MiB each


def growth() -> tuple[float, float]:
    """By how many MiB the resident memory of a rank grew at most, and by how many its parameters grew it for good: the
    kernel may have dropped pages of files meanwhile, which only the first number counts."""
    comm = ringcomm.init()
    mesh = init_mesh(tp=comm.world_size, comm=comm)

    def build(layers: int, features: int) -> None:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(features, features, bias=False) for _ in range(layers)))
        plan = {f"{i}": "rowwise" if i % 2 else "colwise" for i in range(layers)}
        parallelize(model, plan, mesh["tp"])
        ringcomm.shard(model, None, 0, mesh=mesh, bucket_cap_mb=1)
        kept.append(model)

    kept: list[nn.Module] = []
    build(2, 64)  # what is made once
    kept.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what other tests in this process have left would be freed, or used again
    before, own = _kib("VmRSS"), _kib("RssAnon") + _kib("RssShmem")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    build(LAYERS, FEATURES)
    peak, own = _kib("VmHWM") - before, _kib("RssAnon") + _kib("RssShmem") - own
    comm.close()
    return peak / 1024, own / 1024


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def test_a_rank_has_its_part_and_a_layer_at_most() -> None:
    """64 MiB over 2 ranks: the part of 32, and one layer at a time whole, with room for its numbers."""
    for peak, own in torch_ranks.run(growth, world_size=2):
        assert peak <= 32 + 2 * 4
        assert own > 24
