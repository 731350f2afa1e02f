"""Models of transformers, unmodified and built from small configurations: the same logits, gradients and tokens.

In float64, 1e-12 of the largest magnitude; gradients, which have come through all layers, five times that.
"""

from __future__ import annotations

import copy
import importlib.util
import types
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.tensor_parallel.dropout import ShardedDropout
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import Colwise, Dropout
from tests.support import torch_ranks
from tests.support.choice import slow
from tests.support.mesh.tensor_cases import close, on_parts, on_ranks, part, sent, unlike

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install transformers"
    ),
]

VOCABULARY, LENGTH = 97, 12  # not a multiple of any number of ranks

LLAMA: dict[str, Any] = {
    "model.embed_tokens": "vocab", "lm_head": "colwise_gather_output",
    "*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise",
    "*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise",
}  # fmt: skip
LLAMA_SEQUENCE: dict[str, Any] = {
    **LLAMA, "model.layers": "sequence_region", "*.self_attn": "gather_sequence", "*.input_layernorm": "sequence",
    "*.post_attention_layernorm": "sequence",
}  # fmt: skip
GPT2: dict[str, Any] = {
    "transformer.wte": "vocab", "lm_head": "colwise_gather_output",
    "*.c_attn": Colwise(parts=3), "*.attn": "heads", "*.attn.c_proj": "rowwise", "*.attn_dropout": Dropout(1),
    "*.c_fc": "colwise", "*.mlp.c_proj": "rowwise",
}  # fmt: skip


def llama(tied: bool = False, kind: str = "Llama", **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=tied, attention_bias=True,
        bos_token_id=1, eos_token_id=None, pad_token_id=None, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return spread(getattr(transformers, f"{kind}ForCausalLM")(config))


def gpt2(**options: Any) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None,
        attn_implementation="eager", **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return spread(transformers.GPT2LMHeadModel(config))


def spread(model: nn.Module) -> nn.Module:
    """Values that lie apart, in float64: initial weights are so small that attention hardly attends."""
    with torch.no_grad():
        for p in model.double().parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    return out.loss.detach(), out.logits.detach()


def without_noise(name: str) -> bool:
    """A key's bias changes nothing: its gradient is rounding alone."""
    return not name.endswith("k_proj.bias")


def check(whole: nn.Module, plan: Any, world_size: int, training: bool, slack: float = 1.0, **options: Any) -> None:
    others = [copy.deepcopy(whole).train(training) for _ in range(world_size)]
    kinds = {name: type(each) for name, each in whole.named_modules()}
    loss, logits = run(whole.train(training))

    def rank(comm: Any) -> None:
        model = parallelize(others[comm.rank], plan, comm, **options)
        found, mine = run(model)
        assert close(mine, logits, slack=slack)
        assert close(found, loss, slack=slack)
        assert [name for name in unlike(model, whole, 5 * slack) if without_noise(name)] == []
        assert sum(sent(comm).values()) > 0
        assert kinds.keys() == {name for name, _ in model.named_modules()}
        tied = whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied

    on_ranks(rank, world_size)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("plan", ["ours", "its own"])
def test_llama(plan: str, tied: bool, training: bool) -> None:
    check(llama(tied), LLAMA if plan == "ours" else None, 2, training)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_sequence_parallel(tied: bool, overlap: bool) -> None:
    check(llama(tied), LLAMA_SEQUENCE, 2, True, sequence_dim=1, overlap=overlap)


def test_llama_sequence_parallel_with_activation_checkpointing() -> None:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model, LLAMA_SEQUENCE, 2, True, sequence_dim=1)


def test_qwen3_by_its_own_plan() -> None:
    """Norms of heads are whole, but each rank uses them on its own heads: their gradients are summed."""
    check(llama(True, "Qwen3"), None, 2, True)


def test_phi3_by_its_own_plan() -> None:
    """A fused projection that gives its whole output."""
    import transformers

    config = transformers.Phi3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    check(spread(transformers.Phi3ForCausalLM(config)), None, 2, True)


IN_FLOAT32 = 1e6
"""For parts of a model that compute in float32 whatever its type, such as routing and norms: of 1e-12."""


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Gemma", "Gemma2"])
def test_a_scaled_embedding_by_its_own_plan(kind: str, tied: bool) -> None:
    model = llama(tied, kind)
    assert type(model.model.embed_tokens).forward is not nn.Embedding.forward
    check(model, None, 2, True, IN_FLOAT32)


