"""`ringcomm.context_parallel`: ring attention for models that call torch's attention or that of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.mesh import refuse_mesh
from ringcomm.context import huggingface
from ringcomm.context.mode import CALL, CURRENT, ContextParallelMode, current, has_transformers
from ringcomm.context.sequence import check_layout
from ringcomm.validation import FLAG, expects


@expects(CALL, overlap=FLAG, local=FLAG)
@contextmanager
def context_parallel(
    comm: Communicator, *, layout: str = "zigzag", overlap: bool = True, local: bool = False
) -> Iterator[None]:
    """Inside, ``torch.nn.functional.scaled_dot_product_attention`` of this thread is `ring_attention` over ``comm``.

    A model that attends through this function works on parts of a sequence without changes, if it is given the parts'
    `positions` where it uses positions. ``is_causal``, ``scale`` and ``enable_gqa`` have their usual meaning;
    ``attn_mask`` may hide keys of this rank's part from all queries (B, 1, 1, S/W). With activation checkpointing, call
    ``loss.backward()`` inside as well, since it computes the attention again. Outside, or with ``inputs=`` or
    torch.autograd.grad, checkpoints raise CheckpointError. Checkpoints with ``use_reentrant=True`` do not raise:
    outside they would continue with attention within a rank's part. Over one rank the context changes nothing.

    For models of Hugging Face transformers it supports attn_implementation "sdpa", and "eager" for most models (which
    returns no weights here), with softcaps, sliding windows, and this rank's part of ``attention_mask``. A DynamicCache
    that was filled inside (without windows) may be used for decoding inside: every rank passes the same new tokens, and
    their positions in the complete sequence.

    Operations that mix tokens in other ways stay within a rank's part. They raise where they are detected: softmax
    weights that are multiplied with values, convolutions over the sequence, recurrent layers, Fourier transforms,
    running sums, tokens shifted by a pad or roll, labels that a loss of transformers shifts (pass ``shift_labels``), a
    loss from one token or all tokens of each sequence, from products that sum over tokens or pair them, or from tokens
    shifted by a slice, and layers other than attention in a configuration of transformers. A backward pass, or the end
    of the context, also raises where linear layers but no attention have been computed inside.

    Args:
        layout, overlap: as in `ring_attention`.
        local: True: operations that mix tokens in other ways are meant to stay within a rank's part, or there are none.
    Raises:  in a call inside: as `ring_attention`; UnsupportedError: another attn_mask, dropout_p other than 0,
             nn.MultiheadAttention, and the operations named above; InvalidArgumentError: positions that are not those
             of the part.
    """
    refuse_mesh(comm, CALL, "cp")
    check_layout(layout, CALL, comm.rank)
    if comm.world_size == 1:
        yield
        return
    if has_transformers():
        huggingface.install()
    mode, before = ContextParallelMode(comm, layout, overlap, local), current()
    CURRENT.mode = mode
    try:
        with mode:
            yield
            mode.check_attended()
    finally:
        CURRENT.mode = before
