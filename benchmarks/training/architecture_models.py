"""Builds small random models of every text family of the installed transformers, for architectures.py.

A family is a key of transformers' automatic mappings. Its configuration is made small through the names of its numbers;
SPECIAL holds further options that a family needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ringcomm.tensor_parallel import Colwise, Heads

KINDS = {
    "seq2seq": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForSeq2SeqLM),
    "masked": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
    "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
}
WORDS, LAYERS, MOST = 64, 4, 8_000_000
"""Vocabulary; layers of a decoder, two of each side of an encoder-decoder; parameters."""
OTHER_INPUTS = ("vision_config", "audio_config", "vq_config", "audio_encoder_config", "encoder_config")

NUMBERS: dict[tuple[str, ...], int] = {
    ("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"): WORDS,
    ("unpadded_vocab_size", "entity_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"): WORDS,
    ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_dim", "word_embed_proj_dim", "lru_width"): 32,
    ("input_embedding_size", "output_embedding_size", "prediction_head_size", "attention_hidden_size"): 32,
    ("embedding_size", "pooler_hidden_size", "pronunciation_embed_dim", "shape_embed_dim", "entity_emb_size"): 32,
    ("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "ffn_dim", "hidden_dim", "dff", "dim_ff"): 48,
    ("ffn_hidden_size", "d_inner", "n_inner", "intermediate_size_mlp", "dense_intermediate_size", "ple_embed_dim"): 48,
    ("feed_forward_size", "shared_intermediate_size", "router_hidden_size", "prompt_mid_dim"): 48,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"): 16,
    ("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "hidden_size_per_layer_input"): 16,
    ("intra_bottleneck_size", "true_hidden_size", "embedding_rank"): 16,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"): LAYERS,
    ("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"): 2,
    ("num_sparse_encoder_layers", "num_sparse_decoder_layers", "num_layers_per_stack"): 1,
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"): 4,
    ("num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads"): 4,
    ("linear_num_value_heads", "linear_num_heads", "index_n_heads", "num_query_groups"): 4,
    ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"): 2,
    ("head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size", "dim_head", "swa_head_dim"): 8,
    ("qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "global_head_dim", "index_head_dim"): 8,
    ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "rotary_dim", "attention_head_dim"): 8,
    ("q_lora_rank", "kv_lora_rank", "o_lora_rank", "gated_norm_rank", "laurel_rank", "adapter_rank"): 8,
    ("hc_lowrank", "d_rel", "rel_extent", "query_pre_attn_scalar", "time_step_rank", "mamba_dt_rank"): 8,
    ("qk_head_dim",): 16,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "zero_expert_num", "index_topk_blocks"): 2,
    ("n_group", "topk_group", "first_k_dense_replace", "num_kv_shared_layers", "n_shared_experts"): 1,
    ("moe_layer_end_index",): LAYERS - 1,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length"): 64,
    ("max_encoder_position_embeddings", "max_decoder_position_embeddings", "tpu_short_seq_length"): 64,
    ("original_max_position_embeddings", "attention_chunk_size", "max_2d_position_embeddings"): 64,
    ("expert_capacity", "keep_window_size"): 64,
    ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "index_topk"): 5,
    ("local_attention",): 6,
    ("max_window_layers",): 1,
    ("attention_window", "chunk_size", "mamba_chunk_size", "num_buckets", "relative_attention_num_buckets"): 8,
    ("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head", "mamba_head_dim", "mamba_headdim"): 8,
    ("mamba_n_heads", "mamba_num_heads"): 8,
    ("mamba_d_ssm",): 64,
    ("position_bias_num_buckets",): 8,
    ("prompt_length", "prompt_types", "segment_types", "num_latents", "num_global_tokens"): 4,
    ("hidden_size_per_layer",): 16,
    ("bos_token_id",): 1,
    ("eos_token_id", "forced_eos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id"): 2,
    ("pad_token_id",): 0,
    ("mask_token_id",): 3,
}
SMALL = {name: value for names, value in NUMBERS.items() for name in names}
OFF = ("dropout", "pdrop", "drop_path", "layerdrop", "jitter")
"""Modules that draw random numbers, which differ between ranks and one process."""

SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_experts": 8, "partial_rotary_factor": 1.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": WORDS, "position_embedding_type": "rotary", "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 2},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "kimi_linear": {"num_experts_per_token": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mpnet": {"relative_attention_num_buckets": 32},
    "zamba2": {
        "hybrid_layer_ids": [1, 3],
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "layers_block_type": None,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "reformer": {"axial_pos_embds": False, "is_decoder": False},  # position embeddings of any length
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Options that cannot be derived from the names of the numbers."""


