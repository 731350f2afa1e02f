"""Layers with fused outputs, cut as their module parts them and otherwise: real models of transformers, which compute
the same over the ranks or say so in their first forward pass."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ringcomm.errors import InvalidArgumentError
from ringcomm.tensor_parallel.group import f
from ringcomm.tensor_parallel.outputs import OutputSharding
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import Colwise
from tests.support.mesh.tensor_cases import on_parts, on_ranks, unlike
from tests.tensor_parallel.test_transformers import VOCABULARY, check, gpt2, run, spread

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install transformers"
    ),
]
Plan = dict[str, Any]


def built(kind: str, **options: Any) -> nn.Module:
    import transformers

    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**common, **options})
    return spread(getattr(transformers, f"{kind}ForCausalLM")(config))


SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 32}
CODE = {"n_embd": 48, "n_layer": 1, "n_head": 12, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
NEOX: Plan = {
    "*.query_key_value": "colwise", "*.attention.dense": "rowwise", "*.dense_h_to_4h": "colwise",
    "*.dense_4h_to_h": "rowwise",
}  # fmt: skip
FALCON = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12, "parallel_attn": True, "alibi": False,
    "bias": True,
}  # fmt: skip
FALCON_PLAN: Plan = {
    "*.query_key_value": "colwise", "*.self_attention": "heads", "*.self_attention.dense": "rowwise",
    "*.dense_h_to_4h": "colwise", "*.dense_4h_to_h": "rowwise",
}  # fmt: skip
MLP: Plan = {"*.gate_up_proj": "packed_colwise", "*.down_proj": "rowwise"}
CONV: Plan = {"*.c_attn": Colwise(parts=3), "*.attn": "heads", "*.attn.c_proj": "rowwise"}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "neox": lambda: built("GPTNeoX", num_attention_heads=12, **SMALL),
    "phi3": lambda: built("Phi3", num_attention_heads=12, num_key_value_heads=4, **SMALL),
    "falcon": lambda: built("Falcon", **FALCON, new_decoder_architecture=True, num_kv_heads=4),
    "falcon, old": lambda: built("Falcon", **FALCON, new_decoder_architecture=False, multi_query=False),
    "gpt2": lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "bigcode": lambda: built("GPTBigCode", multi_query=False, **CODE),
}
WORKS: list[tuple[str, Plan | None]] = [
    ("neox", None),  # heads, and queries, keys and values of each
    ("phi3", None),
    ("phi3", MLP),
    ("falcon", FALCON_PLAN),  # groups of heads, each with a key and a value
    ("falcon, old", FALCON_PLAN),
    ("gpt2", CONV),
    ("bigcode", {**CONV, "*.c_attn": "colwise"}),
]
REFUSED: list[tuple[str, Plan, str]] = [
    ("neox", {**NEOX, "*.query_key_value": Colwise(parts=3)},
     r"query_key_value, whose 144 outputs are cut as parts, here of \[24, 24, 24\], but view splits .* by heads"),
    ("phi3", {**MLP, "*.gate_up_proj": "colwise"},
     r"gate_up_proj, whose 192 outputs are cut as one, here of 96, but chunk splits the outputs at 48, expected"),
    ("falcon", {**FALCON_PLAN, "*.query_key_value": Colwise(parts=(48, 16, 16))},
     r"query_key_value, whose 80 outputs are cut as parts, here of \[24, 8, 8\], but view splits the outputs by heads"),
    ("falcon, old", {**FALCON_PLAN, "*.query_key_value": Colwise(parts=3)}, r"query_key_value, .* by heads"),
    ("phi3", {"*.qkv_proj": "colwise", "*.o_proj": "rowwise"}, r"qkv_proj, .* but getitem splits the outputs at 48"),
    ("phi3", {"*.qkv_proj": Colwise(parts=(48, 16, 16)), "*.o_proj": "rowwise"},
     r"qkv_proj, .* as parts, here of \[24, 8, 8\], but getitem splits the outputs at 48, expected the ends of the ra"),
    ("gpt2", {**CONV, "*.c_attn": "colwise"}, r"c_attn, .* but split splits the outputs at 16, .*parts=\.\.\."),
    ("bigcode", CONV, r"c_attn, .* but view splits the outputs by heads, and each head into its fused parts"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "plan"), WORKS, ids=lambda each: each if isinstance(each, str) else "")
def test_cut_as_the_module_parts_them(kind: str, plan: Plan | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no advice where nothing is wrong
        check(MODELS[kind](), plan, 2, True)


@pytest.mark.parametrize(("kind", "plan", "sentence"), REFUSED, ids=lambda each: str(each)[:12])
def test_cut_otherwise(kind: str, plan: Plan, sentence: str) -> None:
    def error(model: nn.Module, comm: Any) -> str:
        with pytest.raises(InvalidArgumentError, match=sentence) as found:
            run(model)
        return str(found.value)

    for number, said in enumerate(on_parts(MODELS[kind](), plan, error)):
        assert said.startswith(f"parallelize: rank {number} got ")
        assert "\n" not in said


# ---- what is made of outputs -----------------------------------------------------------------------------------------

X = torch.arange(24.0).view(2, 12)
ONE, PARTS = (12,), (4, 4, 4)
ZEROS = torch.zeros(2, dtype=torch.int64)
USES: list[tuple[tuple[int, ...], Callable[[torch.Tensor], Any], str | None]] = [
    (ONE, lambda y: y.unflatten(-1, (-1, 4)).chunk(2, -1), None),
    (ONE, lambda y: y.view(2, 2, 6).split(2, -1), None),
    (ONE, lambda y: y.view(2, 2, 3, 2).unbind(2), None),
    (ONE, lambda y: y.view(2, 3, 4), None),  # three heads
    (ONE, lambda y: y.view(2, -1, 12)[..., :6], None),  # one
    (ONE, lambda y: y.view(2, 3, 3, -1) if y.shape[-1] == 36 else y, None),
    (ONE, lambda y: y[:1], None),
    (ONE, lambda y: y[..., : y.shape[-1]], None),
    (ONE, lambda y: y[..., :12], None),
    (ONE, lambda y: y[..., 12:], "getitem splits the outputs at 12"),
    (ONE, lambda y: y[..., -12:], "getitem splits the outputs at -12"),
    (ONE, lambda y: y[:, 0], "getitem takes single outputs"),
    (ONE, lambda y: y[0][0], "getitem takes single outputs"),
    (ONE, lambda y: y.select(-1, 0), "select takes single outputs"),
    (ONE, lambda y: y.narrow(1, 0, 12), None),
    (ONE, lambda y: y.narrow(1, 0, 11), "narrow splits the outputs at 11"),
    (ONE, lambda y: y.split(11, 1)[0], "split splits the outputs at 11"),
    (ONE, lambda y: y[..., ::5], "getitem splits the outputs in steps of 5"),
    (ONE, lambda y: y[y > 3], "getitem takes single outputs"),
    (ONE, lambda y: (2 * y).sum(), "sum needs all of them"),
    (ONE, lambda y: (torch.ones(12) * y).sum(), "sum needs all of them"),
    (ONE, lambda y: F.mse_loss(torch.ones(2, 12), y), "mse_loss needs all of them"),
    (ONE, lambda y: F.pad(y, (1, -1)), "pad moves them"),
    (ONE, lambda y: F.pad(y, (0, 0, 1, 0)).softmax(-1), "softmax needs all of them"),
    (ONE, lambda y: y.repeat(1, 2), "repeat moves them"),
    (ONE, lambda y: y.flatten(), "flatten moves them"),
    (ONE, lambda y: y.repeat(2, 1) + y.isnan().any(), None),
    (ONE, lambda y: y[..., ::2] * y[..., 1::2], None),  # interleaved
    (ONE, lambda y: y.chunk(2, 0), None),
    (ONE, lambda y: torch.nn.functional.linear(y, torch.ones(12, 12)).chunk(3, -1), None),
    (ONE, lambda y: y.softmax(0) + y.mean(dim=0, keepdim=True) + y.sum((0,)) + torch.max(y, y * 2) + y.flip(0), None),
    (ONE, lambda y: y.roll(1, 0) + y.cummax(0)[0] + torch.fft.fft(y, dim=0).real + y.median(0)[0], None),
    (ONE, lambda y: y.unflatten(-1, (-1, 4)).softmax(-1), None),  # of heads
    (ONE, lambda y: torch.nn.functional.normalize(y) if y.dim() > 2 else y.norm(2, 0), None),
    (ONE, lambda y: torch.relu(y).softmax(dim=-1), "softmax needs all of them"),
    (ONE, lambda y: y.pow(2).mean(-1, keepdim=True), "mean needs all of them"),
    (ONE, lambda y: y.std(False), "std needs all of them"),
    (ONE, lambda y: y.sum((0, 1)), "sum needs all of them"),
    (ONE, lambda y: y.max(1), "max needs all of them"),
    (ONE, lambda y: torch.linalg.vector_norm(y, dim=-1), "vector_norm needs all of them"),
    (ONE, lambda y: y.norm(), "norm needs all of them"),
    (ONE, lambda y: torch.nn.functional.normalize(y), "normalize needs all of them"),
    (ONE, lambda y: y.topk(2), "topk needs all of them"),
    (ONE, lambda y: torch.nn.functional.group_norm(y, 1), "group_norm needs all of them"),
    (ONE, lambda y: torch.nn.functional.cosine_similarity(y, y * 2, dim=-1), "cosine_similarity needs all of them"),
    (ONE, lambda y: torch.nn.functional.adaptive_avg_pool1d(y, 1), "adaptive_avg_pool1d needs all of them"),
    (ONE, lambda y: y.roll(1, -1), "roll needs all of them"),
    (ONE, lambda y: torch.fft.rfft(y), "fft_rfft needs all of them"),
    (ONE, lambda y: torch.linalg.vecdot(y, y), "vecdot needs all of them"),
    (ONE, lambda y: torch.cdist(y, y), "cdist needs all of them"),
    (ONE, lambda y: y.median(-1), "median needs all of them"),
    (ONE, lambda y: y.quantile(0.5), "quantile needs all of them"),
    (ONE, lambda y: torch.nn.functional.layer_norm(y, (12,)), "layer_norm needs all of them"),
    (ONE, lambda y: torch.nn.functional.cross_entropy(y, torch.zeros(2).long()), "cross_entropy needs all of them"),
    (ONE, lambda y: F.cross_entropy(y[None].flatten(0, 1), ZEROS), "cross_entropy needs all of them"),
    (ONE, lambda y: F.cross_entropy(y[None][:, :-1].flatten(0, 1), ZEROS[1:]), "cross_entropy needs all of"),
    (ONE, lambda y: F.cross_entropy(y[None].transpose(1, 2), ZEROS[None]), "cross_entropy needs all of them"),
    (ONE, lambda y: y[None][:, -1].softmax(-1), "softmax needs all of them"),
    (ONE, lambda y: y.unsqueeze(0).mT.exp().logsumexp(1), "logsumexp needs all of them"),
    (ONE, lambda y: y.t().softmax(0), "softmax needs all of them"),
    (ONE, lambda y: y.t().softmax(1) + y.mT.mean(1, True), None),
    (ONE, lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(2, 12)), "binary_cross_entropy_with_logits needs"),
    (ONE, lambda y: F.mse_loss(y, torch.ones(2, 12)), "mse_loss needs all of them"),
    (ONE, lambda y: F.mse_loss(y, torch.ones(2, 12), reduction="none"), None),
    (ONE, lambda y: y.gather(-1, ZEROS[:, None]), "gather needs all of them"),
    (ONE, lambda y: y.unbind(-1), "unbind needs all of them"),
    (ONE, lambda y: y.unbind(), None),
    (ONE, lambda y: torch.cat([y, y]), None),
    (ONE, lambda y: torch.cat([y.view(2, 3, 4), y.view(2, 3, 4)], -1), None),  # within heads
    (ONE, lambda y: torch.cat([torch.ones(2, 1), y], -1), "cat joins others to them"),
    (ONE, lambda y: torch.concat(tensors=[y * 2, y], dim=1), "concat joins others to them"),
    (PARTS, lambda y: y.logsumexp(1), "logsumexp needs all of them"),
    (ONE, lambda y: y.chunk(3, -1), "chunk splits the outputs at 4"),
    (ONE, lambda y: torch.chunk(y, 3, dim=-1), "chunk splits the outputs at 4"),
    (ONE, lambda y: torch.nn.functional.glu(y), "glu splits the outputs at 6"),
    (ONE, lambda y: torch.nn.functional.softplus(y).view(-1, 12).hsplit(2), "hsplit splits the outputs at 6"),
    (ONE, lambda y: torch.nn.functional.gelu(y + 1).to(torch.float64).chunk(2, -1), "chunk splits the outputs at 6"),
    (ONE, lambda y: y.split([8, 2, 2], dim=-1), "split splits the outputs at 8"),
    (ONE, lambda y: torch.split(y, 6, dim=1), "split splits the outputs at 6"),
    (ONE, lambda y: y.tensor_split((3, 6), dim=-1), "tensor_split splits the outputs at 3"),
    (ONE, lambda y: y.narrow(-1, 0, 6), "narrow splits the outputs at 6"),
    (ONE, lambda y: y[..., 6:], "getitem splits the outputs at 6"),
    (ONE, lambda y: y[:, :18], "getitem splits the outputs at 18"),
    (ONE, lambda y: y.view(-1, 12).chunk(2, -1), "chunk splits the outputs at 6"),
    (ONE, lambda y: y.reshape(2, 3, 2, -1), "reshape splits the outputs into 3 first"),
    (ONE, lambda y: y.unflatten(-1, (2, 1, 6)), "unflatten splits the outputs into 2 first"),
    (PARTS, lambda y: y.chunk(3, -1), None),
    (PARTS, lambda y: (y[..., :8], y[..., 8:]), None),
    (PARTS, lambda y: y.view(2, 3, 2, 2).unbind(1), None),
    (PARTS, lambda y: y.view(2, 6, 2).split(2, 1), None),  # heads of one part, then of the next
    (PARTS, lambda y: y.chunk(2, -1), "chunk splits the outputs at 6"),
    (PARTS, lambda y: y[..., ::3], "getitem splits the outputs in steps of 3"),
    (PARTS, lambda y: y.view(2, -1, 6), "view splits the outputs by heads"),
    (PARTS, lambda y: y.view(2, 2, 3, 2), "view splits the outputs by heads"),
]


@pytest.mark.parametrize("number", range(len(USES)))
def test_uses_of_outputs(number: int) -> None:
    """What is allowed gives the same values, as plain tensors."""
    extents, use, sentence = USES[number]
    cut = OutputSharding("a.b", 1, extents, 24, frozenset())
    y = cut.watch(X.clone().requires_grad_() * 1)
    if sentence is not None:
        with pytest.raises(InvalidArgumentError, match=f"rank 1 got a.b, whose 24 outputs are .* but {sentence}"):
            use(y)
        return
    found, expected = use(y), use(X)
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_number_of_heads_is_no_number_of_parts() -> None:
    """Three heads on this rank, and another factor behind: refused if nothing says that three are heads."""
    cut = OutputSharding("a", 0, (12,), 24, frozenset({3}))
    assert cut.watch(X.clone()).view(2, 3, 2, 2).shape == (2, 3, 2, 2)


def test_a_refused_call_is_refused_again() -> None:
    """A user who calls the model again, as a cell of a notebook does, gets no wrong values."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            return y.softmax(-1) if len(x) == 2 else y.chunk(3, -1)[0]

    def check(model: nn.Module, comm: Any) -> None:
        for length in (2, 2, 3, 3):
            with pytest.raises(InvalidArgumentError, match="up, whose 24 outputs are cut"):
                model(torch.ones(length, 4))

    on_parts(Scores(), {"up": "colwise"}, check)


