"""`ringcomm.Pipeline`: runs the stages of a model on several ranks, in the order of a schedule."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import get_testing_overrides
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointError

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.mesh import refuse_mesh
from ringcomm.data_parallel.model.partition import facts_of
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.errors import AbortedError, InvalidArgumentError, MismatchError, ShapeError, UnsupportedError
from ringcomm.modules.meta import device_of
from ringcomm.modules.notes import notes_on
from ringcomm.modules.precision import Cast
from ringcomm.pipeline_parallel.check import Timed, check
from ringcomm.pipeline_parallel.messages import Messages, Sent, sent_tensors
from ringcomm.pipeline_parallel.microbatches import MicroBatch, Replicate, merge_outputs, split_inputs
from ringcomm.pipeline_parallel.schedules import COUNT, SCHEDULES, Action, Kind, Schedule, schedule_of
from ringcomm.pipeline_parallel.shape_only import ShapeOnlyTensor
from ringcomm.pipeline_parallel.side_effects import TensorShape
from ringcomm.pipeline_parallel.split import Chain, Stages, split
from ringcomm.pipeline_parallel.stage_runner import StageMetadata, StageRunner, is_staged
from ringcomm.pipeline_parallel.tied_params import TiedParams
from ringcomm.pipeline_parallel.weight_grads import DeferWeightGrads, backward, run_weight_grads
from ringcomm.validation import FLAG, FUNCTION, Requirement, a, expects, one_of, several, that


class Evaluation(NamedTuple):
    """The result of `Pipeline.evaluate`.

    Attributes:
        output: the outputs of all micro-batches merged, on the rank of the last stage; None elsewhere. Outputs that
            cannot be merged, such as tensors that differ in more than dimension 0, are a list.
        loss: the loss, on every rank; None without a loss, or if the loss needs a target and the last stage's rank
            passed none.
    """

    output: Any
    loss: torch.Tensor | None


def _stages(value: Any) -> Any:
    if isinstance(value, Stages):
        return value
    if not len(value):
        raise ValueError("there is none")
    return several("", a("", nn.Module)).take(value)


_SCHEDULE = that(
    f"a Schedule or the name of one: {', '.join(map(repr, SCHEDULES))}",
    lambda value: isinstance(value, Schedule) or (isinstance(value, str) and value in SCHEDULES),
)


class Pipeline(nn.Module):
    """A model split into stages, each on a rank, that trains on micro-batches.

        stages = ringcomm.split(model, at=["blocks.2"])
        pipe = ringcomm.Pipeline(stages, mesh["pp"], microbatches=8, loss=cross_entropy)
        optimizer = torch.optim.AdamW(pipe.parameters())
        ringcomm.shard(pipe, optimizer, stage=1, mesh=mesh)
        loss = pipe.step(x, target=y)                    # forward and backward passes of all micro-batches
        optimizer.step()

    As a module it consists of the modules of this rank's stages, under their names in the model; the model's other
    parameters are freed. A parameter that several stages use gets the values that the first of them has. Make the
    optimizer after the pipeline.

    Args:
        stages: the result of `split`; or a list of modules that are called one after the other and return tensors or
            tuples of tensors.
        comm: the ranks, such as ``mesh["pp"]``. The schedule assigns stages to ranks.
        schedule: "gpipe", "1f1b", "interleaved" (several stages on each rank), "zero-bubble", or a `Schedule`.
        microbatches: the number of micro-batches that a batch is split into.
        loss: a function of the model's output and the target of a micro-batch, called on the last stage; None: the
            output's ``loss`` attribute, or the output itself.
        reduction: how the micro-batches' losses combine into the step's loss. "mean" weights each by its share of the
            batch's rows (equally where lists of micro-batches are passed); "sum" adds losses that are shares already.
        ties: how the gradients of a parameter on several stages are added: "sum", once a step; or "exact", once a
            micro-batch, which gives the bits of one process and costs two messages of the parameter's size each time.
        static_shapes: a promise that every micro-batch has the same shapes, and the same plain values among the
            arguments; then these are sent once. On a device this saves a wait in each message.
    Order:   gradients of micro-batches are added in the order of the micro-batches, whatever the schedule: the bits are
             those of one process that runs forward and backward of each micro-batch in turn and adds their gradients.
    Random:  each rank draws from its own generator when its forward pass needs a number. So dropout has the masks of
             one process where one rank has all modules in one stage, and other masks otherwise. Random numbers that
             forward draws outside of modules, such as noise, are drawn once and sent on to later stages.
    Memory:  the parameters of this rank's stages; and for each micro-batch between its forward and backward pass, the
             tensors that autograd keeps and the inputs of the stage, but not the tensors sent to the next stage.
             "zero-bubble" also keeps the inputs of linear layers and the gradients of their results until the weights'
             gradients are computed.
    Cost:    between two stages, for each micro-batch: the tensors sent and their gradients, 512 bytes for shapes,
             for each gradient a byte and its strides; carried tensors are sent on from stage to stage up to the last.
    Raises:  InvalidArgumentError: stages that the schedule does not fit, a schedule that is not complete, a model that
             is in a pipeline already. MismatchError: another model, split or schedule on another rank.
    """

    @expects(
        "Pipeline",
        stages=Requirement("what split() gives, or a list of modules", _stages),
        microbatches=COUNT,
        schedule=_SCHEDULE,
        loss=FUNCTION,
        reduction=one_of("mean", "sum"),
        ties=one_of("sum", "exact"),
        static_shapes=FLAG,
    )
    def __init__(
        self,
        stages: Stages | Sequence[nn.Module],
        comm: Communicator,
        *,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        loss: Callable[..., torch.Tensor] | None = None,
        reduction: str = "mean",
        ties: str = "sum",
        static_shapes: bool = False,
    ) -> None:
        super().__init__()
        refuse_mesh(comm, "Pipeline", "pp")
        if not isinstance(stages, Stages):
            stages = split(Chain(stages), [str(number) for number in range(1, len(stages))])
        self.comm = comm
        self.schedule = _schedule(schedule, comm, microbatches, len(stages))
        self.microbatches, self.reduction = self.schedule.microbatches, reduction
        self.__dict__["_loss"] = loss  # it may be a module, and must not become a submodule
        self.local_stages = self.schedule.stages_of(comm.rank)
        if is_staged(stages.model):
            raise InvalidArgumentError(
                f"Pipeline: rank {comm.rank} got a model that already belongs to a pipeline, expected a complete one; "
                "make or load it again"
            )
        self._refuse_trained_loss(loss, stages.model)
        self._agree(stages, (reduction, ties, static_shapes))
        self._runner = StageRunner(stages, self.local_stages, comm.rank, device_of(comm, stages.model))
        self.messages = Messages(comm, self._runner.device, static_shapes)
        self._tied_params = TiedParams(
            stages.tied_params, self.local_stages, self.schedule.rank_of, self.messages, ties == "exact"
        )
        self._tied_params.broadcast_values()
        self._times: list[Timed] = []  # of the last step
        model = stages.model
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        notes_on(self).parts = notes_on(model).parts
        self.training = model.training

    def _refuse_trained_loss(self, loss: Any, model: nn.Module) -> None:
        """Raises on every rank where the loss of any rank has trainable parameters; a collective."""
        modules = [x for x in (loss, getattr(loss, "__self__", None)) if isinstance(x, nn.Module)]
        own = {id(p) for p in model.parameters()}
        found = [name for m in modules for name, p in m.named_parameters() if p.requires_grad and id(p) not in own]
        name = found[0] if found else None
        replies = self.comm.all_gather_object((type(loss).__name__, name))
        for rank, (kind, theirs) in enumerate(replies):
            if theirs is not None:
                raise UnsupportedError(
                    f"Pipeline: rank {rank} got the loss {kind} with the trained parameter {theirs}, expected none: "
                    "the loss is not part of the pipeline, so its parameters would be neither clipped nor saved; make "
                    "it a module of the model that the last stage calls, or freeze its parameters"
                )

    def _agree(self, stages: Stages, options: tuple[Any, ...]) -> None:
        """Raises on every rank where the ranks' models, splits or schedules differ; a collective."""
        rows = [" ".join(map(str, row)) for row in self.schedule.rows]
        facts = [f"options {options}", f"splits {stages.first}", *rows, *facts_of(stages.model)]
        facts += [f"tied {', '.join(tied.names)}" for tied in stages.tied_params]
        facts += [f"carries {name}" for name in sorted(stages.carry)]
        facts += [f"{name} in stage {stage}" for name, stage in stages.stage_of.items()]
        theirs = self.comm.all_gather_object(facts)
        for rank, other in enumerate(theirs):
            if other != theirs[0]:
                here, there = next(pair for pair in zip_longest(other, theirs[0]) if pair[0] != pair[1])
                raise MismatchError(
                    f"Pipeline: rank {rank} got {here or 'nothing more'}, expected {there or 'nothing more'} as on "
                    "rank 0; make the same model, splits and schedule on every rank"
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"Pipeline: rank {self.comm.rank} cannot copy or pickle a pipeline; save its state_dict()"
        )

    @property
    def model(self) -> nn.Module:
        """The model that was split, of which this rank holds a part."""
        return self._runner.model

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Pipeline:
        super()._apply(fn, recurse)
        self._runner.convert_placeholders(fn)
        return self

    def train(self, mode: bool = True) -> Pipeline:
        """Sets the training mode, as in any module."""
        super().train(mode)
        self.model.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Always raises, since a part of a model cannot be called by itself.

        Raises: UnsupportedError.
        """
        raise UnsupportedError(
            f"Pipeline: rank {self.comm.rank} was called as a module, expected step() to train or evaluate(); call "
            "these on every rank"
        )

    # ---- steps ----------------------------------------------------------------------------------------------------

    def step(
        self, *args: Any, target: Any = None, scaler: torch.amp.GradScaler | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Runs the forward and backward passes of a batch and adds the gradients to existing ones. A collective.

        Args:
            args, kwargs: the model's arguments: tensors, or nests of them, split along dimension 0 as by
                ``torch.tensor_split``. A list is taken to be split already, one item for each micro-batch. A
                `Replicate` value goes to each micro-batch unchanged, and so does a tensor without dimensions or with
                one row; all others have as many rows as the first tensor or a multiple (labels of all tokens). A table
                whose rows happen to be a multiple needs `Replicate`. If the first tensor has fewer rows than there are
                micro-batches, there are as many micro-batches as rows. Ranks without the first stage may omit the
                arguments; keyword arguments that another stage's modules need, such as labels, are passed on that
                stage's rank too. A tensor that requires a gradient, such as a trained prompt, gets it on the rank of
                the first stage.
            target: the target of the loss, split likewise; on the rank of the last stage.
            scaler: multiplies the losses before backward.
        Returns: the loss of the batch, detached, on every rank.
        Raises:  ShapeError: a batch without rows, or a tensor with another number of rows than the batch.
                 InvalidArgumentError: a model that calls its modules in another order than its stages; an argument that
                 requires a gradient and that a later stage uses, on another rank than the first. An error on one rank
                 aborts the communicator: the others raise AbortedError.
        """
        if not torch.is_grad_enabled():
            raise InvalidArgumentError(
                f"Pipeline: rank {self.comm.rank} got a step() where gradients are off, expected them on; leave "
                "torch.no_grad(), or call evaluate()"
            )
        loss = self._run(args, kwargs, target, scaler, train=True)[1]
        assert loss is not None  # the last stage's rank raises where there is no loss
        return loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Evaluation:
        """Runs the forward passes of a batch, without gradients; takes the arguments of `step`. A collective."""
        computes = target is not None or self._loss is None or _works_without_target(self._loss)
        return Evaluation(*self._run(args, kwargs, target, None, train=False, computes=computes))

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        scaler: torch.amp.GradScaler | None,
        train: bool,
        computes: bool = True,
    ) -> tuple[Any, torch.Tensor | None]:
        flat = sharded_model_of(self)
        try:
            if train:
                self._check_target(args, target)
            given = (args, kwargs, target)
            leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
            inputs = split_inputs(_without_graph(given, leaves) if train else given, self.microbatches, self.comm.rank)
            device = self.messages.device = self._runner.device
            self._tied_params.broadcast_values()
            self._refuse_meta()
            self._runner.buffers.begin()
            if scaler is not None:
                scaler.scale(torch.zeros((), device=device))  # makes the scaler's state, also on ranks without a loss
            with flat.interleaved() if flat is not None else nullcontext():
                with self._tied_params.with_placeholders():
                    step = _Step(self, inputs, scaler, flat, train, computes)
                    for action in self.schedule.rows[self.comm.rank]:
                        if train or action.kind is Kind.FORWARD:
                            step.execute(action)
                    if train:
                        if flat is not None:
                            flat.begin_part(None)
                        self._tied_params.reduce_grads()
                self.messages.finish()
            _backward_from(leaves)
            self._times = step.times
            found = step.loss
            value, bits = (0.0, 0) if found is None else (float(found), 8 * found.dtype.itemsize)
            message = torch.tensor([value, bits, *self._runner.buffers.changed()], dtype=torch.float64, device=device)
            self.comm.broadcast(message, self.schedule.rank_of[-1])
            bits = int(message[1])
            loss = message[0].to(torch.float64 if bits == 64 else torch.float32) if bits else None
            self._runner.buffers.sync(message[2:], self.comm, self.schedule.rank_of, self.microbatches > 1)
        except BaseException as error:
            if not isinstance(error, AbortedError):
                self.comm.abort(f"rank {self.comm.rank} left a pipeline's step with {type(error).__name__}: {error}")
            raise
        return (merge_outputs(step.outputs) if step.outputs else None), loss

    def _check_target(self, args: tuple[Any, ...], target: Any) -> None:
        at_end = self.schedule.stages - 1 in self.local_stages
        if at_end and target is None and self._loss is not None and not _works_without_target(self._loss):
            raise InvalidArgumentError(
                f"Pipeline: rank {self.comm.rank} has the last stage and got no target, expected one for the loss; "
                "pass target= there" + (", by name: what has none goes to forward" if len(args) > 1 else "")
            )

    def _refuse_meta(self) -> None:
        name = next((name for name, p in self.model.named_parameters() if p.is_meta), None)
        if name is not None:
            raise InvalidArgumentError(
                f"Pipeline: rank {self.comm.rank} got {name} on the meta device in a step, expected values; first call "
                "ringcomm.shard(pipe, optimizer, mesh=mesh, init_fn=...), which gives this rank's stages memory and "
                "initialises them"
            )

    def timeline(self) -> list[list[Timed]]:
        """Returns, by rank, the actions of the last step with their start and end, in seconds from the first start.

        For `ringcomm.pipeline_parallel.picture.draw`. A collective. Times of different ranks are comparable on one host
        only; on a device they are the times at which work was launched.
        """
        rows = self.comm.all_gather_object(self._times)
        start = min((row[0][1] for row in rows if row), default=0.0)
        return [[(action, begin - start, end - start) for action, begin, end in row] for row in rows]


