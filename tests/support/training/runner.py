"""Runs a program of `training.programs` in every placement, and compares what they give bit by bit.

    plain     no wrapper: the loop averages the gradients itself, as the definition says; what the others must equal
    torch     torch's DistributedDataParallel over the backend "ringcomm", with `ringcomm.hooks.attach`'s hook
    ddp       ringcomm.DistributedDataParallel
    stage 0..3

Ranks are threads that live from program to program, or processes. An error ends them; the next placement starts new
ones.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import queue
import random
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of programs that use all parameters

import torch
import torch.distributed as dist
from torch import nn

import ringcomm
from ringcomm import backend
from ringcomm.data_parallel import hooks
from tests.support import torch_ranks
from tests.support.training import models
from tests.support.training.models import Boom, Net, batch, build, loss_of, unwrapped
from tests.support.training.programs import FEATURES, Program, shrunk

Seen = list[tuple[str, torch.Tensor]]
PLACEMENTS = ("plain", "torch", "ddp", "stage 0", "stage 1", "stage 2", "stage 3")
STAGES = PLACEMENTS[3:]
SOMETIMES_UNUSED = ("partly", "experts")
WHOLE_TENSORS = ("adafactor", "muon")
CALL_LIMIT_S = 20.0

# What a placement cannot run; see also `places_of`.
NOT_PLAIN = {"mixed_precision", "accumulate.tree"}
NOT_DDP = NOT_PLAIN | {"offload", "restage"}
NOT_TORCH = NOT_DDP | {"two_backwards", "freeze_later", "checkpoint.reentrant", "accumulate.each"}


def places_of(program: Program) -> list[str]:
    """The placements that can run a program; the first is what the others are compared with."""
    features = set(program.features)
    if "autocast" in features and any(block.kind == "lstm" for block in program.blocks) and not _autocasts_lstm():
        return []
    first = [call for call in program.calls if call.block == 0]
    if "exception" in features and first and all("rank_skip" in call.flags for call in first):
        return []  # a pass that raises on some ranks alone: the next forward pass sends buffers from some alone
    skipped = any("rank_skip" in call.flags for call in program.calls)
    found = [] if features & NOT_PLAIN else ["plain"]
    found += [] if features & NOT_TORCH or _confuses_torch(program) else ["torch"]
    found += [] if features & NOT_DDP or _waits_for_a_dropped_pass(program) else ["ddp"]
    return [*found, *(STAGES[:3] if skipped else STAGES)]


@cache
def _autocasts_lstm() -> bool:
    """Whether torch runs an LSTM in 16 bits under autocast on this machine, which needs AVX-512."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            nn.LSTM(4, 4)(torch.zeros(1, 1, 4))
        except RuntimeError:
            return False
    return True


def _waits_for_a_dropped_pass(program: Program) -> bool:
    """Whether a pass inside of no_sync reduces, as in torch, because a forward pass outside had no backward pass."""
    raises = any(call.block == 0 and not {"rank_skip", "step_skip"} & {*call.flags} for call in program.calls)
    dropped = "dropped_forward" in program or ("exception" in program and not raises)
    return "accumulate.no_sync" in program and dropped


def _confuses_torch(program: Program) -> bool:
    """Whether torch's DDP takes a pass inside of no_sync for one that it waits for, or one that raised; looks for
    unused parameters in the last forward pass alone; or adds a gradient that nobody set to zero before it reduces, and
    the norm shows it."""
    passes = {"two_forwards", "dropped_forward", "exception"} & program.features
    waits = "accumulate.no_sync" in program and passes
    clips = {"clip", "clip.torch"} & program.features and "model_zero_grad" not in program
    twice = "two_forwards" in program and any(block.kind in SOMETIMES_UNUSED for block in program.blocks)
    return bool(waits or twice or (clips and (program.optimizer == "muon" or "optimizer.subset" in program)))


# ---- the wrappers ------------------------------------------------------------------------------------------------


