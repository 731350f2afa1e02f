"""Tensor and sequence parallel: layers cut over the ranks of a communicator, and plans that cut those of a module."""

from ringcomm.tensor.dropout import ShardedDropout
from ringcomm.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ringcomm.tensor.loss import vocab_parallel_cross_entropy
from ringcomm.tensor.plan import parallelize
from ringcomm.tensor.regions import Region, f, f_bar, g, g_bar, gather, scatter
from ringcomm.tensor.styles import (
    STYLES,
    Colwise,
    Dropout,
    Experts,
    GatherSequence,
    Heads,
    Latent,
    OnSequence,
    Rowwise,
    SequenceRegion,
    Vocab,
)

__all__ = [
    "STYLES",
    "ColumnParallelLinear",
    "Colwise",
    "Dropout",
    "Experts",
    "GatherSequence",
    "Heads",
    "Latent",
    "OnSequence",
    "Region",
    "RowParallelLinear",
    "Rowwise",
    "SequenceRegion",
    "ShardedDropout",
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
