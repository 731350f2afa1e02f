"""`parallelize(verify=True)` names what is not alike on the ranks, and blocks that compute something else than before:
on models of transformers. Without it, the same programs compute wrong values without an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.errors import MismatchError
from ringcomm.tensor_parallel.outputs import OutputSharding
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import Colwise
from ringcomm.tensor_parallel.verify import CHUNK, differ, digest
from tests.support.mesh.cases import Net
from tests.support.mesh.tensor_cases import on_parts, part, unlike
from tests.tensor_parallel.test_outputs import MLP, MODELS, NEOX, Plan, built
from tests.tensor_parallel.test_transformers import check, llama, run, tokens

pytestmark = [pytest.mark.usefixtures("one_thread")]


def qwen() -> tuple[nn.Module, Plan]:
    """Norms of heads, and its own plan."""
    model = llama(False, "Qwen3")
    return model, dict(model._tp_plan)


def refused(model: nn.Module, plan: Plan | None, step: Callable[[nn.Module, int], Any], world_size: int) -> list[str]:
    def error(cut: nn.Module, comm: Any) -> str:
        with pytest.raises(MismatchError) as found:
            step(cut, comm.rank)
        return str(found.value)

    found = on_parts(model, plan, error, world_size, verify=True)
    for number, said in enumerate(found):
        assert said.startswith(f"parallelize: rank {number} found by verify=True that ")
        assert "\n" not in said
        assert ", expected " in said
    return found


def test_a_right_plan_passes_and_computes_the_same() -> None:
    model, plan = qwen()
    check(model, plan, 2, True, verify=True)
    check(MODELS["neox"](), None, 2, True, verify=True)


def test_sequence_parallel_passes() -> None:
    from tests.tensor_parallel.test_transformers import LLAMA_SEQUENCE

    check(llama(), LLAMA_SEQUENCE, 2, True, sequence_dim=1, verify=True)


class Tokens(nn.Module):
    """A block of a sequence region; ``change`` is applied to what it has normalised."""

    def __init__(self, width: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.change = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.change(self.norm(x))).relu())


class Body(nn.Module):
    def __init__(self, blocks: list[Tokens]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Around(nn.Module):
    def __init__(self, blocks: list[Tokens]) -> None:
        super().__init__()
        self.body = Body(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


MIXING = {
    "mean": lambda h: h - h.mean(1, keepdim=True),
    "positions": lambda h: h * torch.arange(h.shape[1]).view(1, -1, 1).cos(),
    "shift": lambda h: h.roll(1, 1),
}


@pytest.mark.parametrize("how", ["right", *MIXING])
@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("region", ["body", "body.blocks"], ids=["module", "list"])
def test_a_block_of_a_sequence_region_that_mixes_tokens(how: str, at: int, region: str) -> None:
    """The blocks are of different kinds, so each is compared. All but a list's first get a part of the sequence."""
    blocks = [Tokens(16 << i, MIXING[how] if i == at and how in MIXING else torch.relu) for i in range(3)]
    model, given = Around(blocks), torch.linspace(-1, 2, 96).view(2, 6, 8).sin()
    plan: Plan = {region: "sequence_region", "*.norm": "sequence", "*.up": "colwise", "*.down": "rowwise"}

    def result(cut: nn.Module, comm: Any) -> str | torch.Tensor:
        try:
            return cut(given).detach()
        except MismatchError as error:
            return str(error)

    for found in on_parts(model, plan, result, sequence_dim=1, verify=True):
        if how == "right":
            assert torch.allclose(found, model(given), atol=1e-5)
        else:
            assert f"by verify=True that body.blocks.{at} gives rank " in found
            assert "code that mixes or counts tokens" in found