def test_outputs_are_watched_once() -> None:
    def check(model: nn.Module, comm: Any) -> None:
        before = dict(vars(model[0]))
        assert type(model(torch.ones(4))) is not torch.Tensor
        assert vars(model[0]) == before  # a pipeline hands on what a module leaves in its attributes
        assert type(model(torch.ones(4))) is torch.Tensor

    on_parts(nn.Sequential(nn.Linear(4, 8)), {"0": "colwise"}, check)


class Uses(nn.Module):
    """Uses the outputs of a sharded layer in its forward pass, where something is read or taken."""

    def __init__(self, use: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.use, self.up, self.down = use, nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * self.use(h))


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda h: h[:, :1], "getitem splits the outputs at 1"),
        (lambda h: h[:, 0], "getitem takes single outputs"),
        (lambda h: h[:, : h.shape[-1]] * len(str(h)) * h[0, 0].item(), None),
    ],
)
def test_uses_in_a_forward_pass(use: Callable[[torch.Tensor], Any], sentence: str | None) -> None:
    def check(model: nn.Module, comm: Any) -> None:
        if sentence is None:
            model(torch.ones(2, 4))
            return
        with pytest.raises(InvalidArgumentError, match=f"up, whose 8 outputs are cut.* but {sentence}"):
            model(torch.ones(2, 4))

    on_parts(Uses(use), {"up": "colwise", "down": "rowwise"}, check)


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda h: float(h[:1, :].detach().numpy().mean()), "numpy reads the values of this rank's outputs"),
        (lambda h: sum(h.detach().tolist()[0]), "tolist reads the values of this rank's outputs"),
        (lambda h: h.detach().amax(-1, True), "amax needs all of them"),
        (lambda h: float(h.detach().norm()), "norm needs all of them"),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_detached_outputs_give_a_warning(use: Callable[[torch.Tensor], Any], sentence: str, frozen: bool) -> None:
    """Programs log them, and compute with them."""
    model = Uses(use).requires_grad_(not frozen)
    with pytest.warns(UserWarning, match=f"up, whose 8 outputs are cut.* but {sentence}") as told:
        on_parts(model, {"up": "colwise", "down": "rowwise"}, lambda model, comm: model(torch.ones(2, 4)))
    assert {each.filename for each in told} == {__file__}


