"""Context parallel training: a sequence is split over the ranks, and keys and values travel round them in a ring."""

from ringcomm.context.attention import ring_attention
from ringcomm.context.parallel import context_parallel
from ringcomm.context.sequence import gather_sequence, positions, shard_sequence

__all__ = ["context_parallel", "gather_sequence", "positions", "ring_attention", "shard_sequence"]