class Plain:
    """No wrapper: every rank has a plain module, and gradients are averaged as the definition says."""

    def __init__(self, program: Program, comm: ringcomm.Communicator, stage: int) -> None:
        self.program, self.comm, self.stage = program, comm, stage
        self.syncs = self.sends = True
        self.local: dict[nn.Parameter, torch.Tensor | None] = {}

    def wrap(self, net: Net, optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> None:
        """Sets ``model``, which the loop calls, and ``optimizers``."""
        self.net = self.model = net
        if "init_differs" in self.program:
            self.send([*net.parameters(), *net.buffers()])
        elif any(True for _ in net.buffers()):
            self.send(list(net.buffers()))
        self.optimizers = optimizers(net)

    def send(self, tensors: list[torch.Tensor]) -> None:
        for x in tensors:
            self.comm.broadcast(x.data, 0)  # as in torch's DDP, a backward pass may have saved the buffer

    def forward(self, *args: Any) -> Any:
        """Begins with rank 0's buffers, but for a pass that follows one without synchronisation, as torch's does."""
        if self.sends and "no_broadcast" not in self.program:
            self.send(list(self.net.buffers()))
        output = self.model(*args)
        self.sends = self.syncs and torch.is_grad_enabled()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Local sums are added to local sums, means to means."""
        params = [p for p in self.net.parameters() if p.requires_grad]
        before = {p: p.grad for p in params}
        for p in params:
            p.grad = self.local.pop(p, None)
        loss.backward(retain_graph=retain_graph)
        if self.syncs:
            self.average(params)
        for p in params:
            found, mean = p.grad, before[p]
            if not self.syncs:
                self.local[p], p.grad = found, mean
            elif mean is not None:
                p.grad = mean if found is None else mean + found

    def average(self, params: list[nn.Parameter]) -> None:
        used = torch.tensor([p.grad is not None for p in params], dtype=torch.int32)
        self.comm.all_reduce(used, "max")
        chosen = [p for p, u in zip(params, used.tolist(), strict=True) if u]
        for dtype in sorted({p.dtype for p in chosen}, key=str):
            some = [p for p in chosen if p.dtype == dtype]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            if flat.numel():
                self.comm.all_reduce(flat, "avg")
            for p, mean in zip(some, flat.split([p.numel() for p in some]), strict=True):
                p.grad = torch.empty_like(p).copy_(mean.view(p.shape))  # as autograd lays it out

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return clip_by_exact_norm(list(self.net.parameters()), max_norm, norm_type)

    def restage(self, stage: int) -> None:
        for p in self.net.parameters():
            p.grad = None


def clip_by_exact_norm(params: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
    """The norm, from a sum without rounding."""
    values = [x for p in params if p.grad is not None for x in p.grad.double().reshape(-1).abs().tolist()]
    if norm_type == math.inf:
        norm = max(values, default=0.0)
    else:
        norm = math.fsum(values) if norm_type == 1 else math.sqrt(math.fsum(x * x for x in values))
    wide = any(p.dtype == torch.float64 for p in params if p.requires_grad)
    found = torch.tensor(norm, dtype=torch.float64).to(torch.float64 if wide else torch.float32)
    factor = torch.clamp(max_norm / (found + 1e-6), max=1.0)
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype))
    return found


class Torch(Plain):
    """torch's DistributedDataParallel."""

    group: Any = None

    def wrap(self, net: Net, optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> None:
        self.net = net
        self.model = nn.parallel.DistributedDataParallel(
            net,
            process_group=self.group,
            find_unused_parameters=True,
            bucket_cap_mb=self.program.bucket_cap_mb,
            broadcast_buffers="no_broadcast" not in self.program,
        )
        self.model.register_comm_hook(self.comm, hooks.all_reduce_hook)
        self.optimizers = optimizers(net)

    def forward(self, *args: Any) -> Any:
        return self.model(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)


class Ddp(Torch):
    """ringcomm.DistributedDataParallel."""

    def wrap(self, net: Net, optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> None:
        self.net = net
        self.model = ringcomm.DistributedDataParallel(
            net,
            self.comm,
            bucket_cap_mb=self.program.bucket_cap_mb,
            broadcast_buffers="no_broadcast" not in self.program,
        )
        self.optimizers = optimizers(net)

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return ringcomm.clip_grad_norm_(self.model, max_norm, norm_type)


class Sharded(Ddp):
    """ringcomm.shard."""

    def wrap(self, net: Net, optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> None:
        program = self.program
        later = "optimizer_later" in program or "two_optimizers" in program
        made = [] if later else optimizers(net)
        options: dict[str, Any] = {"units": self.units(net)} if self.units(net) else {}
        if later and program.optimizer in WHOLE_TENSORS:
            options["atom"] = "tensor"  # nothing says it when the module is wrapped
        if "mixed_precision" in program:
            options["mixed_precision"] = ringcomm.MixedPrecision(param_dtype=torch.bfloat16)
        ringcomm.shard(
            net,
            made[0] if made else None,
            self.stage,
            self.comm,
            bucket_cap_mb=program.bucket_cap_mb,
            reshard_after_forward="no_reshard" not in program,
            broadcast_buffers="no_broadcast" not in program,
            accumulation="tree" if "accumulate.tree" in program else "sequential",
            offload="offload" in program,
            **options,
        )
        self.net = self.model = net
        self.optimizers = made or optimizers(net)

    def units(self, net: Net) -> list[nn.Module] | None:
        """The blocks that the program names as units."""
        skipped = {call.block for call in self.program.calls if "rank_skip" in call.flags}
        blocks = [block for block in net.blocks.children() if block.block.number not in skipped]
        if "units.all" in self.program:
            return blocks
        if "units.nested" in self.program:  # a unit and one inside of it
            return [blocks[0].body.linear, *blocks]
        return blocks[::2] if "units.some" in self.program else None

    def no_sync(self) -> AbstractContextManager[None]:
        return ringcomm.no_sync(self.model)

    def restage(self, stage: int) -> None:
        ringcomm.restage(self.model, self.optimizers[0], stage)


def _placed(placement: str, program: Program, comm: ringcomm.Communicator, group: Any) -> Plain:
    kind: type[Plain] = {"plain": Plain, "torch": Torch, "ddp": Ddp}.get(placement, Sharded)
    placed = kind(program, comm, int(placement[-1]) if placement in STAGES else 0)
    if isinstance(placed, Torch):
        placed.group = group
    return placed


# ---- the optimizers ----------------------------------------------------------------------------------------------

_MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
    "muon": lambda groups: torch.optim.Muon(groups, lr=0.02),
}


def _optimizers(program: Program) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        frozen = "optimizer.frozen" in program
        params = [p for p in model.parameters() if p.requires_grad or frozen]
        if program.optimizer == "muon":
            params = [p for p in params if p.dim() == 2 and p.numel()]
        if "optimizer.subset" in program:
            params = params[:-1]
        maker = _MAKERS[program.optimizer]
        if "two_optimizers" in program:
            return [maker(params[::2]), maker(params[1::2])]
        if "groups" in program:
            return [maker([{"params": params[::2]}, {"params": params[1::2], "lr": 0.03, "weight_decay": 0.0}])]
        return [maker(params)]

    return make


# ---- the loop ----------------------------------------------------------------------------------------------------

# What programs write into a parameter or a gradient, and into views of it.
_WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.mul_(0.9),
    lambda x: x[0].mul_(0.5),
    lambda x: x[:, :2].zero_() if x.dim() > 1 else x[:2].zero_(),
    lambda x: (x.view(-1) if x.is_contiguous() else x)[::2].add_(0.01),
    lambda x: x.t()[0].fill_(0.03) if x.dim() == 2 else x[-1:].fill_(0.03),
    lambda x: [row.mul_(0.5 + k / 8) for k, row in enumerate(x)],
    lambda x: x.chunk(2)[0].neg_(),
    lambda x: x.unbind(0)[-1].sub_(x[0]),
    lambda x: x.flatten().narrow(0, 0, 1).copy_(x.max()),
    lambda x: x.diagonal().clamp_(-0.1, 0.1) if x.dim() == 2 else x.clamp_(-0.1, 0.1),
    lambda x: x.data.sub_(x.detach() * 0.1),
    lambda x: x.copy_(x.flip(0)),
    lambda x: x.__setitem__(x > 0.2, 0.2),
    lambda x: x.__setitem__(0, 0),
    lambda x: torch._foreach_mul_([x, x[:1]], 0.75),
]


_SLICES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x.detach(),
    lambda x: x.data,
    lambda x: x.view(-1) if x.is_contiguous() else x.transpose(0, -1),
    lambda x: x[-1:],
]


class Loop:
    """One rank's run of a program."""

    def __init__(self, program: Program, placed: Plain) -> None:
        self.program, self.placed = program, placed
        self.rank = placed.comm.rank
        self.seen: Seen = []
        self.passes = 0
        self.average: dict[str, torch.Tensor] = {}
        self.kept: list[tuple[str, torch.Tensor]] = []  # slices of gradients

    def see(self, label: str, value: torch.Tensor) -> None:
        self.seen.append((label, value.detach().clone()))

    def run(self) -> Seen:
        program = self.program
        self.placed.wrap(build(program, self.rank), _optimizers(program))
        self.placed.model.train()
        optimizers = self.placed.optimizers
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers if "scheduler" in program]
        for step in range(program.steps):
            at_once = step == program.when
            if at_once:
                self.before(step)
            self.step(step)
            if at_once:
                self.after(step)
            if "ema" in program:
                self.follow()
        self.look("final")
        return self.seen

    def before(self, step: int) -> None:
        """What happens once, before a step."""
        if "freeze_later" in self.program:
            self.freeze(False)
        if "dropped_forward" in self.program:
            self.forward(step, 40)
        if "exception" in self.program:
            block = next(iter(self.placed.net.blocks.children()))
            block.fails = True
            with suppress(Boom):
                self.forward(step, 41)
            block.fails = False
        if "save_load" in self.program:
            self.detour(step)

    def after(self, step: int) -> None:
        """What happens once, after a step."""
        if "freeze_later" in self.program:
            self.freeze(True)
        if "evaluate" in self.program:
            self.evaluate(step, 50, 51)
        if "swap" in self.program:
            self.swap(step)
        if "write" in self.program:
            self.write([*self.placed.net.parameters()], step)
        if "restage" in self.program:
            self.placed.restage((self.placed.stage + self.program.restage_by) % 4)

    @torch.no_grad()
    def evaluate(self, step: int, *numbers: int) -> None:
        self.placed.model.eval()
        for number in numbers:
            self.see(f"step {step} evaluation", unwrapped(self.forward(step, number))[0])
        self.placed.model.train()

    @torch.no_grad()
    def swap(self, step: int) -> None:
        """Looks at the model with other weights in the place of its own."""
        params = list(self.placed.net.parameters())
        kept = [p.data for p in params]
        for p in params:
            p.data = p.detach() * 0.5
        self.evaluate(step, 52)
        for name, x in self.values().items():
            self.see(f"step {step} swapped {name}", x)
        for p, own in zip(params, kept, strict=True):
            p.data = own

    @torch.no_grad()
    def write(self, tensors: list[torch.Tensor], step: int) -> None:
        """Changes some of these tensors in place."""
        dice = random.Random(f"{self.program.seed} {step}")
        some = [x for x in tensors if x.numel() and x.dim() and x.is_floating_point()]
        for _ in range(4):
            if some:
                dice.choice(_WRITES)(dice.choice(some))

    def freeze(self, back: bool) -> None:
        """A frozen parameter is one without a gradient."""
        block = next(iter(self.placed.net.blocks.children()))
        if not block.block.frozen and block.block.kind != "lora":
            block.requires_grad_(back)
            for p in block.parameters():
                p.grad = None

    def detour(self, step: int) -> None:
        """Saves, trains a step, and goes back."""
        model, optimizers = self.placed.model, self.placed.optimizers
        saved = {name: x.clone() for name, x in model.state_dict().items()}
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        forward = self.forward(step, 42)
        self.placed.backward(loss_of(forward))
        for optimizer in optimizers:
            optimizer.step()
        self.zero()
        model.load_state_dict(saved)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def follow(self) -> None:
        for name, x in self.values().items():
            if x.is_floating_point():
                self.average[name] = self.average[name].lerp(x, 0.5) if name in self.average else x.clone()

    def values(self) -> dict[str, torch.Tensor]:
        found = self.placed.model.state_dict()
        return {name.removeprefix("module."): x for name, x in found.items()}

    def look(self, label: str) -> None:
        for name, x in self.values().items():
            self.see(f"{label} {name}", x)
        for name, x in self.average.items():
            self.see(f"average {name}", x)
        for number, optimizer in enumerate(self.placed.optimizers):
            for index, state in sorted(optimizer.state_dict()["state"].items()):
                for key, x in sorted(state.items()):
                    if torch.is_tensor(x):
                        self.see(f"{label} optimizer {number} {index} {key}", x)

    def forward(self, step: int, number: int) -> Any:
        x = batch(self.program, self.rank, step, number)
        if "input_grad" in self.program or "checkpoint.reentrant" in self.program:
            x.requires_grad_()
        self.x = x
        mixed = "autocast" in self.program
        # Threads share the cache of casts, which the first one to leave empties.
        caches = not models.DataParallelGroup.are_threads
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=caches) if mixed else nullcontext():
            return self.placed.forward(x, step)

    def step(self, step: int) -> None:
        program, optimizers = self.program, self.placed.optimizers
        if "closure" in program and len(optimizers) == 1:
            optimizers[0].step(lambda: self.gradients(step))
        else:
            self.gradients(step)
            for optimizer in optimizers:
                optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.zero()

    def zero(self) -> None:
        to_none = "zeros" not in self.program
        if "model_zero_grad" in self.program:
            self.placed.model.zero_grad(set_to_none=to_none)
            return
        for optimizer in self.placed.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def gradients(self, step: int) -> float:
        """All backward passes of a step, and clipping."""
        program, loss = self.program, torch.zeros(())
        for number in range(program.passes):
            waits = {"accumulate.no_sync", "accumulate.tree"} & program.features and number < program.passes - 1
            with self.placed.no_sync() if waits else nullcontext():
                loss = self.one_pass(step, number)
        if "grad_write" in program:
            self.write([p.grad for p in self.placed.net.parameters() if p.grad is not None], step)
        for name, grad in self.kept:
            self.see(f"step {step} kept {name}", grad)
        if "grad_keep" in program:
            self.keep(step)
        if "clip" in program:
            self.see(f"step {step} norm", self.placed.clip(0.3, program.norm_type))
        if "clip.torch" in program:
            norm = nn.utils.clip_grad_norm_(self.placed.model.parameters(), 0.3)
            self.see(f"step {step} norm", norm)
        return float(loss.detach())

    def keep(self, step: int) -> None:
        """Slices of some gradients that `zero` forgets."""
        dice = random.Random(f"{self.program.seed} {step}")
        mine = {id(p) for o in self.placed.optimizers for group in o.param_groups for p in group["params"]}
        for name, p in self.placed.net.named_parameters():
            if p.grad is not None and id(p) in mine and p.dim() and p.numel() and dice.random() < 0.3:
                self.kept.append((f"{step} {name}", dice.choice(_SLICES)(p.grad)))

    def one_pass(self, step: int, number: int) -> torch.Tensor:
        own_hooks = "saved_hooks" in self.program
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if own_hooks else nullcontext():
            loss = loss_of(self.forward(step, number))
        x = self.x
        if "evaluate_between" in self.program:
            self.evaluate(step, number + 30)
        if "two_forwards" in self.program:
            loss = loss + loss_of(self.forward(step, number + 20))
        self.see(f"step {step} pass {number} loss", loss)
        if "two_backwards" in self.program:
            self.placed.backward(loss * 0.5, retain_graph=True)
        self.placed.backward(loss)
        if x.grad is not None:
            self.see(f"step {step} pass {number} gradient of the input", x.grad)
        return loss