def test_a_scale_that_is_no_tensor() -> None:
    """And one whose forward pass is another is refused."""
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

    class Twice(BartScaledWordEmbedding):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input_ids)

    ids = torch.tensor([[0, 1, 6]])
    whole = nn.Sequential(BartScaledWordEmbedding(7, 4, 1, embed_scale=3.0))
    expected = whole(ids)

    def rank(model: nn.Module, comm: Any) -> None:
        assert torch.equal(model(ids), expected)
        assert model.state_dict().keys() == whole.state_dict().keys()
        with pytest.raises(UnsupportedError, match="got 0, a Twice with a forward pass of its own"):
            parallelize(nn.Sequential(Twice(7, 4, 1, embed_scale=3.0)), {"0": "vocab"}, comm)

    on_parts(whole, {"0": "vocab"}, rank)


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def mixture(kind: str, how: str = "eager") -> nn.Module:
    model = llama(False, kind, **EXPERTS[kind])
    model.set_experts_implementation(how)
    return model


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("how", ["eager", "batched_mm"])
def test_experts_by_their_own_plan(kind: str, how: str) -> None:
    """Every rank has a part of each expert; the router is whole, and its gradient comes through all parts."""
    model = mixture(kind, how)
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def halves(cut: nn.Module, comm: Any) -> None:
        experts = {name: p for name, p in cut.named_parameters() if "experts" in name}
        assert experts
        assert all(2 * p.numel() == shapes[name].numel() for name, p in experts.items())

    on_parts(model, None, halves)
    check(model, None, 2, True, IN_FLOAT32)


def test_experts_in_float32_with_grouped_products() -> None:
    """What transformers takes unless it is told otherwise; it multiplies no float64."""
    check(mixture("Mixtral", "grouped_mm").float(), None, 2, True, 5.0)


def test_experts_that_cannot_be_cut() -> None:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=40, intermediate_size=24, num_hidden_layers=1, head_dim=8, num_attention_heads=5,
        num_key_value_heads=5, num_local_experts=4, pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    models = [copy.deepcopy(model) for _ in range(5)]

    def rank(comm: Any) -> None:
        with pytest.raises(
            InvalidArgumentError, match=r"24 outputs of .*experts\.gate_up_proj, expected 5 equal parts"
        ):
            parallelize(models[comm.rank], {"*.mlp.experts": "experts"}, comm)
        models[comm.rank].model.layers[0].mlp.experts.has_post_expert_norm = True
        with pytest.raises(UnsupportedError, match=r"a MixtralExperts with .* and has_post_expert_norm=True, expected"):
            parallelize(models[comm.rank], {"*.mlp.experts": "experts"}, comm)

    on_ranks(rank, 5)


def test_experts_whose_forward_was_replaced() -> None:
    """It would compute with the whole weights on every rank, and the results would be summed."""
    models = [mixture("Mixtral") for _ in range(2)]

    def rank(comm: Any) -> None:
        experts = models[comm.rank].model.layers[0].mlp.experts
        experts.forward = types.MethodType(type(experts).forward, experts)
        with pytest.raises(UnsupportedError, match=r"a MixtralExperts whose forward was replaced on the object"):
            parallelize(models[comm.rank], None, comm)

    on_ranks(rank, 2)


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
OWN_PLANS: dict[str, dict[str, Any]] = {
    "Apertus": {},  # activations with parameters, which the plan forgets
    "Beam": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
             "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},  # a bias for each head
    "Lfm2": {"tie_word_embeddings": True},  # an embedding that is tied to a layer of the plan, which forgets it
    "AriaText": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},  # transposed
    "NemotronH": {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
                  "n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 16,
                  "layers_block_type": ["moe", "full_attention"]},  # experts without a gate
    "DeepseekV3": {**LATENT, "n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1,
                   "topk_group": 1, "first_k_dense_replace": 1},
    "MiniCPM3": LATENT,  # latent attention
}  # fmt: skip


@pytest.mark.parametrize("kind", OWN_PLANS)
def test_what_own_plans_name_or_forget(kind: str) -> None:
    import transformers

    options = {"tie_word_embeddings": False, **OWN_PLANS[kind]}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=4 if "kv_lora_rank" in options else 2, max_position_embeddings=32, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = spread(getattr(transformers, f"{kind}ForCausalLM")(config))
    model.set_experts_implementation("eager")
    check_used(model, None, 2, ["experts"] if any("experts" in key for key in options) else [])


GPT_OSS: dict[str, Any] = {  # of which transformers 5 has no plan for tensor parallel
    "*.embed_tokens": "vocab", "lm_head": "colwise_gather_output",
    "*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.sinks": "colwise", "*.o_proj": "rowwise",
    "*.mlp.experts": "experts",
}  # fmt: skip


