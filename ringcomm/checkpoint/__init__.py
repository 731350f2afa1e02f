"""Checkpoints: save at one stage and world size, load at another, and go on.

    ringcomm.checkpoint.save("run/step100", model, optimizer, step=100, rng=torch.get_rng_state())
    extra = ringcomm.checkpoint.load("run/step100", model, optimizer)
    ringcomm.checkpoint.export("run/step100", "model.safetensors")

Every rank writes its own part of every tensor under the tensor's ordinary name and in its ordinary shape, in the format
of torch.distributed.checkpoint. A plain process reads the module with ``dcp.load(module.state_dict(),
checkpoint_id=path)``.

Of a model that is cut over a mesh the tensors are the whole model's, put together from the ranks' parts, as if one
process had saved it: a checkpoint does not know how it was cut, and is loaded with any other cut, or none.

    NAME                          parameters, as the optimizer has them (master weights), and buffers
    optimizer.state.NAME.KEY      the optimizer's state
    optimizer.param_groups        hyperparameters, and the names of each group's parameters
    optimizer.about, ringcomm.*   what was saved beside, and what differed between the ranks
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm.checkpoint.files import Source, Written, beside, finish, write
from ringcomm.checkpoint.loading import Loading
from ringcomm.checkpoint.parts import flat_of
from ringcomm.checkpoint.state import ByRank as ByRank
from ringcomm.checkpoint.state import Saving
from ringcomm.checkpoint.world import World
from ringcomm.data_parallel.arguments import DTYPE, MODULE, OPTIMIZER
from ringcomm.errors import UnsupportedError
from ringcomm.validation import PATH, expects


@expects("save", path=PATH, model=MODULE, optimizer=OPTIMIZER)
def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any
) -> None:
    """Saves a sharded module, its optimizer and whatever else is to be there on resuming; a collective, of all ranks of
    the mesh where there is one.

    What had the path stays until all of the new checkpoint is written, and is then replaced at once. Gradients are not
    saved: save between two steps.

    Args:
        path: a folder that all ranks see.
        optimizer: of `ringcomm.shard`, or at stage 0 a plain one over the module's parameters.
            Of a pipeline every stage has its own, with the same groups, of which some may be empty.
        extra: tensors, numbers, strings, and lists, tuples and dicts of these. Where the ranks' values differ, as those
            of random generators do, each rank's is kept; so it is with buffers.
    Cost:    each rank writes 1/W of parameters and state, also at stage 0, and reads it back for its checksums (W ranks
             share the shards; what tensor parallel ranks have whole the first of them writes); between ranks only the
             list of what was written travels. Memory: 128 MiB, and one part of a tensor at a time.
    Raises:  InvalidArgumentError: a module or an optimizer that is not sharded, an extra that cannot be loaded safely,
             stages whose optimizers have other groups.
             UnsupportedError: an optimizer's state of another shape than its parameter, which is cut: factored moments.
             EngineError: the operating system refused to write. On every rank; the old checkpoint is there then.
    """
    flat, path = flat_of(model, "save"), Path(path)
    world = World(flat.ranks, "save")
    saving = Saving(flat, optimizer, extra, world)
    facts = world.together(saving.look)
    folder = world.together(lambda: beside(path) if world.rank == 0 else None)[0]
    try:
        written: list[Written] = world.together(lambda: write(folder, world.rank, saving.outgoing(facts)))
        world.together(lambda: finish(folder, path, written) if world.rank == 0 else None)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


@expects("load", path=PATH, model=MODULE, optimizer=OPTIMIZER)
def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Loads what `save` has saved, at any stage, world size, bucket size and mesh; a collective, of all ranks of the
    mesh where there is one.

    Training goes on as if it had not been interrupted, with the same bits on the same mesh. A checkpoint that
    torch.distributed.checkpoint has saved from a module's state dict serves too. Gradients stay as they are.

    Returns: ``extra``. Where the ranks' values differed: this rank's, or on another mesh, or at another world size, a
             `ByRank` of all. Buffers that differed are this rank's, or on another mesh the first rank's that had them.
    Cost:    each rank reads what it keeps, and holds it twice for a moment, in the host's memory; stages 1 and 2 gather
             the parameters. Random access to the files.
    Raises:  InvalidArgumentError (ShapeError, DtypeError): a checkpoint of another model or optimizer, or a damaged
             one; names parameter and rank. On every rank, before anything is changed.
    """
    flat = flat_of(model, "load")
    world = World(flat.ranks, "load")
    loading = Loading(flat, optimizer, world)
    everyone = world.together(loading.look)
    world.together(lambda: loading.read(Path(path), everyone))
    with torch.no_grad():
        loading.commit()
    return loading.extra


@expects("export", path=PATH, file=PATH, dtype=DTYPE)
def export(path: str | os.PathLike[str], file: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Writes a checkpoint's parameters and buffers as one safetensors file; in one process, without a communicator.

    Tied parameters are written once; ``safetensors.torch.load_model`` ties them again.

    Args:
        dtype: of floating point tensors in the file; None: as they were saved.
    Cost:    memory for all parameters.
    Raises:  UnsupportedError: safetensors is not installed. InvalidArgumentError: no checkpoint, or a damaged one.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UnsupportedError(
            "export: rank 0 got no package safetensors, expected one that writes the file; run pip install safetensors"
        ) from error
    source = Source(Path(path), "export", 0)
    tensors: dict[str, torch.Tensor] = {}
    first: dict[Any, str] = {}
    about = {"format": "pt"}
    for name, facts in source.tensors.items():
        if len(source.paths[name]) > 1:
            continue
        where = source.place(name)
        if facts.size.numel() and where in first:
            about[name] = first[where]
            continue
        first[where] = name
        values = source.tensor(name)
        tensors[name] = values.to(dtype) if dtype is not None and values.is_floating_point() else values
    partial = Path(file).with_name(f".{Path(file).name}.saving")
    save_file(tensors, partial, metadata=about)
    partial.replace(file)