# ---- ranks -------------------------------------------------------------------------------------------------------


def process_group(comm: ringcomm.Communicator, name: str, store: dist.Store) -> dist.ProcessGroup:
    """A process group of the backend "ringcomm" over ranks that are threads."""
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.timeout, options.group_id = store, timedelta(seconds=CALL_LIMIT_S), name
    options.group_rank, options.group_size = comm.rank, comm.world_size
    options.global_ranks_in_group = list(range(comm.world_size))
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(dist.PrefixStore(name, store), comm.rank, comm.world_size)
    group._register_backend(torch.device("cpu"), kind, backend.create(options))
    group._set_default_backend(kind)
    group._set_group_name(name)
    return group


_names = itertools.count()


class DataParallelGroup:
    """Threads of one world size that wait for placements to run."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.store, self.name = dist.HashStore(), f"ranks {next(_names)}"
        self.inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world_size)]
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._launch, daemon=True, name=self.name)
        self.thread.start()

    def _launch(self) -> None:
        try:
            ringcomm.run_ranks(self._serve, self.world_size, timeout=CALL_LIMIT_S)
        except BaseException as error:
            self.outbox.put((-1, error))

    def _serve(self, comm: ringcomm.Communicator) -> None:
        group = None
        while (asked := self.inboxes[comm.rank].get()) is not None:
            program, placement = asked
            if placement == "torch" and group is None:
                group = process_group(comm, self.name, self.store)
            try:
                found = Loop(program, _placed(placement, program, comm, group)).run()
            except BaseException as error:  # the other ranks may be done and wait for the next program
                self.outbox.put((-1, error))
                raise
            self.outbox.put((comm.rank, found))

    def run(self, program: Program, placement: str) -> list[Seen]:
        """What each rank saw. Raises: what a rank raised first; the ranks have ended then."""
        for inbox in self.inboxes:
            inbox.put((program, placement))
        found: dict[int, Seen] = {}
        while len(found) < self.world_size:
            rank, result = self.outbox.get(timeout=6 * CALL_LIMIT_S)
            if rank < 0:
                raise result
            found[rank] = result
        return [found[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        self.thread.join(10.0)


def _in_process(program: Program, placement: str) -> Seen:
    """One rank that is a process."""
    models.DataParallelGroup.are_threads = False
    warnings.simplefilter("ignore")
    torch.manual_seed(program.seed + dist.get_rank())
    with ringcomm.init(timeout=CALL_LIMIT_S) as comm:
        return Loop(program, _placed(placement, program, comm, dist.group.WORLD)).run()


# ---- comparing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """What is wrong with a program."""

    placement: str
    kind: str  # "differs", or the class of an error
    text: str

    @property
    def cause(self) -> tuple[str, str, str]:
        """What failures of one cause share: the sentence without its names and numbers."""
        names = re.sub(r"[\w.]*[\d._][\w.]*", "_", self.text)[:80]
        words = "other things" * ("other things" in self.text) if self.kind == "differs" else names
        return (self.placement, self.kind, words)

    def __str__(self) -> str:
        return f"{self.placement}: {self.kind}: {self.text}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """All bits, but those of what is not a number on both sides: which one a sum keeps of several is left open."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        neither = a.isnan() & b.isnan()
        a, b = a.masked_fill(neither, 0), b.masked_fill(neither, 0)
    return a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4, equal_nan=True)


