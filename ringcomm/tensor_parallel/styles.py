"""The styles that a plan of `ringcomm.parallelize` gives to modules, as objects and by name."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Several
from dataclasses import dataclass

COUNTS = (
    "num_heads", "num_head", "n_heads", "n_head", "nheads", "nhead", "n_local_heads", "heads", "split_size"
)  # fmt: skip
"""Attributes that count heads and that modules usually compute with."""
HEADS = (*COUNTS, "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "embed_dim")
"""Attributes of an attention module that `Heads` divides when it names none."""


@dataclass(frozen=True)
class Colwise:
    """A linear layer sharded along its outputs; or a one-dimensional parameter with a value for each head.

    Args:
        gather_output, parts, pad: as in ColumnParallelLinear; a number for ``parts`` stands for that many equal ones.
    """

    gather_output: bool = False
    parts: int | Several[int] | None = None
    pad: bool = False


@dataclass(frozen=True)
class Rowwise:
    """A linear layer sharded along its inputs.

    Args:
        input_is_parallel: as in RowParallelLinear.
    """

    input_is_parallel: bool = True


@dataclass(frozen=True)
class Vocab:
    """An embedding sharded along its vocabulary.

    Args:
        scatter: whether its output is this rank's part of the sequence; needs ``sequence_dim``.
    """

    scatter: bool = False


@dataclass(frozen=True)
class Heads:
    """An attention module that computes with a rank's share of the heads.

    Args:
        attributes: integers of the module to divide by the number of ranks; empty: those of `HEADS` that it has.
    """

    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experts:
    """A module with the weights of all experts of a mixture, as three-dimensional parameters: a rank has a part of each
    expert's features.

    Args:
        inner: the parameter (experts, parts x features, inputs), sharded along its outputs.
        outer: the parameter (experts, outputs, features), sharded along its inputs.
        parts: the number of outputs that are fused in ``inner``: gate and up.
    """

    inner: str = "gate_up_proj"
    outer: str = "down_proj"
    parts: int = 2


@dataclass(frozen=True)
class Latent:
    """A linear layer that every rank has unsharded, and whose last outputs go directly to a rank's own heads, such as
    the rotated part of the keys in latent attention: the gradients of these outputs are summed.

    Args:
        last: the number of these outputs; 0: ``qk_rope_head_dim`` of the module that the layer belongs to, or of its
            config.
    """

    last: int = 0


@dataclass(frozen=True)
class Dropout:
    """Dropout on a tensor that is sharded along ``dim``, such as the attention weights of a rank's heads."""

    dim: int


class ModuleStyle(enum.Enum):
    """A style of a module whose parameters every rank has unsharded."""

    SUMMED = "summed"
    """Every rank applies the module to its own part of a tensor, such as a norm of a rank's heads: the gradients of its
    parameters are summed."""
    SEQUENCE = "sequence"
    """The module works on this rank's part of the sequence: a norm, whose gradients are summed, or dropout."""
    SEQUENCE_REGION = "sequence_region"
    """The module, or a list of modules from first to last, gets this rank's part of the sequence, and its output is
    gathered: the first tensor of input and output. Every module inside that has parameters or drops elements needs a
    style."""
    GATHER_SEQUENCE = "gather_sequence"
    """In a sequence region, the module's first tensor is gathered once, for all layers in it: for modules that read the
    sequence's length from their input, such as attention. Its layers that are sharded along outputs use the gathered
    input."""
    REPLICATE = "replicate"
    """The module stays unchanged."""


Style = Colwise | Rowwise | Vocab | Heads | Experts | Latent | Dropout | ModuleStyle


def name_of(style: Style) -> str:
    """Returns a style's name for errors."""
    return style.value if isinstance(style, ModuleStyle) else type(style).__name__


STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(gather_output=True, pad=True),
    "colwise_rep": Colwise(gather_output=True, pad=True),
    "packed_colwise": Colwise(parts=2),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(input_is_parallel=False),
    "rowwise_rep": Rowwise(input_is_parallel=False),
    "vocab": Vocab(),
    "embedding_rowwise": Vocab(),
    "heads": Heads(),
    "experts": Experts(),
    "moe_tp_experts": Experts(),
    "summed": ModuleStyle.SUMMED,
    "replicated_with_grad_allreduce": ModuleStyle.SUMMED,
    "latent": Latent(),
    "mla_kv_a_proj": Latent(),
    "sequence": ModuleStyle.SEQUENCE,
    "sequence_parallel": ModuleStyle.SEQUENCE,
    "sequence_region": ModuleStyle.SEQUENCE_REGION,
    "gather_sequence": ModuleStyle.GATHER_SEQUENCE,
    "replicate": ModuleStyle.REPLICATE,
}
"""The names of styles in a plan, including those that transformers uses in its models' ``_tp_plan``."""

FOREIGN = (
    "packed_rowwise", "embedding_colwise", "all_reduce", "local_params", "moe_identity_expert", "grouped_gemm",
    "ep_router", "ep_dispatch_experts",
)  # fmt: skip
"""Styles of transformers that are not supported, such as those that assign different experts to different ranks."""
