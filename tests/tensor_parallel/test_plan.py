"""`parallelize`: an unmodified module computes the same over the ranks, by a plan of names; what it sends; refusals.

Tolerances are shares of the largest magnitude: 1e-12 in float64, 1e-5 in float32 (tests/support/mesh/tensor_cases.py);
gradients, which have come through all layers, five times that.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from examples.gpt import GPT
from ringcomm.comm.mesh import init_mesh
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.shard_spec import part_of
from ringcomm.tensor_parallel.layers import RowParallelLinear
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import Colwise
from tests.support.choice import slow
from tests.support.mesh.tensor_cases import close, difference, on_parts, on_ranks, part, sent, unlike
from tests.support.seeded import seeded

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY, WIDTH, LENGTH = 29, 96, 12


class Attention(nn.Module):
    """Grouped queries: a key and a value for every two heads; a norm that all heads share."""

    def __init__(self, heads: int, normed: bool) -> None:
        super().__init__()
        self.head_dim = WIDTH // heads
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wk = nn.Linear(WIDTH, WIDTH // 2, bias=False)  # attention does not depend on a key's bias
        self.wv = nn.Linear(WIDTH, WIDTH // 2)
        self.q_norm = nn.LayerNorm(self.head_dim) if normed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, heads: int, normed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.0)
        self.attention = Attention(heads, normed)
        self.up, self.down = nn.Linear(WIDTH, 72), nn.Linear(72, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 2, heads: int = 24, normed: bool = True) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(heads, normed) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.recompute = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


Plan = dict[str, Any]
TENSOR: Plan = {
    "token": "vocab", "head": "colwise_gather_output",
    "*.wq": "colwise", "*.wk": "colwise", "*.wv": "colwise", "*.wo": "rowwise", "layers.*.up": "colwise",
    "layers.0.down": "rowwise", "layers.1.down": "rowwise",
}  # fmt: skip
NORMED: Plan = {"*.q_norm": "summed"}
SEQUENCE: Plan = {
    **TENSOR, "layers": "sequence_region", "layers.*.norm?": "sequence", "*.drop": "sequence",
    "*.attention": "gather_sequence",
}  # fmt: skip
APART: Plan = {name: style for name, style in SEQUENCE.items() if name != "*.attention"}
GPT_TENSOR: Plan = {
    "blocks.*.qkv": Colwise(parts=3), "blocks.*": "heads", "*.proj": "rowwise", "*.mlp.0": "colwise",
    "*.mlp.2": "rowwise", "token": "vocab", "head": Colwise(gather_output=True, pad=True),
}  # fmt: skip
GPT_SEQUENCE: Plan = {**GPT_TENSOR, "blocks": "sequence_region", "*.norm1": "sequence", "*.norm2": "sequence"}


def make(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    return seeded(Model(**options).to(dtype), seed)


def tokens(seed: int = 0, batch: int = 2, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0, batch: int = 2, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, Any]:
    out = model(tokens(seed, batch, vocabulary))
    return F.cross_entropy(out.flatten(0, 1), tokens(seed + 1000, batch, vocabulary).flatten()), out


KINDS = {
    "tensor": ({**TENSOR, **NORMED}, {}),
    "sequence": ({**SEQUENCE, **NORMED}, {"sequence_dim": 1}),
    "overlap": ({**SEQUENCE, **NORMED}, {"sequence_dim": 1, "overlap": True}),
    "apart": ({**APART, **NORMED}, {"sequence_dim": 1, "overlap": True}),
}
GPT_KINDS = {
    "tensor": (GPT_TENSOR, {}),
    "sequence": (GPT_SEQUENCE, {"sequence_dim": 1}),
    "overlap": (GPT_SEQUENCE, {"sequence_dim": 1, "overlap": True}),
}


def check(
    whole: nn.Module, others: list[nn.Module], plan: Plan, options: Any, world_size: int, vocabulary: int
) -> None:
    loss, out = loss_of(whole, vocabulary=vocabulary)
    loss.backward()

    def rank(comm: Any) -> None:
        model = parallelize(others[comm.rank], plan, comm, **options)
        assert model is others[comm.rank]
        found, logits = loss_of(model, vocabulary=vocabulary)
        assert close(logits, out)
        assert close(found, loss)
        found.backward()
        assert unlike(model, whole, 5) == []
        assert model.head.weight is model.token.weight
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]

    on_ranks(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, slow(4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_transformer(kind: str, dtype: torch.dtype, world_size: int) -> None:
    """Grouped queries, a summed norm, tied embeddings of an odd vocabulary. Every rank begins with rank 0's values."""
    check(make(0, dtype), [make(seed, dtype) for seed in range(world_size)], *KINDS[kind], world_size, VOCABULARY)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", GPT_KINDS)