@pytest.mark.parametrize(
    ("use", "function"),
    [
        (lambda y: y.detach().abs().amax(-1), "amax"),
        (lambda y: y.data.mean(), "mean"),
        (lambda y: (y > 0).any(), "any"),
    ],
)
def test_outputs_without_a_gradient_give_a_warning(use: Callable[[torch.Tensor], Any], function: str) -> None:
    y = OutputSharding("a.b", 1, (12,), 24, frozenset()).watch(X.clone().requires_grad_() * 1)
    with pytest.warns(UserWarning, match=f"whose 24 outputs are .* but {function} needs all of them"):
        use(y)


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda h: h.softmax(-1), "softmax needs all of them"),
        (lambda h: h[:, 0], "getitem takes single outputs"),
    ],
)
def test_outputs_of_a_frozen_layer_are_refused_as_others(use: Callable[[torch.Tensor], Any], sentence: str) -> None:
    models = [Uses(use) for _ in range(2)]

    def rank(comm: Any) -> None:
        model = parallelize(models[comm.rank].requires_grad_(False), {"up": "colwise", "down": "rowwise"}, comm)
        with pytest.raises(InvalidArgumentError, match=f"up, whose 8 outputs are cut.* but {sentence}"):
            model(torch.ones(2, 4))

    on_ranks(rank, 2)