def gpt_oss() -> nn.Module:
    model = llama(False, "GptOss", num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation("eager")
    return model


def test_gpt_oss() -> None:
    """Experts that lie transposed, with biases, gate and up interleaved; a sink for each head."""
    check_used(gpt_oss(), GPT_OSS, 2, ["experts", "sinks"])


def check_used(whole: nn.Module, plan: Any, world_size: int, cut: list[str]) -> None:
    """As `check`, where some parameters have no gradient, or one that is rounding alone.

    Args:
        cut: parts of names of parameters that must be cut.
    """
    others = [copy.deepcopy(whole).train() for _ in range(world_size)]
    loss, logits = run(whole.train())
    grads = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    most = max(float(grad.abs().max()) for grad in grads.values())
    sizes = {name: p.numel() for name, p in whole.named_parameters()}

    def rank(comm: Any) -> None:
        model = parallelize(others[comm.rank], plan, comm)
        smaller = [name for name, p in model.named_parameters() if p.numel() < sizes[name]]
        assert all(any(each in name for name in smaller) for each in cut), smaller
        found, mine = run(model)
        assert close(mine, logits, slack=IN_FLOAT32)
        assert close(found, loss, slack=IN_FLOAT32)
        for name, p in model.named_parameters():
            if name in grads:
                wanted = part(grads[name], p)
                assert float((p.grad - wanted).abs().max()) <= 1e-6 * max(float(wanted.abs().max()), 1e-3 * most), name

    on_ranks(rank, world_size)


@pytest.mark.parametrize("stage", [slow(0), 3])
def test_experts_are_sharded_and_clipped_over_a_mesh(stage: int) -> None:
    """dp=2 x tp=2, with parameters that load_state_dict(assign=True) has made anew."""
    whole = mixture("Mixtral")
    models = [copy.deepcopy(whole) for _ in range(4)]

    def train(model: nn.Module, optimizer: Any, clip: Any) -> list[float]:
        norms = []
        for _ in range(3):
            run(model)
            norms.append(float(clip(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), torch.nn.utils.clip_grad_norm_)

    def rank(comm: Any) -> list[float]:
        mesh = ringcomm.init_mesh(dp=2, tp=2, comm=comm)
        model = parallelize(models[comm.rank], None, mesh["tp"])
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ringcomm.shard(model, optimizer, stage, mesh=mesh)
        found = train(model, optimizer, ringcomm.clip_grad_norm_)
        mesh.close()
        return found

    for found in on_ranks(rank, 4):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("training", [True, False])
def test_gpt2(training: bool, world_size: int) -> None:
    """Conv1D with fused queries, keys and values; tied embeddings. Without dropout: threads share a generator."""
    model = gpt2()
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    check(model, GPT2, world_size, training)


def trains_with_dropout(options: dict[str, Any], dtype: torch.dtype, slack: float) -> list[str]:
    comm = ringcomm.init()
    whole = gpt2(**options).to(dtype).train()
    model = parallelize(copy.deepcopy(whole), GPT2, comm)
    assert isinstance(model.transformer.h[0].attn.attn_dropout, ShardedDropout)
    found = []
    for each in (whole, model):
        torch.manual_seed(7)
        found.append((*run(each), torch.rand(3)))
    expected, mine = found
    wrong = [name for i, name in enumerate(("loss", "logits")) if not close(mine[i], expected[i], slack=slack)]
    if not torch.equal(mine[2], expected[2]):
        wrong.append("the generator")
    if close(run(copy.deepcopy(whole).eval())[1], expected[1], torch.bfloat16):
        wrong.append("nothing was dropped")
    comm.close()
    return wrong + unlike(model, whole, 5 * slack)


@pytest.mark.parametrize(
    ("options", "dtype", "slack"),
    [
        ({"attn_pdrop": 0.0}, torch.float64, 1.0),
        ({"reorder_and_upcast_attn": True}, torch.float32, 5.0),  # else attention calls a function, not the module
    ],
)
def test_gpt2_drops_what_one_process_drops(options: dict[str, Any], dtype: torch.dtype, slack: float) -> None:
    """Attention weights of a rank's heads included; ranks as processes, each with its generator."""
    assert torch_ranks.run(trains_with_dropout, options, dtype, slack, world_size=2) == [[], []]


def gemma() -> nn.Module:
    return llama(True, "Gemma")


def mixtral() -> nn.Module:
    return mixture("Mixtral")


@pytest.mark.parametrize(
    ("kind", "plan"), [(llama, LLAMA), (llama, None), (gpt2, GPT2), (gemma, None), (mixtral, None)]
)
def test_generation(kind: Any, plan: Any) -> None:
    whole = kind().eval()
    others = [copy.deepcopy(whole) for _ in range(2)]
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    prompt = tokens()[:, :4]
    expected = whole.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert expected.shape == (2, 16)

    def rank(comm: Any) -> torch.Tensor:
        model = parallelize(others[comm.rank], plan, comm)
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    for found in on_ranks(rank, 2):
        assert torch.equal(found, expected)


def test_refusals() -> None:
    """Heads of keys and values that do not divide; a model without a plan."""
    cases: list[tuple[Any, Any, int, Any, str]] = [
        (
            llama(),
            None,
            3,
            InvalidArgumentError,
            r"outputs of model\.layers\.0\.self_attn\..* \(\d heads of 8\), expected 3 eq",
        ),
        (
            llama(),
            LLAMA,
            4,
            InvalidArgumentError,
            r"16 outputs of .*k_proj \(2 heads of 8\), expected 4 equal parts of wh",
        ),
        (gpt2(), None, 2, InvalidArgumentError, "got no plan and a GPT2LMHeadModel without one"),
    ]
    for model, plan, world_size, error, sentence in cases:
        copies = [copy.deepcopy(model) for _ in range(world_size)]

        def rank(
            comm: Any, copies: Any = copies, plan: Any = plan, error: Any = error, sentence: str = sentence
        ) -> None:
            with pytest.raises(error, match=sentence):
                parallelize(copies[comm.rank], plan, comm)

        on_ranks(rank, world_size)