def test_the_gpt_of_the_examples(kind: str, world_size: int) -> None:
    torch.manual_seed(0)
    whole = GPT(2, 48, 12, LENGTH).double()
    for p in whole.parameters():
        nn.init.normal_(p, std=0.2)
    check(whole, [copy.deepcopy(whole) for _ in range(world_size)], *GPT_KINDS[kind], world_size, 256)


def test_a_layer_that_is_used_twice_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
            self.b, self.also = self.a, self.norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.also(self.b(self.norm(self.a(x))))

    whole, x = Twice().double(), torch.ones(3, 6).double() * torch.arange(6)
    whole(x).sin().sum().backward()

    def check(model: nn.Module, comm: Any) -> None:
        assert model.a is model.b
        model(x).sin().sum().backward()
        assert unlike(model, whole, 5) == []

    plan = {"a": Colwise(gather_output=True), "b": Colwise(gather_output=True), "norm": "replicate"}
    on_parts(whole, plan, check, 3)


def test_the_module_that_is_passed_itself_has_a_name_in_the_plan() -> None:
    """An attention alone: without its heads a warning names what to add to the plan, which gives the right values."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.qkv, self.proj = 4, nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 8)
    layers: dict[str, Any] = {"qkv": Colwise(parts=3), "proj": "rowwise"}

    def check(sharded: nn.Module, comm: Any) -> None:
        assert sharded.heads == 2
        assert close(sharded(x), model(x))

    with pytest.warns(UserWarning, match=r"pass \{'': 'heads'\} in the plan, else 'replicate'"):
        on_parts(model, layers, lambda sharded, comm: None)
    on_parts(model, {"": "heads", **layers}, check)


def test_norms_that_share_a_weight_sum_its_gradient_once() -> None:
    whole = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.LayerNorm(6)).double()
    whole[4].weight = whole[0].weight
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole(x).sin().sum().backward()

    def check(model: nn.Module, comm: Any) -> None:
        model(x.chunk(3)[comm.rank]).sin().sum().backward()
        assert unlike(model, whole) == []

    on_parts(whole, {"0": "sequence", "1": "colwise", "3": "rowwise", "4": "sequence"}, check, 3, sequence_dim=0)


@pytest.mark.parametrize("verify", [False, True])
def test_a_sequence_that_nobody_cuts_is_noticed(verify: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6))
    plan, x = {"0": "sequence", "1": "colwise", "2": "rowwise"}, torch.arange(24.0).view(4, 6)
    said = "got the same input of 0 as all other ranks, expected this rank's part of the sequence; name a"
    with pytest.raises(InvalidArgumentError, match=said) if verify else pytest.warns(UserWarning, match=said):
        on_parts(model, plan, lambda cut, comm: cut(x), sequence_dim=0, verify=verify)


class Penalised(nn.Module):
    """Computes with a weight of its own layer, if ``how`` says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x.to(self.up.weight.dtype))) + self.down.weight.shape[0]
        loss = x.square().mean()
        if self.how == "all":
            return loss + sum(p.square().sum() for p in self.parameters())
        if self.how == "bias":
            return loss + self.up.bias.mean() + self.down.bias.mean()
        return loss + (x @ self.down.weight.T.T[:, :1].repeat(1, 2)).sum() if self.how == "turned" else loss


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("how", "name"), [("all", "square"), ("turned", "__get__"), ("bias", "mean"), ("none", "")])
def test_code_that_computes_with_a_cut_weight_is_noticed(how: str, name: str, compiled: bool) -> None:
    """In the first forward pass with gradients, once; not under torch.compile, which would look at what looks on."""

    def passes(model: nn.Module, comm: Any) -> None:
        if compiled:
            model.up.compile(backend="eager")
        with torch.no_grad():
            model(torch.ones(2, 4))
        for _ in range(2):
            model(torch.ones(2, 4))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        on_parts(Penalised(how), {"up": "colwise", "down": "rowwise"}, passes)
    said = [str(each.message) for each in seen if "outside of the layer" in str(each.message)]
    assert len(said) == (2 if name and not compiled else 0)
    assert all(
        f"saw {name.strip('_')} with the {'bias of up' if how == 'bias' else 'weight of '}" in each for each in said
    )


