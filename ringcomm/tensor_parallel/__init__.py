"""Tensor and sequence parallelism: layers sharded over the ranks of a communicator, and plans that shard a module's
layers."""

from ringcomm.tensor_parallel.dropout import ShardedDropout
from ringcomm.tensor_parallel.group import TensorParallelGroup, f, f_bar, g, g_bar, gather, scatter
from ringcomm.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ringcomm.tensor_parallel.loss import vocab_parallel_cross_entropy
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import (
    STYLES,
    Colwise,
    Dropout,
    Experts,
    Heads,
    Latent,
    ModuleStyle,
    Rowwise,
    Vocab,
)

__all__ = [
    "STYLES",
    "ColumnParallelLinear",
    "Colwise",
    "Dropout",
    "Experts",
    "Heads",
    "Latent",
    "ModuleStyle",
    "RowParallelLinear",
    "Rowwise",
    "ShardedDropout",
    "TensorParallelGroup",
    "Vocab",
    "VocabParallelEmbedding",
    "f",
    "f_bar",
    "g",
    "g_bar",
    "gather",
    "parallelize",
    "scatter",
    "vocab_parallel_cross_entropy",
]