def _schedule(schedule: str | Schedule, comm: Communicator, microbatches: int, stages: int) -> Schedule:
    """Returns the schedule of that name, or the given one, after a check that it fits."""
    if isinstance(schedule, str):
        if stages % comm.world_size:
            raise InvalidArgumentError(
                f"Pipeline: rank {comm.rank} got {stages} stages for {comm.world_size} ranks, expected a multiple; "
                "split the model at other modules"
            )
        schedule = schedule_of(schedule, comm.world_size, microbatches, stages // comm.world_size)
    check(schedule)
    asked = (comm.world_size, microbatches, stages)
    if (schedule.world_size, schedule.microbatches, schedule.stages) != asked:
        raise InvalidArgumentError(
            f"Pipeline: rank {comm.rank} got the schedule {schedule.name} of {schedule.world_size} ranks, "
            f"{schedule.microbatches} micro-batches and {schedule.stages} stages, expected {asked[0]}, {asked[1]} and "
            f"{asked[2]}; make a schedule with these numbers"
        )
    return schedule


class _Step:
    """Runs this rank's actions for one batch.

    Args:
        flat: the sharded model, if `ringcomm.shard` has wrapped the pipeline.
        computes: whether the last stage computes the loss.
    """

    def __init__(
        self,
        pipe: Pipeline,
        inputs: Sequence[MicroBatch],
        scaler: torch.amp.GradScaler | None,
        flat: ShardedModel | None,
        train: bool,
        computes: bool,
    ) -> None:
        self.pipe, self.inputs, self.scaler, self.flat, self.train = pipe, inputs, scaler, flat, train
        self.computes = computes
        self.loss: torch.Tensor | None = None
        multi_use = {id(p) for p in pipe._runner.multi_use_params()} | pipe._tied_params.placeholder_ids
        self._new_deferring = partial(DeferWeightGrads, frozenset(multi_use), {*multi_use})
        self.outputs: list[Any] = []
        self.times: list[Timed] = []
        self._skipped: set[tuple[int, int]] = set()  # stage and micro-batch
        self._local_messages: dict[tuple[str, int, int], Any] = {}  # between stages of this rank
        # Between forward and backward: gradients of the received tensors; the tensors that were sent, or the loss.
        self._open: dict[tuple[int, int], tuple[_Gradients, Sequence[Sent] | torch.Tensor]] = {}
        self._deferring_of: dict[tuple[int, int], DeferWeightGrads] = {}

    @property
    def rank(self) -> int:
        return self.pipe.comm.rank

    def execute(self, action: Action) -> None:
        """Executes an action."""
        at = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            received, metadata = self._receive(*at)
            start = time.perf_counter()
            share = self._share(*at, metadata)
            if share == 0:
                self._skip(*at)
            else:
                self._begin_part(action.microbatch)
                self._forward(*at, received, metadata, share)
        elif at in self._skipped:
            start = time.perf_counter()
        elif action.kind is Kind.WEIGHT:
            start = time.perf_counter()
            self._begin_part(action.microbatch)
            run_weight_grads(self._deferring_of.pop(at).deferred)
        else:
            gradients = self._receive_gradients(*at)
            start = time.perf_counter()
            self._begin_part(action.microbatch)
            self._backward(*at, gradients)
        self.times.append((action, start, time.perf_counter()))

    def _begin_part(self, microbatch: int) -> None:
        if self.flat is not None and self.train:
            self.flat.begin_part(microbatch)

    # ---- forward --------------------------------------------------------------------------------------------------

    def _receive(self, stage: int, number: int) -> tuple[list[torch.Tensor], StageMetadata | None]:
        if stage == 0:
            return [], None
        source = self.pipe.schedule.rank_of[stage - 1]
        if source != self.rank:
            return self.pipe.messages.receive(stage, source)
        sent, metadata = self._local_messages.pop(("forward", stage, number))
        return [x.detach().requires_grad_(x.requires_grad) for x in sent], metadata

    def _deferring(self, stage: int, number: int) -> DeferWeightGrads | None:
        if not self.train or not self.pipe.schedule.splits_backward:
            return None
        if (stage, number) not in self._deferring_of:
            self._deferring_of[stage, number] = self._new_deferring()
        return self._deferring_of[stage, number]

    def _share(self, stage: int, number: int, metadata: StageMetadata | None) -> Fraction | None:
        """Returns a micro-batch's share of the batch's rows, as far as this rank knows it."""
        share = self.inputs[number][1]
        if metadata is None or metadata.share is None:
            return share
        if share not in (None, metadata.share):
            raise self._share_error(stage, share, metadata.share)
        return metadata.share

    def _skip(self, stage: int, number: int) -> None:
        """Skips a micro-batch that has no rows, and tells the next stage to skip it."""
        self._skipped.add((stage, number))
        nothing = StageMetadata((), None, TensorShape((), torch.float32), {}, 0, share=Fraction(0))
        self._hand_on(stage, number, [], nothing)

    def _forward(
        self,
        stage: int,
        number: int,
        received: list[torch.Tensor],
        metadata: StageMetadata | None,
        share: Fraction | None,
    ) -> None:
        args, kwargs, target = self.inputs[number][0]
        if self.train and self.pipe.schedule.rank_of[0] != self.rank:
            args, kwargs = self._without_input_grads(stage, (args, kwargs))
        if self.flat is not None:  # every stage gets the model's inputs, which an unsplit model would cast here
            args, kwargs = self.flat.root.input_cast(root=True)((args, kwargs))
        gradients = _gradients_of(received)
        deferring = self._deferring(stage, number)
        with deferring or nullcontext():
            output, after = self.pipe._runner.run(stage, args, kwargs, received, metadata)
            if after is None:
                output = self._loss_of(output, target, share)
        if self.train:
            self._refuse_cut_off(stage, received, output)
            for tied in self.pipe._tied_params.of_stage(stage):
                tied.after_forward(stage, number)
            ends = [output] if after is None else output
            if deferring is not None:
                ends = [deferring.as_end(x) for x in ends]
            self._open[stage, number] = (gradients, ends[0] if after is None else sent_tensors(ends))
        if after is None:
            return
        # Copies tensors that may be buffers or other memory of a module: the next micro-batch may overwrite them before
        # the next stage has read them.
        output = [x if x.requires_grad else x.clone() for x in output]
        self._hand_on(stage, number, output, replace(after, share=share))

    def _hand_on(self, stage: int, number: int, output: list[torch.Tensor], metadata: StageMetadata) -> None:
        if stage == self.pipe.schedule.stages - 1:
            return
        following = self.pipe.schedule.rank_of[stage + 1]
        if following == self.rank:
            self._local_messages["forward", stage + 1, number] = (output, metadata)
        elif self.pipe.messages.static_shapes and any(share == 0 for _, share in self.inputs):
            rows = sum(share != 0 for _, share in self.inputs)  # each is a micro-batch
            raise ShapeError(
                f"Pipeline: rank {self.rank} got static_shapes=True and {rows} rows in the batch, expected at least a "
                f"row for each of {self.pipe.schedule.microbatches} micro-batches; pass static_shapes=False where "
                "batches have fewer rows"
            )
        else:
            self.pipe.messages.send(output, metadata, stage + 1, number, following)

    def _without_input_grads(self, stage: int, inputs: Any) -> Any:
        """Returns the inputs with hooks that make backward raise if an input gets a gradient on this rank: it would be
        only this rank's share, which the first stage's rank would lack."""

        def refuse(grad: torch.Tensor) -> None:
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} ran stage {stage}, whose forward uses an input of the model that requires "
                "a gradient, expected only the first stage to use it; detach it, or let a module with parameters of "
                "the first stage return it, and name that module in split(..., carry=[...])"
            )

        wanted = {id(x): x.view_as(x) for x in tree_leaves(inputs) if torch.is_tensor(x) and x.requires_grad}
        for view in wanted.values():
            view.register_hook(refuse)
        return tree_map(lambda x: wanted.get(id(x), x), inputs) if wanted else inputs

    def _refuse_cut_off(self, stage: int, received: Sequence[torch.Tensor], output: Any) -> None:
        if any(x.requires_grad for x in received) and not any(x.requires_grad for x in tree_leaves(output)):
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} ran stage {stage}, whose results depend on no tensor that requires a "
                "gradient, expected a gradient for the earlier stages; checkpoint with use_reentrant=False, and do "
                "not detach the tensors through which they are trained"
            )

    def _share_error(self, stage: int, got: Fraction | None, expected: Fraction) -> ShapeError:
        return ShapeError(
            f"Pipeline: rank {self.rank} ran stage {stage} and got {got} of a batch's rows in a micro-batch, expected "
            f"{expected} of them as on the stage before, because {self.pipe.schedule.microbatches} micro-batches do "
            "not divide the rows; pass equal numbers of rows on every rank, or lists of micro-batches"
        )

    def _loss_of(self, output: Any, target: Any, share: Fraction | None) -> torch.Tensor | None:
        """Computes the loss of a micro-batch, from which its backward pass starts."""
        if self.flat is not None:
            output = Cast(self.flat.config.mixed_precision.output_dtype)(output)
        if not self.train:
            self.outputs.append(output)
        if not self.computes:
            return None
        loss = self.pipe._loss
        with self.pipe._runner.all_parameters():
            value = _own_loss(output) if loss is None else loss(output, *([] if target is None else [target]))
        if isinstance(value, ShapeOnlyTensor):
            raise UnsupportedError(
                f"Pipeline: rank {self.rank} got a loss that depends on parameters of other stages, such as a penalty "
                "on them, expected a function of the output and the target; use the optimizer's weight_decay, or add "
                "the penalty's gradient to p.grad of each parameter after step()"
            )
        if not torch.is_tensor(value) or value.numel() != 1:
            if not self.train:
                self.computes = False
                return None
            cure = "return only the loss from the function passed as loss=, and store other results in a list"
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} got {_kind(value)} as the loss of a micro-batch, expected one number; "
                + (cure if loss is not None else "pass loss=, which makes one of the output and the target")
            )
        if self.pipe.reduction == "mean":
            share = Fraction(1, self.pipe.schedule.microbatches) if share is None else share
            value = value / share.denominator if share.numerator == 1 else value * float(share)
        found = value.detach()
        self.loss = found if self.loss is None else self.loss + found
        scaled: torch.Tensor = value if self.scaler is None else self.scaler.scale(value)
        return scaled

    # ---- backward -------------------------------------------------------------------------------------------------

    def _receive_gradients(self, stage: int, number: int) -> Sequence[torch.Tensor | None]:
        if stage == self.pipe.schedule.stages - 1:
            return []
        source = self.pipe.schedule.rank_of[stage + 1]
        if source == self.rank:
            found: Sequence[torch.Tensor | None] = self._local_messages.pop(("backward", stage + 1, number))
            return found
        sent = self._open[stage, number][1]
        assert not isinstance(sent, torch.Tensor)
        return self.pipe.messages.receive_gradients(sent, stage + 1, number, source)

    def _backward(self, stage: int, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        found, sent = self._open.pop((stage, number))
        tied_params = [*self.pipe._tied_params.of_stage(stage)]
        roots: list[tuple[Any, torch.Tensor | None]] = []
        roots += [root for tied in tied_params if (root := tied.later_grad(stage, number)) is not None]
        if isinstance(sent, torch.Tensor):
            roots.append((sent, None))
        else:
            roots += [(each.edge, grad) for each, grad in zip(sent, gradients, strict=True) if grad is not None]
        if roots:
            try:
                backward([end for end, _ in roots], [grad for _, grad in roots], self._deferring(stage, number))
            except CheckpointError as error:
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} ran stage {stage}, where a checkpointed function computed other "
                    "tensors in the backward pass than in the forward pass, expected the same; checkpoint each module "
                    "separately, and no function that calls modules on both sides of a cut"
                ) from error
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error) or self.pipe.microbatches == 1:
                    raise
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} ran stage {stage}, whose backward pass needs the old values of a "
                    "tensor that was written in place since, by the same forward pass or, if it is a buffer, the next "
                    "micro-batch's; assign a new tensor to the buffer, or let forward use a clone of it"
                ) from error
        before = self.pipe.schedule.rank_of[stage - 1] if stage else None
        if before == self.rank:
            self._local_messages["backward", stage, number] = found
        elif before is not None:
            self.pipe.messages.send_gradients(found, stage, before)
        for tied in tied_params:  # after the input gradients, which the receiver takes first
            tied.after_backward(stage, number)