def test_frozen_parameters_that_are_trained_later() -> None:
    whole = make(0)
    loss_of(whole)[0].backward()

    def check(model: nn.Module, comm: Any) -> None:
        assert not any(p.requires_grad for p in model.parameters())
        model.requires_grad_(True)
        loss_of(model)[0].backward()
        assert unlike(model, whole, 5) == []

    on_parts(make(0).requires_grad_(False), KINDS["sequence"][0], check, 3, sequence_dim=1)


# ---- training ------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, optimizer: Any, clip: Callable[..., Any], batches: int, share: int, steps: int
) -> list[Any]:
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        loss, _ = loss_of(model, seed=step * batches + share)
        loss.backward()
        norms.append(float(clip(model.parameters(), 0.1)))
        optimizer.step()
    return norms


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("kind", [slow("tensor"), "overlap"])
def test_twenty_steps(kind: str) -> None:
    whole = make(0)
    plan, options = KINDS[kind]

    def no_clip(parameters: Any, _: float) -> float:
        return 0.0

    train(whole, adamw(whole), no_clip, 1, 0, 20)
    expected = dict(whole.named_parameters())

    def worst(model: nn.Module, comm: Any) -> float:
        train(model, adamw(model), no_clip, 1, 0, 20)
        return max(difference(p, part(expected[name], p)) for name, p in model.named_parameters())

    assert max(on_parts(make(0), plan, worst, 3, **options)) < 1e-8  # AdamW divides small numbers by small numbers


def made_anew(model: nn.Module, how: str) -> nn.Module:
    """The same values in other parameters."""
    state = {name: x.clone() for name, x in model.state_dict().items()}
    if how == "empty":
        model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state, assign=how == "assigned")
    return model


@pytest.mark.parametrize("how", ["assigned", "empty"])
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_parameters_that_are_made_anew_stay_parts(kind: str, how: str) -> None:
    whole = make(0)
    whole.head.weight = nn.Parameter(whole.head.weight.detach().clone())  # ties end where parameters are assigned
    models = [copy.deepcopy(whole) for _ in range(2)]

    def rank(comm: Any) -> list[float]:
        mesh = init_mesh(tp=2, comm=comm)
        plan, options = KINDS[kind]
        model = parallelize(models[comm.rank], plan, mesh["tp"], **options)
        before = {name: part_of(p) for name, p in model.named_parameters()}
        model = made_anew(model, how)
        loss_of(model)[0].backward()
        with pytest.raises(InvalidArgumentError, match="tensor parallel layers"):
            ringcomm.clip_grad_norm_(model.parameters(), 0.1)
        model.zero_grad()
        assert {name: part_of(p) for name, p in model.named_parameters()} == before
        model, sharded = ringcomm.shard(model, adamw(model), 1, mesh=mesh)
        found = train(model, sharded, ringcomm.clip_grad_norm_, 1, 0, 2)
        mesh.close()
        return found

    norms, optimizer = [], adamw(whole)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(whole, seed=step)[0].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)))
        optimizer.step()
    for found in on_ranks(rank, 2):
        assert found == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_sharded_over_a_mesh_with_clipping(kind: str, stage: int) -> None:
    """dp=2 x tp=2: two shares of each batch; norms are of all parameters, each counted once."""
    whole = make(0)
    start = copy.deepcopy(whole)
    optimizer, norms = adamw(whole), []
    for step in range(4):
        optimizer.zero_grad()
        for share in range(2):
            (loss_of(whole, seed=2 * step + share)[0] / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)))
        optimizer.step()
    assert min(norms) > 0.1  # all are clipped
    expected = dict(whole.named_parameters())

    models = [copy.deepcopy(start) for _ in range(4)]

    def rank(comm: Any) -> tuple[list[float], float]:
        mesh = init_mesh(dp=2, tp=2, comm=comm)
        plan, options = KINDS[kind]
        model = parallelize(models[comm.rank], plan, mesh["tp"], **options)
        parts = {name: copy.copy(vars(p)) for name, p in model.named_parameters()}
        shapes = {name: p.shape for name, p in model.named_parameters()}
        model, sharded = ringcomm.shard(model, adamw(model), stage, mesh=mesh)
        found = train(model, sharded, ringcomm.clip_grad_norm_, 2, mesh.coordinates["dp"], 4)
        worst = 0.0
        with ringcomm.whole(model):
            for name, p in model.named_parameters():
                like = torch.empty(shapes[name])
                like._ringcomm_part = parts[name].get("_ringcomm_part")
                own = part(expected[name], like) if like._ringcomm_part is not None else expected[name]
                worst = max(worst, difference(p, own))
        mesh.close()
        return found, worst

    for found, worst in on_ranks(rank, 4):
        assert found == pytest.approx(norms, rel=1e-6)
        assert worst < 1e-8


