"""Plans that `parallelize` matches, and those that it refuses: in one sentence, before anything is changed or hangs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.errors import InvalidArgumentError, MismatchError, ShapeError, UnsupportedError
from ringcomm.modules.arguments import matches
from ringcomm.tensor_parallel.group import f
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import STYLES, Colwise, Dropout, Heads, Latent, Vocab
from tests.support.mesh.tensor_cases import on_parts, on_ranks
from tests.support.seeded import seeded
from tests.tensor_parallel.test_plan import GPT, KINDS, NORMED, SEQUENCE, TENSOR, Plan, make, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("*.wq", "layers.0.attention.wq", True), ("*.wq", "a.wq", True), ("*.wq", "wq", False),
        ("*.wq", "layers.0.wq2", False), ("layers.*.up", "layers.0.up", True), ("layers.*.up", "layers.0.a.up", False),
        ("layers.?.up", "layers.10.up", False), ("head", "head", True), ("head", "a.head", False), ("*", "head", True),
        ("*", "a.head", False), ("*.mlp.0", "a.b.mlp.0", True), ("layers.[01].*", "layers.1.up", True),
    ],
)  # fmt: skip
def test_patterns(pattern: str, name: str, matched: bool) -> None:
    assert matches(pattern, name) is matched


class Torch(nn.Module):
    """What computes with the weights of its layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.encoder = nn.MultiheadAttention(12, 6), nn.TransformerEncoderLayer(12, 6, 24)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bag, self.bounded = nn.Conv1d(6, 6, 1), nn.EmbeddingBag(6, 6), nn.Embedding(6, 6, max_norm=1.0)
        self.mine, self.scaled, self.hooked = Mine(6, 6), Scaled(6, 6), nn.Linear(6, 6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.drop, self.alpha, self.seen = Fewer(0.1), nn.AlphaDropout(0.1), nn.Dropout(0.1)
        self.hooked.register_forward_hook(lambda module, args, y: y * 2)
        self.seen.register_forward_hook(lambda module, args, y: y * 2)
        self.empty, self.dictionary, self.linear = (
            nn.ModuleList(),
            nn.ModuleDict({"a": nn.Linear(6, 6)}),
            nn.Linear(6, 6),
        )


class Mine(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Scaled(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Fewer(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def dropping() -> nn.Module:
    model = make()
    model.layers[1].drop.p = 0.1
    return model


def without(plan: Plan, *names: str) -> Plan:
    return {name: style for name, style in plan.items() if name not in names}


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.linear = 5, nn.Linear(6, 6)


class Gated(nn.Module):
    """With an output for each of three heads, and a norm of a head's width."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.gate, self.out, self.norm = nn.Linear(12, 3), nn.Linear(12, 12), nn.LayerNorm(4)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Gated()
        self.attention.num_heads = 3


class Vector(Gated):
    """Whose norm is a value for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.sink = nn.Identity(), nn.Parameter(torch.ones(3))


def raised(kind: Callable[[], nn.Module], plan: Plan, **options: Any) -> set[str]:
    models = [kind() for _ in range(3)]

    def rank(comm: Any) -> str:
        try:
            parallelize(models[comm.rank], plan, comm, **options)
        except InvalidArgumentError as error:
            return str(error).replace(f"rank {comm.rank}", "rank")
        return ""

    return {*on_ranks(rank, 3)}


class MultiQuery(nn.Module):
    """Attention with one key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 12)


def test_the_only_key_of_all_heads() -> None:
    """With "summed", the gradient of its input would be a part of a sum."""
    plan: Plan = {"query": "colwise", "out": "rowwise"}
    advice = "pass Latent(n) of ringcomm.tensor_parallel for key if ranks use its last n outputs, of 4, on their own"
    (missing,) = raised(MultiQuery, plan)
    assert (
        f"got no style for key.bias of shape (4,), which lies beside layers that are cut, expected one; {advice}"
        in (missing)
    )
    (summed,) = raised(MultiQuery, {**plan, "key": "summed"})
    assert "'summed' for key, which has as many inputs as query, that is cut along its outputs" in summed
    assert advice in summed
    assert raised(MultiQuery, {**plan, "key": Latent(4)}) == {""}


def test_a_sum_that_looks_forgotten() -> None:
    """A norm of heads, whose gradient would be wrong; not one as wide as the input, nor what the plan names."""
    plan: Plan = {"gate": "colwise", "out": "rowwise"}
    assert raised(Gated, plan) == {
        "parallelize: rank got no style for norm.weight of shape (4,), which lies beside layers that are cut, "
        "expected one; pass 'summed' for norm if ranks use it on their own heads or features, else 'replicate'"
    }
    assert raised(Gated, {**plan, "norm": "summed"}) == {""}
    divided: Plan = {"*.gate": "colwise", "*.out": "rowwise", "attention": "heads"}  # says nothing about the norm
    (missing,) = raised(Headed, divided)
    assert "got no style for attention.norm.weight of shape (4,)" in missing
    assert raised(Headed, {**divided, "*.norm": "summed"}) == {""}
    assert raised(Gated, {**plan, "norm": "replicate"}) == {""}
    assert raised(Gated, {"gate": "colwise"}) == {""}
    (said,) = raised(Vector, plan)
    assert said.startswith("parallelize: rank got no style for sink of shape (3,)")
    assert said.endswith("pass 'colwise' for it if it has a value for each head, else leave out gate, out")
    assert raised(Vector, {**plan, "sink": "colwise"}) == {""}
    assert raised(lambda: make(normed=False), TENSOR) == {""}
    (said,) = raised(make, TENSOR)
    assert "layers.0.attention.q_norm.weight" in said


class Block(nn.Module):
    """A block with a parameter of its own beside layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.up(self.norm(x)).relu())


def test_gradients_of_different_shards_are_not_summed() -> None:
    plan: Plan = {"*.up": "colwise", "*.down": "rowwise"}
    region: Plan = {**plan, "0": "sequence_region", "*.norm": "sequence"}
    for style, given in {"summed": plan, "sequence": region}.items():
        (said,) = raised(lambda: nn.Sequential(nn.Sequential(Block())), {**given, "0.0": style}, sequence_dim=1)
        assert f"got {style} for 0.0, which contains 0.0.up, that is cut" in said
    (said,) = raised(lambda: nn.Sequential(nn.Sequential(Block())), region, sequence_dim=1)
    assert "got no style for 0.0, which has parameters" in said
    assert said.endswith("put its own parameters into a module, and add that as 'sequence'")


def test_a_module_that_is_used_inside_and_outside_of_a_region() -> None:
    def shared() -> nn.Module:
        norm = nn.LayerNorm(12)
        return nn.ModuleDict({"blocks": nn.Sequential(norm, nn.Linear(12, 12)), "final": norm})

    plan: Plan = {"blocks": "sequence_region", "blocks.0": "sequence", "blocks.1": "replicate"}
    (said,) = raised(shared, plan, sequence_dim=1)
    assert "got 'sequence' for blocks.0, which is also final, outside of blocks" in said


def test_trained_inputs_beside_the_sequence_of_a_region() -> None:
    """An encoder's output is not split, so its gradient would be wrong."""

    def rank(comm: Any) -> None:
        model = nn.Sequential(Block())
        del model[0].scale
        model[0].scale = 1.0
        plan: Plan = {"0": "sequence_region", "0.up": "colwise", "0.down": "rowwise", "0.norm": "sequence"}
        block = parallelize(model, plan, comm, sequence_dim=1)[0]
        x, memory = torch.ones(1, 4, 12), torch.ones(1, 3, 12, requires_grad=True)
        block(x, memory.detach())
        with torch.no_grad():
            block(x, memory)
        with pytest.raises(UnsupportedError, match=r"an input of shape \(1, 3, 12\) that requires a gradient beside"):
            block(x, memory)

    on_ranks(rank, 2)


class Layers(nn.Module):
    """Calls blocks of a region in a given order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order, self.checkpoints = [0, 1, 2], False
        for each in self.blocks:
            del each.scale
            each.scale = 1.0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = checkpoint(self.blocks[i], x, use_reentrant=False) if self.checkpoints else self.blocks[i](x)
        return x


REGION: Plan = {"*.blocks": "sequence_region", "*.norm": "sequence", "*.up": "colwise", "*.down": "rowwise"}


def test_the_order_of_a_region() -> None:
    """Modules between the first and the last one may be left out, called twice or computed again in backward."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Layers()), torch.linspace(-1, 1, 48).view(1, 4, 12)

    def rank(comm: Any) -> None:
        mine = copy.deepcopy(model)
        cut = copy.deepcopy(parallelize(copy.deepcopy(model), REGION, comm, sequence_dim=1))
        for order in ([0, 1, 2], [0, 2], [0, 1, 1, 2], [0, 1, 2, 0, 1, 2]):
            mine[0].order = cut[0].order = order
            assert torch.allclose(cut(x), mine(x), atol=1e-6)
        for order, said in {
            (1, 0, 2): "a call of module 1 of the region, a Block, before the first one",
            (1, 2): "a call of module 1 of the region, a Block, before the first one",
            (0, 1): "the end of Layers without a call of the region's last module",
            (0, 2, 1): "a call of module 1 of the region, a Block, after the last one",
        }.items():
            cut[0].order = order
            with pytest.raises(UnsupportedError, match=said):
                cut(x)
        mine[0].order, cut[0].order, cut[0].checkpoints = [0, 1, 2], [0, 1, 2], True
        cut(x).sum().backward()
        mine(x).sum().backward()
        assert torch.allclose(cut[0].blocks[1].norm.weight.grad, mine[0].blocks[1].norm.weight.grad, atol=1e-5)

    on_ranks(rank, 2)


def test_one_tensor_as_both_inputs_of_a_region() -> None:
    def rank(comm: Any) -> None:
        block = parallelize(nn.Sequential(Layers()), REGION, comm, sequence_dim=1)[0].blocks[0]
        with pytest.raises(UnsupportedError, match="requires a gradient beside the sequence"):
            block(*[torch.ones(1, 4, 12, requires_grad=True)] * 2)

    on_ranks(rank, 2)


def test_a_parameter_that_a_layer_shards_may_be_named_too() -> None:
    """As in BERT, whose head has the bias of its decoder."""

    def rank(comm: Any) -> None:
        model = nn.Sequential(nn.ModuleDict({"decoder": seeded(nn.Linear(12, 6))}))
        model[0].bias = model[0]["decoder"].bias
        plan: Plan = {"0.decoder": "colwise_gather_output", "0.bias": "colwise"}
        expected = model[0]["decoder"](torch.ones(2, 12))
        model = parallelize(model, plan, comm)
        assert model[0].bias is model[0]["decoder"].bias
        assert model[0].bias.shape == (3,)
        assert torch.allclose(model[0]["decoder"](torch.ones(2, 12)), expected)

    on_ranks(rank, 2)


class Counting(nn.Module):
    """Which computes with the number of its heads, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.count = nn.Linear(6, 6), nn.Linear(6, 6), 3

    def forward(self, x: torch.Tensor, counts: bool) -> torch.Tensor:
        y = self.inner(x)
        return self.outer(y.view(-1, self.count, 2).flatten(1) if counts else y)


def test_a_module_that_computes_with_numbers_of_the_whole_model() -> None:
    """Says so in the first forward pass that ends; later errors are the module's own."""
    models = [nn.Sequential() for _ in range(3)]
    for model in models:
        model.unit = Counting()
        model.forward = model.unit.forward

    def rank(comm: Any) -> str:
        model = parallelize(models[comm.rank], {"unit.inner": "colwise", "unit.outer": "rowwise"}, comm)
        x = torch.ones(2, 6)
        with pytest.raises(InvalidArgumentError) as found:
            model(x, True)
        with pytest.raises(TypeError):  # not in a module that is cut
            model()
        model(x, False)
        with pytest.raises(RuntimeError, match="shape"):
            model(x, True)
        assert model.forward == model.unit.forward
        return str(found.value).replace(f"rank {comm.rank}", "rank")

    (said,) = {*on_ranks(rank, 3)}
    assert said.startswith(
        "parallelize: rank got RuntimeError (shape '[-1, 3, 2]' is invalid for input of size 4) in the"
    )
    assert "forward pass of unit, a Counting whose unit.inner is cut, expected a module that works with a rank" in said


class Functional(nn.Module):
    """Multiplies with the weight of its embedding, as on one rank (0), or as one of several (1)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(9, 6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, tokens: torch.Tensor, how: int, comm: Any) -> torch.Tensor:
        x = self.down(self.up(self.embed(tokens)))
        x = f(x, comm) if how == 1 else x
        return F.linear(x, self.embed.weight) if how else x @ self.embed.weight.T


def test_a_product_with_the_weight_of_a_cut_embedding() -> None:
    """Is refused in the first forward pass with gradients, but of code that knows of ranks."""

    def check(model: nn.Module, comm: Any) -> None:
        tokens = torch.arange(9)
        with torch.no_grad():
            assert model(tokens, 1, comm).shape == (9, 3)
        for how, name in ((0, "matmul"), (2, "linear")):
            with pytest.raises(InvalidArgumentError, match=f"rank {comm.rank} got {name} with the weight of embed, an"):
                model(tokens, how, comm)
        assert model(tokens, 1, comm).shape == (9, 3)

    on_parts(Functional(), {"embed": "vocab", "up": "colwise", "down": "rowwise"}, check, 3)


def watched(register: str) -> nn.Module:
    model = make()
    getattr(model.layers[1].attention.wq.weight, register)(lambda x: None)
    return model


REFUSED: list[tuple[Callable[[], nn.Module], Any, Any, type[Exception], str]] = [
    (make, {"*.wq": "column"}, {}, InvalidArgumentError, r"the style 'column' for '\*\.wq', expected one of colwise, "),
    (make, {"*.wq": 5}, {}, InvalidArgumentError, "the style 5 for"),
    (make, {"*.wq": "grouped_gemm"}, {}, UnsupportedError, "the style 'grouped_gemm' of transformers for"),
    (make, {"*.wq": "experts"}, {}, UnsupportedError,
     r"got layers.0.attention.wq, a Linear with weight of \(96, 96\), .*, expected gate_up_proj of \(experts, 2 x"),
    (make, {"*.query": "colwise"}, {}, InvalidArgumentError, r"'\*\.query', which no module matches, expected names"),
    (make, {"*.wq": "colwise", "*.w?": "colwise"}, {}, InvalidArgumentError,
     r"layers\.0\.attention\.wq, which both '\*\.wq' and '\*\.w\?' match, expected one style"),
    (lambda: make(heads=8), {"*.wk": "colwise"}, {}, InvalidArgumentError,
     r"48 outputs of layers\.0\.attention\.wk \(4 heads of 12\), expected 3 equal parts of whole heads; use a number"),
    (lambda: GPT(1, 40, 5, 12), {"blocks.*": "heads"}, {}, InvalidArgumentError,
     r"got blocks\.0\.heads = 5, expected a multiple of the 3 ranks"),
    (lambda: GPT(1, 40, 5, 12), {"*.mlp.0": "colwise"}, {}, InvalidArgumentError,
     r"160 outputs of blocks\.0\.mlp\.0, expected 3 equal parts; use a number"),
    (lambda: GPT(1, 40, 5, 12), {"*.proj": "rowwise"}, {}, InvalidArgumentError, r"40 inputs of blocks\.0\.proj, exp"),
    (lambda: GPT(1, 48, 6, 12), {"*.qkv": Colwise(parts=5)}, {}, InvalidArgumentError, r"parts=\[28, 28, 28, 28, 28\]"),
    (lambda: GPT(1, 48, 6, 12), {"norm": "heads"}, {}, InvalidArgumentError, "got norm as heads, of class LayerNorm"),
    (lambda: GPT(1, 48, 6, 12), {"norm": Heads(("eps",))}, {}, InvalidArgumentError, r"got norm\.eps = 1e-05, exp"),
    (Counted, {"linear": "colwise"}, {}, None, ""),
    (Gated, {"gate": "colwise", "out": "rowwise"}, {}, InvalidArgumentError, r"norm\.weight .*, which lies"),
    (make, {"token": "vocab"}, {}, InvalidArgumentError, r"got head\.weight unsharded, tied to token\.weight, which"),
    (make, {"head": "colwise_rep"}, {}, InvalidArgumentError, r"got token\.weight unsharded, tied to head\.weight"),
    (lambda: GPT(1, 48, 6, 12), {"token": "vocab", "head": "rowwise"}, {}, InvalidArgumentError,
     "tied to token.weight but cut differently, expected the same cut; pass pad=True"),
    (make, {"norm": "colwise"}, {}, UnsupportedError, "LayerNorm, expected a plain Linear; leave it out of the plan$"),
    (make, {"head": "vocab", "token": "vocab"}, {}, UnsupportedError, "got head, a Linear, expected a plain Embedding"),
    (make, {"norm": Dropout(1)}, {}, UnsupportedError, "got norm, a LayerNorm, expected a plain Dropout; l"),
    (Odd, {"conv": "colwise"}, {}, UnsupportedError, "got conv, a Conv1d, expected a plain Linear"),
    (Odd, {"bag": "vocab"}, {}, UnsupportedError, "got bag, a EmbeddingBag, expected a plain Embedding"),
    (Odd, {"bounded": "vocab"}, {}, UnsupportedError, "got bounded, an embedding with max_norm, expected one without"),
    (Odd, {"mine": "colwise"}, {}, UnsupportedError, "got mine, a Mine with a forward pass of its own"),
    (Odd, {"scaled": "vocab"}, {}, UnsupportedError, "got scaled, a Scaled with a forward pass of its own"),
    (Odd, {"hooked": "rowwise"}, {}, UnsupportedError, "a Linear with hooks, expected a plain Linear; .* afterwards$"),
    (lambda: watched("register_hook"), {"*.wq": "colwise"}, {}, UnsupportedError,
     "got layers.1.attention.wq.weight, a parameter with hooks, which would see only a part of its gradient, ex"),
    (lambda: watched("register_post_accumulate_grad_hook"), {"*.wq": "rowwise"}, {}, UnsupportedError,
     "got layers.1.attention.wq.weight, a parameter with hooks"),
    (lambda: watched("register_hook"), {"*.wk": "replicate", "*.up": "colwise"}, {}, None, ""),
    (Odd, {"normed": "rowwise"}, {}, UnsupportedError, "got normed, a parametrized ParametrizedLinear"),
    (Odd, {"empty": "sequence_region"}, {"sequence_dim": 1}, InvalidArgumentError, "for empty, an empty ModuleList"),
    (Odd, {"dictionary": "sequence_region"}, {"sequence_dim": 1}, InvalidArgumentError, "for dictionary, a Modu"),
    (lambda: nn.Sequential(nn.ModuleList([nn.Linear(6, 6)] * 2)), {"0": "sequence_region"}, {"sequence_dim": 1},
     InvalidArgumentError, "for 0, a ModuleList that has a module twice, expected each mod"),
    (Torch, {"attention": "heads"}, {}, UnsupportedError, "got attention, of torch's MultiheadAttention, which"),
    (Torch, {"attention.out_proj": "rowwise"}, {}, UnsupportedError, "got attention.out_proj, of torch's Mult"),
    (Torch, {"encoder.linear1": "colwise"}, {}, UnsupportedError, "encoder.linear1, of torch's TransformerEnc"),
    (make, {"layers": "sequence_region"}, {}, InvalidArgumentError, "sequence_region for layers without a seq"),
    (make, {"*.norm1": "sequence"}, {}, InvalidArgumentError, "sequence for layers.0.norm1 without a"),
    (make, {"token": Vocab(scatter=True)}, {}, InvalidArgumentError, "Vocab for token without a sequence_dim"),
    (make, {"*.wq": "colwise"}, {"overlap": True}, InvalidArgumentError, "overlap=True without a sequence_d"),
    (make, {"layers": "sequence_region", "norm": "sequence"}, {"sequence_dim": 1}, InvalidArgumentError,
     "sequence for norm outside of layers, expected it in a sequence region"),
    (make, {"layers": "sequence_region", "*.attention": "sequence_region"}, {"sequence_dim": 1}, InvalidArgumentError,
     "sequence_region for layers.0.attention inside another region"),
    (make, {"layers": "sequence_region", "token": Vocab(scatter=True)}, {"sequence_dim": 1}, InvalidArgumentError,
     "Vocab for token with scatter=True and a sequence region, expected one"),
    (Odd, {"drop": "sequence"}, {"sequence_dim": 1}, UnsupportedError, "got drop, a Fewer with a forward pass of its"),
    (Odd, {"seen": "sequence"}, {"sequence_dim": 1}, UnsupportedError, "got seen, a Dropout with hooks, expected a p"),
    (Odd, {"alpha": "sequence"}, {"sequence_dim": 1}, UnsupportedError, "got alpha, a AlphaDropout, expected a plain"),
    (make, without(SEQUENCE, "layers.*.norm?"), {"sequence_dim": 1}, InvalidArgumentError,
     r"got no style for layers\.0\.norm1, which has parameters, in the sequence region layers, expected one; add it"),
    (make, {**without(SEQUENCE, "layers.1.down"), **NORMED}, {"sequence_dim": 1}, InvalidArgumentError,
     r"for layers\.1\.down, w"),
    (dropping, {**without(SEQUENCE, "*.drop"), **NORMED}, {"sequence_dim": 1}, InvalidArgumentError,
     r"got no style for layers\.1\.drop, which drops, in the sequence region layers, expected one; add it as"),
    (lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.1)))),
     {"0": "sequence_region", "0.0": "sequence"}, {"sequence_dim": 1}, InvalidArgumentError,
     r"got no style for 0\.0\.1, which drops"),
    (lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), nn.Dropout(0.0))),
     {"0": "sequence_region", "0.0": "sequence"}, {"sequence_dim": 1}, None, ""),
    (dropping, {**without(SEQUENCE, "layers.*.norm?", "*.drop"), "layers.*.norm?": "replicate", "*.drop": "replicate",
     **NORMED}, {"sequence_dim": 1}, None, ""),
    (make, SEQUENCE, {"sequence_dim": 1}, InvalidArgumentError,
     r"parameter layers\.0\.attention\.q_norm\.weight inside a module that is 'gather_sequence', where each rank comp"),
    (make, {**SEQUENCE, "*.q_norm": "replicate"}, {"sequence_dim": 1}, InvalidArgumentError,
     r"pass 'summed' for layers\.0\.attention\.q_norm"),
    (make, None, {}, InvalidArgumentError, "got no plan and a Model without one, expected styles by the names"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda i: str(REFUSED[i][1])[:40])
def test_refusals_come_before_the_module_is_changed(number: int) -> None:
    kind, plan, options, error, sentence = REFUSED[number]
    if error is None:  # a plan that can be followed: the others fail for what they say
        on_ranks(lambda comm: parallelize(kind(), plan, comm, **options), 3)
        return
    models = [kind() for _ in range(3)]
    for seed, model in enumerate(models):
        for p in model.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(seed))

    def state(model: nn.Module) -> Any:
        values = [(name, id(p), p.clone()) for name, p in model.named_parameters(remove_duplicate=False)]
        hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
        return values, hooks, [(name, id(each)) for name, each in model.named_modules(remove_duplicate=False)]

    def rank(comm: Any) -> str:
        model = models[comm.rank]
        before = state(model)
        with pytest.raises(error, match=sentence) as found:
            parallelize(model, plan, comm, **options)
        after = state(model)
        assert before[1:] == after[1:]
        assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(before[0], after[0], strict=True))
        return str(found.value)

    for number, said in enumerate(on_ranks(rank, 3)):
        assert said.startswith(f"parallelize: rank {number} got ")
        assert "\n" not in said
        assert ", expected " in said
        assert "; " in said


@pytest.mark.parametrize("stage", range(4))
def test_a_wrapped_module_is_refused(stage: int) -> None:
    def rank(comm: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        ringcomm.shard(model, None, stage, comm)
        with pytest.raises(InvalidArgumentError, match="a module that ringcomm has wrapped, expected a plain one"):
            parallelize(model, {"0": "colwise", "1": "rowwise"}, comm)
        assert [type(each) for each in model.modules()][1:] == [nn.Linear, nn.Linear]

    on_ranks(rank, 2)


def test_ranks_of_which_one_has_no_values_are_told() -> None:
    """On meta on rank 1 alone."""
    models = [make(dtype=torch.float32) for _ in range(2)]
    models[1].to("meta")

    def rank(comm: Any) -> None:
        with pytest.raises(MismatchError, match=f"but rank {1 - comm.rank} got another module, plan or options"):
            parallelize(models[comm.rank], {"*.wq": "colwise"}, comm)

    on_ranks(rank, 2)


def test_ranks_that_ask_for_different_things_are_told_at_once() -> None:
    good, wrong = {"*.wq": "colwise"}, {"*.query": "colwise"}

    def rank(comm: Any, model: nn.Module, plan: Plan) -> str:
        with pytest.raises((MismatchError, InvalidArgumentError)) as found:
            parallelize(model, plan, comm)
        return str(found.value)

    refused = on_ranks(lambda comm: rank(comm, make(), wrong if comm.rank == 1 else good), 3)
    assert "which no module matches" in refused[1]
    for number in (0, 2):
        assert f"rank {number} got a valid plan, but rank 1 refused its plan, expected the s" in refused[number]
    other = on_ranks(lambda comm: rank(comm, make(layers=1 + comm.rank // 2), good), 3)
    assert "rank 0 got a valid plan, but rank 2 got another module, plan or options" in other[0]
    assert "rank 2 got a valid plan, but rank 0 got another module" in other[2]


def test_a_sequence_that_does_not_divide() -> None:
    def check(model: nn.Module, comm: Any) -> None:
        with pytest.raises(ShapeError, match=r"got shape \(2, 11, 96\), expected 3 equal parts along dimension 1; pad"):
            model(tokens()[:, :11])
        model(tokens())

    on_parts(make(), KINDS["sequence"][0], check, 3, sequence_dim=1)


def test_every_style_has_a_name() -> None:
    assert {type(style).__name__ for style in STYLES.values()} == {
        "Colwise", "Rowwise", "Vocab", "Heads", "ModuleStyle",
        "Experts", "Latent",
    }  # fmt: skip