def test_a_forgotten_sum() -> None:
    model, plan = qwen()
    forgetful = {name: "replicate" if name.endswith("q_norm") else style for name, style in plan.items()}
    whole = copy.deepcopy(model)
    run(whole)

    def silent(cut: nn.Module, comm: Any) -> list[str]:
        run(cut)
        return unlike(cut, whole, 5)

    assert all(any("q_norm" in name for name in wrong) for wrong in on_parts(model, forgetful, silent))
    for said in refused(model, forgetful, lambda cut, _: run(cut), 2):
        assert "rank 1 has another gradient of model.layers." in said
        assert "self_attn.q_norm.weight than rank 0, float64 of shape (8,) with norm" in said
        assert said.count("'summed'") == 1


def test_a_forgotten_sum_of_a_parameter_that_is_made_anew() -> None:
    """load_state_dict(assign=True) makes other parameters: those that are summed still pass."""

    def runs(cut: nn.Module, comm: Any) -> None:
        cut.load_state_dict({name: x.clone() for name, x in cut.state_dict().items()}, assign=True)
        run(cut)
        run(cut)

    on_parts(*qwen(), runs, verify=True)


def test_it_goes_on_after_a_backward_pass_that_raised() -> None:
    torch.manual_seed(0)
    models = [copy.deepcopy(each) for each in [nn.ModuleDict({"a": nn.Linear(8, 8), "n": nn.LayerNorm(4)})] * 2]

    def rank(comm: ringcomm.Communicator) -> None:
        model = models[comm.rank]

        def loss() -> torch.Tensor:
            return model["n"](model["a"](torch.ones(2, 8)).unflatten(-1, (-1, 4))).square().mean()

        model.forward = loss
        ringcomm.parallelize(model, {"a": "colwise"}, comm, verify=True)
        handle = model["a"].weight.register_hook(lambda grad: grad.no_such_attribute)
        with pytest.raises(AttributeError):
            model().backward()
        handle.remove()
        with pytest.raises(MismatchError, match=r"gradient of n\.(weight|bias)"):
            model().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


def test_another_batch_on_a_rank() -> None:
    def step(cut: nn.Module, rank: int) -> None:
        run(cut)  # is alike
        cut(input_ids=tokens() + (rank == 2), labels=tokens())

    model = built(
        "Llama", hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=3
    )
    for said in refused(model, None, step, 3):
        assert "rank 2 has another input ['input_ids'] than rank 0, int64 of shape (2, 12) with norm" in said
        assert "the same batch" in said


def test_another_shape_and_another_argument() -> None:
    model, plan = qwen()
    for said in refused(model, plan, lambda cut, rank: cut(input_ids=tokens()[: 1 + rank]), 2):
        assert "another input ['input_ids'] than rank 0, int64 of shape (2, 12)" in said
    options: list[dict[str, Any]] = [{"use_cache": True}, {}]
    for said in refused(model, plan, lambda cut, rank: cut(input_ids=tokens(), **options[rank]), 2):
        assert "another input ['use_cache'] than rank 0, none and True, expected" in said


def test_another_loss() -> None:
    model, plan = qwen()
    losses = [lambda x: x.square().sum(), lambda x: x.sum()]
    for said in refused(model, plan, lambda cut, rank: losses[rank](cut(input_ids=tokens()).logits).backward(), 2):
        assert "rank 1 has another gradient of output ['logits'] than rank 0" in said
        assert "losses or targets that differ" in said


class Penalised(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean() + sum(p.square().sum() for p in self.parameters())


def test_a_loss_of_the_module_that_is_another_on_each_rank() -> None:
    model = Penalised(*(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2)))
    plan: Plan = {"*.0": "colwise", "*.1": "rowwise"}
    for said in refused(model, plan, lambda cut, rank: cut(torch.ones(2, 4)).backward(), 2):
        assert "rank 1 has another output than rank 0, float32 of shape () with norm " in said


def test_layers_that_follow_one_another_in_a_list_are_compared_together() -> None:
    """Each alone takes or gives a rank's part."""
    plan: Plan = {"0": "colwise", "2": "rowwise"}
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)]
    on_parts(nn.Sequential(*layers), plan, lambda cut, comm: cut(torch.ones(2, 4)), verify=True)
    for said in refused(Penalised(*layers), plan, lambda cut, rank: cut(torch.ones(2, 4)), 2):
        assert "found by verify=True that the module gives rank 0 a difference of " in said