def families() -> Iterator[tuple[str, str]]:
    """Yields (family, kind), each family once: an encoder-decoder as one, an encoder as a masked model."""
    seen = set()
    for kind, (names, _) in KINDS.items():
        for family in names:
            if family not in seen:
                seen.add(family)
                yield family, kind


def small(config: Any, family: str = "") -> dict[str, Any]:
    """Returns the options that make a configuration small."""
    made: dict[str, Any] = {}
    fields = getattr(type(config), "__dataclass_fields__", {})
    for name, value in config.to_dict().items():
        inner = config.__dict__.get(name)  # excludes values that may vary from layer to layer
        if isinstance(inner, transformers.PreTrainedConfig):
            made[name] = small(inner)
        elif name in SMALL and (isinstance(value, (int, float)) or name in ("head_dim", "num_key_value_heads")):
            made[name] = SMALL[name]
        elif any(each in name for each in OFF) and isinstance(value, float):
            made[name] = 0.0
        elif isinstance(value, list) and name.endswith(("_types", "_type", "_layers")) and len(value) > LAYERS:
            default = getattr(fields.get(name), "default", None)
            made[name] = _shortened(value) if default is not None or name not in fields else None
    if "kv_lora_rank" in made:  # latent attention has no groups of heads
        made["num_key_value_heads"] = SMALL["num_attention_heads"]
    return made | SPECIAL.get(family, {})


def _shortened(values: list[Any]) -> list[Any]:
    """Returns as many values as layers, one of every kind if there is room."""
    kinds = list(dict.fromkeys(map(str, values)))[:LAYERS]
    some = [next(each for each in values if str(each) == kind) for kind in kinds]
    return (some * LAYERS)[:LAYERS]


def config_of(family: str, kind: str) -> Any:
    """Returns the family's small configuration."""
    found = CONFIG_MAPPING[family]
    default = found()
    other = next((each for each in OTHER_INPUTS if getattr(default, each, None) is not None), None)
    if other:
        raise NotText(f"not a model of text alone: it has a {other}")
    options = small(default, family)
    if kind == "causal" and getattr(default, "is_decoder", None) is False:
        options["is_decoder"] = True
    config = found(**options)
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SMALL["decoder_start_token_id"]
    return config


class NotText(Exception):
    """Raised for a family that is left out, because it is not a text model."""


