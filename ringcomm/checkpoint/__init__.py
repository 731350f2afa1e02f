"""Checkpoints: save at one stage and world size, and resume at another.

    ringcomm.checkpoint.save("run/step100", model, optimizer, step=100, rng=torch.get_rng_state())
    extra = ringcomm.checkpoint.load("run/step100", model, optimizer)
    ringcomm.checkpoint.export("run/step100", "model.safetensors")

Every rank writes its own part of every tensor under the tensor's usual name and in its usual shape, in the format of
torch.distributed.checkpoint. A process without ringcomm can read the module with ``dcp.load(module.state_dict(),
checkpoint_id=path)``.

If a model is split over a mesh, the checkpoint holds the whole model's tensors, put together from the ranks' parts, as
if one process had saved them. A checkpoint does not record the split, and can be loaded with any other split, or none.

    NAME                          parameters, as the optimizer has them (master weights), and buffers
    optimizer.state.NAME.KEY      the optimizer's state
    optimizer.param_groups        hyperparameters, and the names of each group's parameters
    optimizer.about, ringcomm.*   extra values, and values that differed between the ranks
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm.checkpoint.contents import flat_of
from ringcomm.checkpoint.files import Source, WriteReport, finish, make_saving_folder, write
from ringcomm.checkpoint.loading import Loader
from ringcomm.checkpoint.state import ByRank, Saver
from ringcomm.checkpoint.world import World
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import DTYPE, MODULE, OPTIMIZER
from ringcomm.terminal import Progress
from ringcomm.validation import PATH, expects

__all__ = ["ByRank", "export", "load", "save"]


@expects("save", path=PATH, model=MODULE, optimizer=OPTIMIZER)
def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any
) -> None:
    """Saves a sharded module, its optimizer and other values needed for resuming; a collective of all ranks, including
    all ranks of a mesh.

    An existing checkpoint at the path stays until all of the new one is written, and is then replaced atomically. If
    the path is a symbolic link, it stays, and the folder that it names is replaced. Gradients are not saved: save
    between two steps.

    Args:
        path: a folder that all ranks can access.
        optimizer: an optimizer of `ringcomm.shard`, or at stage 0 a plain one over the module's parameters. In a
            pipeline every stage has its own, with the same groups, some of which may be empty.
        extra: tensors, NumPy arrays, numbers, strings, and lists, tuples and dicts of these. If the ranks' values
            differ, as those of random generators do, each rank's value is kept. Buffers are handled in the same way.
    Cost:    each rank writes 1/W of parameters and state, even at stage 0, and reads them back for their checksums (W
             ranks share the shards; the first of the tensor parallel ranks writes the tensors that all of them have
             whole); ranks exchange only the list of what was written. Memory: 128 MiB, and one part of a tensor at a
             time.
    Raises:  InvalidArgumentError: a module or an optimizer that is not sharded, an extra that cannot be loaded safely,
             a folder that holds other files, another path on another rank, or pipeline stages whose optimizers have
             different groups.
             UnsupportedError: optimizer state with another shape than its sharded parameter, such as factored moments,
             or under keys that are neither parameters nor strings. EngineError: the operating system refused to write.
             All ranks raise, and the old checkpoint remains.
    """
    flat, path = flat_of(model, "save"), Path(path)
    world = World(flat.ranks, "save")
    with Progress(f"save {path}", shows=world.rank == 0):
        _save(flat, optimizer, extra, world, path)


def _save(flat: Any, optimizer: Any, extra: dict[str, Any], world: World, path: Path) -> None:
    saver = Saver(flat, optimizer, extra, world)
    paths, facts = zip(*world.run_together(lambda: (os.fspath(path), saver.facts())), strict=True)
    world.refuse_another("path", path, paths)
    path, folder = world.run_together(lambda: _folders(path) if world.rank == 0 else None)[0]
    try:
        written: list[WriteReport] = world.run_together(lambda: write(folder, world.rank, saver.planner([*facts])))
        world.run_together(lambda: finish(folder, path, written) if world.rank == 0 else None)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _folders(path: Path) -> tuple[Path, Path]:
    """Returns the folder to replace, and the temporary folder to write into; if ``path`` is a link, the link stays."""
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    return path, make_saving_folder(path)


@expects("load", path=PATH, model=MODULE, optimizer=OPTIMIZER)
def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Loads what `save` has saved, at any stage, world size, bucket size and mesh; a collective of all ranks, including
    all ranks of a mesh.

    Training continues as if it had not been interrupted, with the same bits on the same mesh. A checkpoint that
    torch.distributed.checkpoint has saved from a module's state dict can be loaded, too. Gradients stay as they are.

    Returns: ``extra``. If the ranks' values differed: this rank's value, or, with another mesh or world size, a
             `ByRank` of all. Buffers that differed are this rank's, or with another mesh those of the first rank that
             had them.
    Cost:    each rank reads the values that it keeps, and temporarily holds them twice in host memory; stages 1 and 2
             gather the parameters. The files are accessed randomly.
    Raises:  InvalidArgumentError (ShapeError, DtypeError): a checkpoint of another model or optimizer, a damaged one,
             or another one on another rank; names parameter and rank. All ranks raise, before anything is changed.
    """
    flat = flat_of(model, "load")
    world = World(flat.ranks, "load")
    with Progress(f"load {os.fspath(path)}", shows=world.rank == 0):
        loader = Loader(flat, optimizer, world)
        everyone = world.run_together(loader.facts)
        world.refuse_another("checkpoint", Path(path), world.run_together(lambda: loader.read(Path(path), everyone)))
        with torch.no_grad():
            loader.commit()
    return loader.extra


@expects("export", path=PATH, file=PATH, dtype=DTYPE)
def export(path: str | os.PathLike[str], file: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Writes a checkpoint's parameters and buffers as one safetensors file; in one process, without a communicator.

    Tied parameters are written once; ``safetensors.torch.load_model`` ties them again.

    Args:
        file: its name; folders that are missing are made, as by `save`.
        dtype: type of floating point tensors in the file; None: the type in which they were saved.
    Cost:    memory for all parameters.
    Raises:  UnsupportedError: safetensors is not installed. InvalidArgumentError: no checkpoint, or a damaged one.
    """
    if Path(file).suffix.lower() in (".pt", ".pth", ".bin", ".ckpt"):
        raise InvalidArgumentError(
            f"export: rank 0 got {Path(file).name}, a name that torch.load reads, expected one that ends in "
            ".safetensors; pass such a name, or torch.save the model's state_dict()"
        )
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UnsupportedError(
            "export: rank 0 found no package safetensors, which writes the file; run pip install safetensors"
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
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    partial = Path(file).with_name(f".{Path(file).name}.saving")
    save_file(tensors, partial, metadata=about)
    partial.replace(file)