def difference(program: Program, expected: list[Seen], got: list[Seen]) -> str:
    """The first thing that two placements saw otherwise; empty: none."""
    equal = _close if "clip.torch" in program else same_bits  # whose sum has no fixed order
    for rank, (a, b) in enumerate(zip(expected, got, strict=True)):
        if [label for label, _ in a] != [label for label, _ in b]:
            odd = sorted({label for label, _ in a} ^ {label for label, _ in b})
            return f"rank {rank} saw other things: {odd[:3]}"
        for (label, x), (_, y) in zip(a, b, strict=True):
            if not equal(x, y):
                far = float((x.double() - y.double()).abs().max()) if x.shape == y.shape else math.nan
                return f"rank {rank}: {label} is {far:.3g} away of {float(x.double().abs().max()):.3g}"
    return ""


class Runner:
    """Runs programs; keeps the ranks.

    Args:
        processes: whether ranks are processes, with torch's own dropout and autocast's cache.
    """

    def __init__(self, processes: bool = False) -> None:
        self.processes = processes
        self.ranks: dict[int, DataParallelGroup] = {}
        self.comparisons = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self.ranks.values():
            ranks.close()
        self.ranks = {}
        if self.processes:
            torch_ranks.close_pool()

    def see(self, program: Program, placement: str) -> list[Seen] | Failure:
        """What the ranks saw, or how it failed."""
        n = program.world_size
        if self.processes:
            return self.see_in_processes(program, placement)
        if n not in self.ranks:
            self.ranks[n] = DataParallelGroup(n)
        try:
            return self.ranks[n].run(program, placement)
        except Exception as error:
            self.ranks.pop(n).close()
            text = str(error).strip().splitlines()
            return Failure(placement, type(error).__name__, text[0][:300] if text else "no answer")

    def see_in_processes(self, program: Program, placement: str) -> list[Seen] | Failure:
        """As `see`; an error ends the processes."""
        try:
            return torch_ranks.run(_in_process, program, placement, world_size=program.world_size)
        except AssertionError as error:
            last = [line for line in str(error).splitlines() if line and not line.startswith(" ")][-1]
            kind, _, text = last.rpartition(": ")
            return Failure(placement, kind.partition(":")[0] or "AssertionError", text[:300])

    def shrunk(self, program: Program, failure: Failure, allowed: Collection[str] = FEATURES) -> Program:
        """The smallest program found that fails like this one, drawn from the same features."""

        def fails(smaller: Program) -> bool:
            places = {places_of(smaller)[0], failure.placement}
            return failure.cause in [each.cause for each in self.failures(smaller, places)]

        return shrunk(program, fails, allowed)

    def failures(
        self, program: Program, placements: Collection[str] = PLACEMENTS, ran: Counter[str] | None = None
    ) -> list[Failure]:
        """How the placements differ from the first one, or fail; counts in ``ran`` those that ran."""
        base, found = None, []
        for placement in [place for place in places_of(program) if place in placements]:
            if ran is not None:
                ran[placement] += 1
            seen = self.see(program, placement)
            if isinstance(seen, Failure):
                found.append(seen)
                if placement == "plain":
                    return found
            elif base is None:
                base = seen
            else:
                self.comparisons += 1
                if text := difference(program, base, seen):
                    found.append(Failure(placement, "differs", text))
        return found
