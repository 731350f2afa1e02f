"""What a plan of `ringcomm.parallelize` can say of a module, as objects and by name."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

HEADS = (
    "num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads",
    "n_kv_heads", "split_size", "embed_dim",
)  # fmt: skip
"""Attributes of an attention module that `Heads` divides when it names none."""


@dataclass(frozen=True)
class Colwise:
    """A linear layer cut along its outputs; or a parameter of one dimension, with a value for each head.

    Args:
        gather_output, parts, pad: as of ColumnParallelLinear; a number for ``parts`` are that many equal ones.
    """

    gather_output: bool = False
    parts: int | Several[int] | None = None
    pad: bool = False


@dataclass(frozen=True)
class Rowwise:
    """A linear layer cut along its inputs.

    Args:
        input_is_parallel: as of RowParallelLinear.
    """

    input_is_parallel: bool = True


@dataclass(frozen=True)
class Vocab:
    """An embedding cut along its vocabulary.

    Args:
        scatter: with ``sequence_dim``: whether its output is this rank's part of the sequence.
    """

    scatter: bool = False


@dataclass(frozen=True)
class Heads:
    """An attention module that computes with a rank's share of the heads.

    Args:
        attributes: whole numbers of the module to divide by the ranks; none: those of `HEADS` that it has.
    """

    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experts:
    """A module with the weights of all experts of a mixture, as parameters of three dimensions: a rank has a part of
    each expert's features.

    Args:
        inner: the parameter (experts, parts x features, inputs), cut along its outputs.
        outer: the parameter (experts, outputs, features), cut along its inputs.
        parts: how many outputs are fused in ``inner``: gate and up.
    """

    inner: str = "gate_up_proj"
    outer: str = "down_proj"
    parts: int = 2


@dataclass(frozen=True)
class Summed:
    """A module that all ranks have whole, but use on their own part of something, such as a norm of a rank's heads: the
    gradients of its parameters are summed."""


@dataclass(frozen=True)
class Latent:
    """A linear layer that all ranks have whole, whose last outputs go to a rank's own heads without another layer in
    between, such as the rotated part of the keys in latent attention: the gradients of these outputs are summed.

    Args:
        last: how many outputs; 0: ``qk_rope_head_dim`` of the module that the layer belongs to, or of its config.
    """

    last: int = 0


@dataclass(frozen=True)
class OnSequence:
    """A module that works on this rank's part of the sequence: norms, whose gradients are summed, and dropout."""


@dataclass(frozen=True)
class SequenceRegion:
    """A module, or the first to the last of a list, that gets this rank's part of the sequence, and whose output is
    brought together again: the first tensor of each. What has parameters or drops in it needs a style."""


@dataclass(frozen=True)
class GatherSequence:
    """A module in a sequence region whose first tensor is brought together once, for all layers in it: one that reads
    the sequence's length from its input, such as an attention module. Its layers cut along outputs read that input."""


@dataclass(frozen=True)
class Dropout:
    """Dropout on a tensor that is cut along ``dim``, such as the attention weights of a rank's heads."""

    dim: int


@dataclass(frozen=True)
class Whole:
    """A module that stays as it is."""


Cut = Colwise | Rowwise | Vocab | Heads | Experts | Dropout
Style = Cut | Summed | Latent | OnSequence | SequenceRegion | GatherSequence | Whole

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
    "summed": Summed(),
    "replicated_with_grad_allreduce": Summed(),
    "latent": Latent(),
    "mla_kv_a_proj": Latent(),
    "sequence": OnSequence(),
    "sequence_parallel": OnSequence(),
    "sequence_region": SequenceRegion(),
    "gather_sequence": GatherSequence(),
    "replicate": Whole(),
}
"""The names of styles in a plan; also those that transformers uses in its models' ``_tp_plan``."""

FOREIGN = (
    "packed_rowwise", "embedding_colwise", "all_reduce", "local_params", "moe_identity_expert", "grouped_gemm",
    "ep_router", "ep_dispatch_experts",
)  # fmt: skip
"""Styles of transformers that are not here, such as those of experts that are dealt out."""