@pytest.mark.parametrize("number", [lambda y: y[0, 1], lambda y: (2 * y)[:1][0, 1], lambda y: y.T[1, 0]])
def test_a_loss_from_a_single_number_is_refused_in_backward(number: Callable[[torch.Tensor], Any]) -> None:
    def check(model: nn.Module, comm: Any) -> None:
        x = torch.ones(2, 4)
        for _ in range(2):
            one = number(y := model(x))
            assert one.item() == one.detach()
            with pytest.raises(
                InvalidArgumentError, match=r"1, whose 8 outputs are cut, here 4, but getitem takes a s"
            ):
                (y.square().mean(0) * one.exp()).backward(torch.ones(4))
            with pytest.raises(InvalidArgumentError, match="takes a single number that the loss depends on"):
                torch.autograd.grad(number(model(x)), model[0].weight)
        number(y := model(x))  # for printing
        y.backward(torch.ones(2, 4))

    on_parts(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), {"1": "colwise"}, check)


def test_an_assignment_through_a_mask_is_element_wise() -> None:
    cut = OutputSharding("a", 0, (12,), 24, frozenset())
    y = cut.watch(X.clone().requires_grad_() * 1)
    y[y < 0.5] = 0
    assert not bool((y.detach() < 0).all())


def test_a_gate_that_the_program_sums_by_itself_is_right() -> None:
    """With a function of its own in Megatron's way, in place of `f`."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, comm: Any) -> torch.Tensor:
            ctx.comm = comm
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return ctx.comm.all_reduce(grad.contiguous()), None

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.comm: Any = None
            self.up, self.gate, self.down = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            gate = self.gate(h)
            return self.down(h * (gate if self.comm is None else Copy.apply(gate, self.comm)))

    plain = Gated()
    plain(torch.ones(2, 4)).sum().backward()

    def gradient(model: nn.Module, comm: Any) -> torch.Tensor:
        model.comm = comm
        model(torch.ones(2, 4)).sum().backward()
        return model.gate.bias.grad

    for grad in on_parts(plain, {"up": "colwise", "gate": "rowwise", "down": "rowwise"}, gradient):
        torch.testing.assert_close(grad, plain.gate.bias.grad)


def test_a_rank_that_has_its_outputs_may_read_them() -> None:
    def check(model: nn.Module, comm: Any) -> None:
        h = model(torch.ones(2, 4)).detach()
        assert len(h.tolist()) == len(h.numpy()) == comm.all_gather(h).shape[0] // 2 == 2

    on_parts(nn.Sequential(nn.Linear(4, 8)), {"0": "colwise"}, check)


class Gate(nn.Module):
    """Multiplies sharded outputs with what a rowwise layer, or one behind it, makes of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.comm = how, None
        self.up, self.down, self.score = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 1)
        self.gate = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x))
        if self.how == "residual":
            return x + self.down(h) * torch.sigmoid(self.gate(h))
        gate = torch.sigmoid(self.score(self.down(h)) if self.how == "behind" else self.gate(h).float().view(-1, 1))
        if self.how == "f" and self.comm is not None:
            gate = f(gate, self.comm)
        return self.down(h.clone().mul_(gate) if self.how == "in place" else gate * h)


@pytest.mark.parametrize("how", ["direct", "behind", "in place", "f", "residual"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_gate_whose_gradient_nothing_sums(how: str, evaluates: bool) -> None:
    whole, models = Gate(how), [Gate(how) for _ in range(2)]
    x = torch.arange(8.0).view(2, 4) / 8
    whole(x).square().sum().backward()

    def rank(comm: Any) -> None:
        model = models[comm.rank]
        model.comm = comm
        model = parallelize(model, {"up": "colwise", "down": "rowwise", "gate": "rowwise"}, comm)
        if evaluates:
            with torch.no_grad():
                model(x)
        if how in ("f", "residual"):
            model(x).square().sum().backward()
            model.score.requires_grad_(False)
            del model.score, model.comm
            assert unlike(model, whole) == []
            return
        with pytest.raises(InvalidArgumentError, match=r"got i?mul of outputs of up, .* pass that tensor through"):
            model(x)

    on_ranks(rank, 2)