def build(family: str, kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns a model in training mode with spread-out values, because initial values are so small that attention
    has hardly any effect."""
    config = config_of(family, kind)
    torch.manual_seed(0)
    try:
        model = KINDS[kind][1].from_config(config)
    except ImportError as error:
        raise NotText(str(error).strip().splitlines()[0]) from error
    count = sum(p.numel() for p in model.parameters())
    if count > MOST:
        raise NotText(f"still {count / 1e6:.0f} million parameters")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped_mm does not support float64
    with torch.no_grad():
        for p in model.to(dtype).parameters():
            if p.is_floating_point():
                p += 0.1 * torch.randn_like(p)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = model.generation_config.forced_bos_token_id = None
    return model.train()


def inputs_of(model: nn.Module, rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Returns a batch with labels."""
    ids = torch.randint(4, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids if not model.config.is_encoder_decoder else ids.flip(0)
    return {"input_ids": ids, "labels": labels}


def takes(model: nn.Module, name: str) -> bool:
    """Whether forward has this argument."""
    return name in inspect.signature(model.forward).parameters


def blocks_of(model: nn.Module) -> list[str]:
    """Returns the names of the model's blocks in order of registration: the members of the lists with most
    parameters."""
    lists = [(n, each) for n, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    outer = [(n, each) for n, each in lists if not any(n.startswith(f"{other}.") for other, _ in lists if other != n)]
    sizes = {name: sum(p.numel() for p in each.parameters()) for name, each in outer}
    large = [(name, each) for name, each in outer if 4 * sizes[name] >= max(sizes.values())]
    return [f"{name}.{i}" for name, each in large for i in range(len(each))]


# ---- plans --------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "query_proj", "key_proj", "value_proj", "q", "k", "v"),
    *("q_lin", "k_lin", "v_lin", "gate_proj", "up_proj", "fc1", "lin1", "wi", "wi_0", "wi_1", "intermediate.dense"),
    *("fc_in", "dense_h_to_4h", "w1", "w3", "c_fc", "project_q", "project_k", "project_v", "ffn"),
)
ROWS = (
    *("o_proj", "out_proj", "down_proj", "fc2", "out_lin", "lin2", "wo", "o", "attention.output.dense", "fc_out"),
    *("output.dense", "dense_4h_to_h", "w2", "mlp.c_proj", "ffn_output", "attention.dense", "attn.dense"),
)
COUNTED = (
    *("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("embed_dim", "all_head_size", "inner_dim", "attention_head_num"),
)


GPT2: dict[str, Any] = {
    "*.c_attn": Colwise(parts=3), "*.attn": "heads", "*.attn.c_proj": "rowwise", "*.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise", "*.wte": "vocab", "lm_head": "colwise_gather_output",
}  # fmt: skip


def plan_of(model: nn.Module) -> dict[str, Any]:
    """Returns a plan based on the names that most models give to their layers: pairs of layers split along outputs
    and inputs, the heads of the modules around them, and the norms of heads. Units for which these names are not
    sufficient stay whole: units with their own position biases, or with further parameters that would have to be
    split. Empty: there are no pairs."""
    if type(model).__name__ == "GPT2LMHeadModel":
        return GPT2
    linear = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    found: list[tuple[type[nn.Module], dict[str, Any]]] = []
    unfit: set[type[nn.Module]] = set()  # not split at all: T5's position biases exist only in the first block
    for unit in _units(model, linear):
        inside = [name for name in linear if name.startswith(f"{unit}.")]
        columns = [name for name in inside if _ends(name, COLUMNS)]
        rows = [name for name in inside if _ends(name, ROWS) and name not in columns]
        fits = len(rows) == 1 and linear[rows[0]].in_features in {linear[c].out_features for c in columns}
        chosen: dict[str, Any] = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
        for name, p in model.get_submodule(unit).named_parameters():
            owner = f"{unit}.{name}".rpartition(".")[0]
            if owner in linear:
                continue
            norm = p.dim() == 1 and "norm" in owner.rpartition(".")[2] and p.numel() == 8  # the norm of a head
            fits = fits and (norm or owner.startswith(tuple(f"{each}.dense" for each in rows)) or _behind(owner, rows))
            if norm:
                chosen[owner] = "summed"
        kind = type(model.get_submodule(unit))
        if not fits:
            unfit.add(kind)
            continue
        for owner in {name.rpartition(".")[0] for name in columns}:
            module = model.get_submodule(owner)
            counts = tuple(each for each in COUNTED if type(getattr(module, each, None)) is int)
            if counts and len(columns) >= 3:
                chosen[owner] = Heads(counts)
        found.append((kind, chosen))
    return {name: style for kind, chosen in found if kind not in unfit for name, style in chosen.items()}


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    return f".{name}".endswith(tuple(f".{each}" for each in ends))


def _behind(owner: str, rows: list[str]) -> bool:
    """Whether a module is the sibling, in its own submodule, of a layer split along inputs, like BERT's norms."""
    return any(owner.rpartition(".")[0] == row.rpartition(".")[0] and "output" in row for row in rows)


def _units(model: nn.Module, linear: Mapping[str, nn.Module]) -> list[str]:
    """Returns the smallest modules that contain a layer for columns and one for rows."""
    found: list[str] = []
    for name in sorted((name for name, _ in model.named_modules() if name), key=lambda name: -name.count(".")):
        inside = [each for each in linear if each.startswith(f"{name}.")]
        pair = any(_ends(each, COLUMNS) for each in inside) and any(_ends(each, ROWS) for each in inside)
        if pair and not any(each.startswith(f"{name}.") for each in found):
            found.append(name)
    return found


# ---- pipelines ------------------------------------------------------------------------------------------------------


def order_of(model: nn.Module, at: str, run: Callable[[], Any]) -> list[str]:
    """Returns ``order`` for a split: the modules around it in the order in which ``run`` first calls them; empty if
    that is the order of registration."""
    first: dict[str, int] = {}

    def note(name: str) -> None:
        first.setdefault(name, len(first))

    hooks = [
        each.register_forward_pre_hook(lambda _, args, name=name: note(name)) for name, each in model.named_modules()
    ]
    run()
    for each in hooks:
        each.remove()
    around, level = [], [""]
    while level:
        name = level.pop()
        for key, _ in model.get_submodule(name).named_children():
            path = f"{name}.{key}" if name else key
            (level if at.startswith(f"{path}.") else around).append(path)
    registered = [name for name, _ in model.named_modules() if name in around]

    def call(name: str) -> int:
        return min([at for each, at in first.items() if f"{each}.".startswith(f"{name}.")], default=-1)

    called = [name for name in registered if call(name) >= 0]
    order = sorted(called, key=call)
    return order if order != called else []