def _without_graph(inputs: Any, leaves: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Returns the inputs with new leaves in place of tensors that have a graph, and adds both to ``leaves``. The
    micro-batches share this graph, and backward can run through it only once, so their backward passes stop at the
    leaves."""
    made: dict[int, torch.Tensor] = {}

    def each(x: Any) -> Any:
        if isinstance(x, Replicate):
            return Replicate(tree_map(each, x.value))
        if not torch.is_tensor(x) or x.grad_fn is None:
            return x
        if id(x) not in made:
            leaves.append((x, x.detach().requires_grad_()))
            made[id(x)] = leaves[-1][1].clone()  # a clone, because forward may write into it
        return made[id(x)]

    return tree_map(each, inputs)


def _backward_from(inputs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Passes the gradients of the leaves that `_without_graph` has made on to the inputs."""
    ends = [(x, leaf.grad) for x, leaf in inputs if leaf.grad is not None]
    if ends:
        torch.autograd.backward([x for x, _ in ends], [grad for _, grad in ends])


_Gradients = list[torch.Tensor | None]


def _gradients_of(received: Sequence[torch.Tensor]) -> _Gradients:
    """Returns a list that backward fills with the gradients of the received tensors, with the strides that autograd
    gave them (``x.grad`` would have the strides of ``x``)."""
    wanted = [x for x in received if x.requires_grad]
    found: _Gradients = [None] * len(wanted)
    for i, x in enumerate(wanted):
        x.register_hook(partial(found.__setitem__, i))
    return found


def _works_without_target(loss: Callable[..., Any]) -> bool:
    """Returns whether a loss can be called without a target; True where its signature is unknown."""
    if inspect.isbuiltin(loss) or inspect.ismethoddescriptor(loss):  # whose signatures torch keeps elsewhere
        loss = get_testing_overrides().get(loss, loss)
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _own_loss(output: Any) -> Any:
    """Returns the loss that a model's output carries, or the output itself."""
    if isinstance(output, dict):
        return output.get("loss")
    return getattr(output, "loss", output)


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"