@pytest.mark.parametrize(
    ("kind", "plan", "block"),
    [
        ("neox", {**NEOX, "*.query_key_value": Colwise(parts=3)}, "gpt_neox.layers.0"),
        ("phi3", {**MLP, "*.gate_up_proj": "colwise"}, "model.layers.0"),
    ],
)
def test_a_block_that_computes_something_else(
    kind: str, plan: Plan, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing has seen what is made of the outputs."""
    monkeypatch.setattr(OutputSharding, "watch", lambda self, y: y)
    for said in refused(MODELS[kind](), plan, lambda cut, _: run(cut), 2):
        assert f"that {block} gives rank 0 a difference of " in said
        assert "expected only rounding errors; look at the styles of " in said


def test_a_block_is_compared_without_dropout_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    model = nn.Sequential(block, nn.Sequential(nn.Linear(8, 8)))

    def modes(cut: nn.Module, comm: Any) -> list[bool]:
        cut[0][1].eval()
        cut(torch.ones(3, 8))
        return [each.training for each in cut.modules()]

    found = on_parts(model, {"0.0": "colwise", "0.2": "rowwise"}, modes, verify=True)
    assert found == [[True, True, True, False, True, True, True]] * 2


class Scaled(nn.Module):
    """A block with a norm of its whole input, biases whose gradient is zero but for rounding errors, and a scale of
    heads; it changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head_norm = nn.LayerNorm(8), nn.LayerNorm(2)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.mul_(1.5))
        q, k, v = self.head_norm(self.heads(self.q(h))), self.heads(self.k(h)), self.heads(self.v(h))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


SCALED: Plan = {"*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.out": "rowwise", "*.head_norm": "summed"}


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def loss_of(cut: nn.Module) -> torch.Tensor:
    return cut(torch.linspace(-1, 2, 96).view(2, 6, 8).sin()).square().mean()


def test_a_sum_of_gradients_that_are_already_whole() -> None:
    """The gradients of all ranks are equal, but too large by the number of ranks."""
    plan = {**SCALED, "*.norm": "summed"}
    whole = deep()
    loss_of(whole).backward()

    def silent(cut: nn.Module, comm: Any) -> list[str]:
        loss_of(cut).backward()
        return unlike(cut, whole, 5)

    assert all("blocks.0.norm.weight" in wrong for wrong in on_parts(deep(), plan, silent))

    def late(cut: nn.Module, rank: int) -> None:
        with torch.no_grad():
            loss_of(cut)  # has no gradients to compare
        loss_of(cut)

    for said in refused(deep(), plan, late, 2):
        assert "that blocks.0 gives rank 0 a difference of " in said
        assert " in the gradient of norm." in said
        assert "'summed' or 'sequence' only modules that each rank uses on its own heads" in said


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_gradients_of_a_right_plan_are_only_rounded(stage: int | None) -> None:
    """Also with a hook of the program, and after the parameters have been sharded over the data-parallel ranks."""
    from tests.support.mesh import cases

    def body(model: Deep, mesh: Any) -> None:
        cut: Any = parallelize(model, SCALED, mesh["tp"], verify=True)
        cut.blocks[0].norm.weight.register_hook(lambda gradient: gradient.clamp(-1e-6, 1e-6))
        if stage is not None:
            ringcomm.shard(cut, torch.optim.SGD(cut.parameters(), lr=0.1), stage, mesh=mesh)
        loss_of(cut).backward()
        if stage is None:
            for name, p in cut.named_parameters():
                assert torch.allclose(p.grad, part(gradients[name], p), atol=1e-6, rtol=1e-4), name

    whole = deep()
    whole.blocks[0].norm.weight.register_hook(lambda gradient: gradient.clamp(-1e-6, 1e-6))
    loss_of(whole).backward()
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    cases.run({"dp": 1 if stage is None else 2, "tp": 2}, body, deep())  # type: ignore[arg-type]