# ---- what is sent --------------------------------------------------------------------------------------------------


def on_the_wire(traffic: Any, t: int) -> float:
    """Elements that each rank sends: an all_reduce is a reduce_scatter and an all_gather."""
    share = (t - 1) / t
    each = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share}
    return sum(factor * traffic[f"{op} elements"] for op, factor in each.items())


def messages(plan: Plan, options: Any, world_size: int, recompute: bool = False) -> tuple[Any, float]:
    """Of one layer, forward and backward: what three layers send more than two."""

    def step(model: nn.Module, comm: Any) -> Any:
        model.recompute = recompute
        loss_of(model)[0].backward()
        return sent(comm)

    chosen = {("layers.*.down" if name == "layers.0.down" else name): style for name, style in plan.items()}
    chosen.pop("layers.1.down")
    found = []
    for layers in (2, 3):
        everybody = on_parts(make(0, layers=layers, normed=False), chosen, step, world_size, **options)
        assert all(each == everybody[0] for each in everybody)
        found.append(everybody[0])
    found[1].subtract(found[0])
    layer = {key: count for key, count in found[1].items() if count}
    return layer, on_the_wire(found[1], world_size)


SBH = 2 * LENGTH * WIDTH


@pytest.mark.parametrize("t", [2, slow(3), slow(4)])
def test_a_tensor_parallel_layer_sends_four_all_reduces(t: int) -> None:
    """Two in forward, two in backward, of s b h; queries, keys and values share theirs: 8 (t-1)/t s b h on the wire."""
    layer, wire = messages(TENSOR, {}, t)
    assert layer == {"all_reduce calls": 4, "all_reduce elements": 4 * SBH}
    assert wire == pytest.approx(8 * (t - 1) / t * SBH)


@pytest.mark.parametrize("t", [2, 3, slow(4)])
@pytest.mark.parametrize("plan", [SEQUENCE, APART])
def test_a_sequence_parallel_layer_sends_as_much_in_pairs(plan: Plan, t: int) -> None:
    """And sums gradients of what works on parts: weight and bias of two norms, biases of two row parallel layers."""
    layer, wire = messages(plan, {"sequence_dim": 1}, t)
    assert layer == {
        "all_gather calls": 4, "all_gather elements": 4 * SBH,
        "reduce_scatter calls": 4, "reduce_scatter elements": 4 * SBH,
        "all_reduce calls": 6, "all_reduce elements": 6 * WIDTH,
    }  # fmt: skip
    assert wire == pytest.approx(8 * (t - 1) / t * SBH + 2 * (t - 1) / t * 6 * WIDTH)


@pytest.mark.parametrize("t", [2, 3])
def test_overlapped_layers_keep_their_input_cut_and_gather_it_again(t: int) -> None:
    """One all_gather more for the column parallel layer of the MLP; where queries, keys and values each gather for
    themselves, two more in forward, three in backward, and two reduce_scatters more."""
    layer, _ = messages(SEQUENCE, {"sequence_dim": 1, "overlap": True}, t)
    assert (layer["all_gather calls"], layer["reduce_scatter calls"]) == (4 + 1, 4)
    assert layer["all_gather elements"] == 5 * SBH
    layer, _ = messages(APART, {"sequence_dim": 1, "overlap": True}, t)
    assert (layer["all_gather calls"], layer["reduce_scatter calls"]) == (4 + 1 + 2 + 3, 4 + 2)
    assert layer["all_gather elements"] == 10 * SBH
    assert layer["reduce_scatter elements"] == 6 * SBH


def test_checkpointing_repeats_forward_messages() -> None:
    """All but the last one, which backward does not need."""
    layer, _ = messages(TENSOR, {}, 2, recompute=True)
    assert layer == {"all_reduce calls": 5, "all_reduce elements": 5 * SBH}
    layer, _ = messages(SEQUENCE, {"sequence_dim": 1}, 2, recompute=True)
    assert (layer["all_gather calls"], layer["reduce_scatter calls"]) == (4 + 2, 4 + 1)


# ---- what stays -----------------------------------------------------------------------------------------------------


def test_an_embedding_keeps_its_hooks() -> None:
    models = [make() for _ in range(2)]
    seen: list[torch.Size] = []
    handles = [model.token.register_forward_hook(lambda _, args, y: seen.append(y.shape)) for model in models]

    def rank(comm: Any) -> None:
        model = parallelize(models[comm.rank], KINDS["tensor"][0], comm)
        model(tokens())
        handles[comm.rank].remove()
        model(tokens())

    on_ranks(rank, 2)
    assert seen == [(2, LENGTH, WIDTH)] * 2


def test_buffers_of_any_strides_are_those_of_rank_0() -> None:
    models = [make() for _ in range(3)]
    for number, model in enumerate(models):
        base = number + torch.arange(6.0)
        for key, x in {"turned": base.view(2, 3).t(), "wide": base[:3].expand(4, 3), "none": base[:0]}.items():
            model.register_buffer(key, x)

    def rank(comm: Any) -> list[bool]:
        model = parallelize(models[comm.rank], KINDS["tensor"][0], comm)
        wide = torch.arange(3.0).expand(4, 3)
        return [torch.equal(model.turned, torch.arange(6.0).view(2, 3).t()), torch.equal(model.wide, wide)]

    assert on_ranks(rank, 3) == [[True, True]] * 3


def test_the_mode_and_what_is_frozen_stay() -> None:
    models = [make() for _ in range(2)]

    def rank(comm: Any) -> None:
        model = models[comm.rank].eval()
        model.layers[0].down.weight.requires_grad_(False)
        parallelize(model, KINDS["tensor"][0], comm)
        assert isinstance(model.layers[0].down, RowParallelLinear)
        assert not any(each.training for each in model.modules())
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["layers.0.down.weight"]

    on_ranks(rank, 2)


def test_an_optimizer_that_was_made_before_has_the_parts() -> None:
    """Also with a graph of the whole model that is still alive, and for a value of each head."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)
            self.heads = nn.Parameter(torch.arange(3.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer((self.inner(x).unflatten(-1, (-1, 2)) * self.heads.unsqueeze(-1)).flatten(-2))

    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(5, 4, dtype=torch.float64)
    models = [copy.deepcopy(model) for _ in range(4)]
    plan = {"inner": "colwise", "outer": "rowwise", "heads": "colwise"}

    def train(model: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for _ in range(4):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def rank(comm: Any) -> list[float]:
        mine = models[comm.rank]
        mine.inner.weight._no_weight_decay = True
        before = dict(mine.named_parameters())
        optimizer = torch.optim.AdamW(mine.parameters(), lr=0.05)
        kept = mine(x)
        parallelize(mine, plan, comm)
        assert all(p is before[name] for name, p in mine.named_parameters())
        assert mine.inner.weight.shape == (2, 4)
        assert mine.inner.weight._no_weight_decay
        del kept
        return train(mine, optimizer)

    expected = train(models[3], torch.optim.AdamW(models[3].parameters(), lr=0.05))
    for losses in on_ranks(rank, 3):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_a_hook_of_a_parameter_sees_the_sum() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.outer = nn.Linear(8, 12), nn.LayerNorm(4), nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.norm(self.inner(x).unflatten(-1, (-1, 4))).flatten(-2))

    def gradient(model: Any) -> torch.Tensor:
        model(x).square().sum().backward()
        return model.norm.weight.grad

    torch.manual_seed(0)
    x, models = torch.randn(3, 8, dtype=torch.float64), [Normed().double()]
    models += [copy.deepcopy(models[0]) for _ in range(3)]
    for model in models:
        model.norm.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    plan = {"inner": "colwise", "outer": "rowwise", "norm": "summed"}
    expected = gradient(models[3])
    for found in on_ranks(lambda comm: gradient(parallelize(models[comm.rank], plan, comm)), 3):
        assert difference(found, expected) < 1e-12