def test_gradients_are_not_compared_where_torch_cannot_compute_them() -> None:
    class Again(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: Scaled.forward(self, x.clone()), x, use_reentrant=True)

    torch.manual_seed(0)
    model = Deep()
    model.blocks = nn.ModuleList(Again() for _ in range(2))
    with pytest.warns(UserWarning, match="does not compare gradients: "):
        on_parts(model, SCALED, lambda cut, comm: loss_of(cut).backward(), verify=True)


def test_digests() -> None:
    x = torch.randn(CHUNK + 3, generator=torch.Generator().manual_seed(0))
    assert not differ(digest(x), digest(x + 1e-7 * x))
    assert differ(digest(x), digest(x.flip(0)))
    assert differ(digest(x), digest(x.double()))
    assert differ(digest(torch.tensor([1, 2])), digest(torch.tensor([2, 1])))
    nan = torch.tensor([1.0, float("nan")])
    assert not differ(digest(nan), digest(nan.clone()))
    assert differ(digest(nan), digest(torch.ones(2)))
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True)
    assert not differ(digest(sparse), digest(sparse.to_dense()))
    assert differ(digest(torch.tensor([1 + 2j])), digest(torch.tensor([1 - 2j])))
    assert not differ(digest(torch.ones(0)), digest(torch.ones(0)))


def test_a_pipeline_over_a_mesh_passes() -> None:
    """pp=2 x tp=2; the check of gradients does not depend on which stage a rank has."""
    from tests.support.mesh import cases

    def body(model: Net, mesh: Any) -> None:
        cases.parallelize(model, cases.PLAN, mesh["tp"], verify=True)
        pipe = cases.Pipeline(cases.split(model, ["blocks.2"]), mesh["pp"], microbatches=2, loss=cases.loss_of)
        x, y = cases.batch(0)
        pipe.step(x, target=y)
        pipe.step(x, target=y)

    cases.run({"pp": 2, "tp": 2}, body)


class Ignores(torch.autograd.Function):
    """Gives no gradient for its second input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Odd(nn.Module):
    """A layer with two names, and a parameter whose gradient is none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again, self.scale = self.down, nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Sequential(self.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(Ignores.apply(x, self.scale)) + self.twice(x)))


class Odds(nn.Module):
    """Blocks of which the first gets what every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("pp", [1, 2])
def test_tied_layers_gradients_that_are_none_and_blocks_of_another_stage_pass(pp: int) -> None:
    torch.manual_seed(0)
    model = Odds()
    plan = {"*.up": "colwise", "*.down": "rowwise", "*.again": "rowwise"}

    def body(model: Odds, mesh: Any) -> None:
        parallelize(model, plan, mesh["tp"], verify=True)
        x = torch.ones(2, 6).cumsum(0)
        if pp == 1:
            model(x).backward()
        else:
            ringcomm.Pipeline(ringcomm.split(model, ["blocks.1"]), mesh["pp"], microbatches=2).step(x)

    from tests.support.mesh import cases

    cases.run({"pp": pp, "tp": 2}, body, model)  # type: ignore[arg-type]


class Uneven(nn.Module):
    """No blocks of a kind, so that the model is compared as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(torch.tanh(self.first(x)))).square().mean()


def test_a_model_that_a_pipeline_has_parts_of_passes() -> None:
    from tests.support.mesh import cases

    def body(model: Uneven, mesh: Any) -> None:
        parallelize(model, {"up": "colwise", "down": "rowwise"}, mesh["tp"], verify=True)
        ringcomm.Pipeline(ringcomm.split(model, ["up"]), mesh["pp"], microbatches=2).step(torch.ones(2, 6))

    cases.run({"pp": 2, "tp": 2}, body, Uneven())  # type: ignore[arg-type]
