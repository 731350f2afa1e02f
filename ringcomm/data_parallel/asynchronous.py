"""Asynchronous data parallel training: workers do not wait for one another, and train on values that may be stale.

    model = ringcomm.AsynchronousDataParallel(module, comm, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with model:
        for x, y in batches:
            model.optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            model.optimizer.step()        # sends the gradients to the servers, gets new values

The parameters and the optimizer's state are sharded over servers (`parameter_server.py`). A step sends each server its
part of this worker's gradient, and copies the values that the servers answer into the module.
"""

from __future__ import annotations

import atexit
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.launch import choose_kernels
from ringcomm.comm.rendezvous import communicator_of
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.model.partition import named_parameters
from ringcomm.data_parallel.optim.optimizer import is_elementwise, refuse_foreign, refuse_unusable
from ringcomm.data_parallel.parameter_server import (
    LEAVE,
    PULL,
    STATE,
    STEP,
    ArrivalOrder,
    Channel,
    FlatParameters,
    ParameterServer,
    Shard,
    raise_answer,
    unsharded_state,
)
from ringcomm.errors import (
    AbortedError,
    ClosedError,
    CollectiveTimeoutError,
    DeviceError,
    InvalidArgumentError,
    MismatchError,
    RankLostError,
    RingcommError,
    UnsupportedError,
    rank_list,
    shown,
)
from ringcomm.modules.arguments import MODULE
from ringcomm.validation import COMMUNICATOR, FLAG, FUNCTION, INTEGER, expects, or_none, several, validate_int

CALL = "AsynchronousDataParallel"
# The open models, in the order of their creation, which is the same on all ranks. They are closed at the end of the
# program, because a server's threads are inside calls.
_open: dict[AsynchronousDataParallel, None] = {}


class AsynchronousDataParallel(nn.Module):
    """Wraps a module for training in which no rank waits for the gradients of the others (stale-synchronous parallel).

    Each rank works: ``backward()`` leaves its own gradients, and ``optimizer.step()`` sends them to the servers, which
    update the parameters at once, and copies the new values into the module. Each rank also serves a shard of the
    parameters, on threads of its own, unless ``servers`` names fewer ranks. A rank that only serves takes part in the
    other ranks' collectives, `load_state_dict` and those of ``comm``, before it calls `close`. Use this object as a
    context manager, or call `close`, which serves until every worker has closed.

    Args:
        module: the same on all ranks; all get rank 0's parameters and buffers when it is wrapped. Buffers are not sent
            again, so each rank keeps its own, such as the statistics of batch norms; and neither are parameters that
            require no gradient when the module is wrapped.
        comm: a communicator on the cpu by ringcomm's own engine; None: one over torch.distributed's default group, or
            ``ringcomm.init()``. A module on another device is copied through host memory in each step.
        optimizer: makes an ordinary optimizer from a list of parameters; called on every rank. Element-wise ones of
            torch run on flat shards, which may split a parameter; others see whole parameters.
        max_staleness: how many of its own steps a worker may be ahead of the slowest; None: any number. 0: synchronous;
            the servers then update with the mean of the workers' gradients, with the bits of `shard` at stages 0 and 1.
            Otherwise each gradient is an update of its own.
        servers: the ranks that serve; None: all. Ranks that do not serve may end, even by a signal, without ending the
            training.
        staleness_scale: factor of the learning rate, by a gradient's staleness: the number of updates of the shard
            between the values with which it was computed and now; for example ``lambda s: 1 / (1 + s)``.
        record: whether to record `order`: two numbers for each step of each worker.
        replay: this rank's `order` of an earlier run with as many ranks, the same servers and the same data: the
            gradients are used in that order again, which gives the same bits.
    Order:   of updates: as the gradients come. With max_staleness=0, the canonical order of sums.
    Cost:    a step sends the gradients and receives the parameters once, less this rank's own shard; two
             communicators of two ranks with each other rank, and a thread and a shard's memory for each worker.
    Raises:  InvalidArgumentError: nothing to train, or no such servers. DeviceError, UnsupportedError: another kind of
             communicator, or an optimizer that cannot be sharded. MismatchError: the ranks differ in module, optimizer
             or arguments. Its own collectives raise the errors of a communicator's.
    """

    @expects(
        CALL,
        module=MODULE,
        comm=COMMUNICATOR,
        optimizer=FUNCTION,
        max_staleness=or_none(validate_int(0, 1 << 31)),
        servers=several("a list of ranks", INTEGER),
        staleness_scale=FUNCTION,
        record=FLAG,
        replay=several("a list of whole numbers, another run's order", INTEGER),
    )
    def __init__(
        self,
        module: nn.Module,
        comm: Communicator | None = None,
        *,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        max_staleness: int | None = 4,
        servers: Sequence[int] | None = None,
        staleness_scale: Callable[[int], float] | None = None,
        record: bool = False,
        replay: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self._closed, self._failure = False, ""
        self._made_comm = comm is None
        self.comm = comm = communicator_of(None, CALL) if comm is None else comm
        self.max_staleness = max_staleness
        _refuse_engine(comm)
        self.servers = _servers(servers, comm)
        named = [(name, p) for name, p in named_parameters(module, CALL, comm.rank) if p.requires_grad]
        made = self._make(optimizer, module, named, staleness_scale)
        self.optimizer = AsynchronousOptimizer(self, made)
        group_of = {id(p): n for n, group in enumerate(made.param_groups) for p in group["params"]}
        named = [(name, p) for name, p in named if id(p) in group_of]
        # Some optimizers have state from the beginning, in the shapes of the parameters, so these cannot be split.
        atom = "element" if is_elementwise(made) and not made.state else "tensor"
        flat = FlatParameters(named, group_of, len(self.servers), atom)
        facts = [f"max_staleness={max_staleness}", f"servers={self.servers}", f"the optimizer {type(made).__name__}"]
        facts += [f"{'no ' if staleness_scale is None else ''}staleness_scale", f"replay={replay is not None}"]
        facts += [f"the parameter {name} of {tuple(p.shape)} {p.dtype}" for name, p in named]
        DataParallelGroup(comm).agree(CALL, facts)
        _send_values(module, comm)
        flat.pack_values()
        self._flat = flat
        self._own_version = 0  # version of the module's values, in the shard that this rank serves
        self._steps, self._step_s = 0, 0.0
        self._server: ParameterServer | None = None
        if self.rank in self.servers:
            mine = self.servers.index(self.rank)
            shard = Shard(flat, mine, [x.clone() for x in self._flat.value_shard(mine)], made, staleness_scale)
            order, workers = ArrivalOrder(record, replay), range(comm.world_size)
            self._server = ParameterServer(shard, order, self.rank, self.servers, workers, max_staleness, comm.timeout)
        choose_kernels()  # before threads use them at once
        asked, served = _connect(comm, self.servers)
        self._connections = {
            rank: ServerConnection(channel, self._flat, self.servers.index(rank)) for rank, channel in asked.items()
        }
        if self._server is not None:
            self._server.start(served.values())
        _open[self] = None
        self.module = module

    def _make(
        self,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        module: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        staleness_scale: Callable[[int], float] | None,
    ) -> torch.optim.Optimizer:
        """Returns the user's optimizer, once it is known that it can be sharded."""
        if not named:
            raise InvalidArgumentError(
                f"{CALL}: rank {self.rank} got a module without parameters to train, expected some; there is nothing "
                "to wrap"
            )
        made = optimizer([p for _, p in named])
        refuse_unusable(made, CALL, self.rank)
        refuse_foreign(made, module, CALL, self.rank)
        known = {id(p) for _, p in named}
        if any(id(p) not in known for group in made.param_groups for p in group["params"]):
            raise InvalidArgumentError(
                f"{CALL}: rank {self.rank} got an optimizer with other parameters than those passed to its function, "
                "expected some of these; make it from the list that the function gets"
            )
        if staleness_scale is not None and any("lr" not in group for group in made.param_groups):
            raise UnsupportedError(
                f"{CALL}: rank {self.rank} got staleness_scale with {type(made).__name__}, which has no learning rate "
                "'lr', expected one that has; leave staleness_scale out"
            )
        return made

    @property
    def rank(self) -> int:
        """This rank in `comm`."""
        return self.comm.rank

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward."""
        return self.module(*args, **kwargs)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Sends this worker's gradients to the servers, and copies the new values into the module, as
        ``model.optimizer.step()`` does.

        Gradients may be accumulated or clipped before. A parameter without a gradient counts as one with a zero
        gradient. Waits while this worker is more than ``max_staleness`` steps ahead of the slowest.

        Raises:  RankLostError: a server was lost. AbortedError: a server's rank left its block with an error.
                 CollectiveTimeoutError: another worker has not come within the communicator's time limit.
                 RingcommError: the optimizer raised on a server. After any of these, and after an interrupt, this
                 object is closed. ClosedError: it was closed before.
        """
        self._check_open("step")
        for p in self._flat.all_params:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise UnsupportedError(
                    f"step: rank {self.rank} got a gradient of layout {p.grad.layout}, expected a dense one; use "
                    "sparse=False"
                )
        began = time.perf_counter()
        self._flat.pack_gradients()
        self._ask(STEP)
        self._steps += 1
        self._step_s += time.perf_counter() - began

    def pull(self) -> None:
        """Copies the servers' current values into the module, for example before an evaluation. Raises what `step`
        raises."""
        self._check_open("pull")
        self._ask(PULL)

    def _ask(self, kind: int) -> None:
        call = "step" if kind == STEP else "pull"
        options = pickle.dumps(self.optimizer.options()) if kind == STEP else b""
        try:
            for connection in self._connections.values():
                connection.request(call, kind, options)
            if self._server is not None:
                mine = self.servers.index(self.rank)
                if kind == STEP:
                    gradient = self._flat.gradient_shard(mine)
                    self._server.push(self.rank, self._own_version, gradient, self.optimizer.options())
                self._own_version = self._server.pull(self.rank, self._flat.value_shard(mine))
            for connection in self._connections.values():
                # Before it answers, the server may itself wait one time limit for other workers.
                connection.receive_values(call, 2 * self.comm.timeout)
        except BaseException as error:  # a message may be half sent, so the connection is unusable
            self._end(error)
            raise
        self._flat.unpack_values()

    # ---- figures ---------------------------------------------------------------------------------------------------

    @property
    def order(self) -> list[int]:
        """With ``record``, the order in which this rank's server used gradients and sent values, to be passed as
        ``replay``: ``rank`` for using a gradient of that rank, ``-1 - rank`` for sending it the values."""
        return [] if self._server is None else list(self._server.order.events)

    def counters(self) -> dict[str, Any]:
        """Returns figures of this rank's work so far.

        Returns: of the worker: "steps", "step_s" (seconds in `step`), "sent_bytes" and "received_bytes" (as a worker
                 and as a server); of the server, if this rank serves: "updates", "staleness" (the number of gradients
                 by their staleness; with max_staleness=0 a mean counts as one), "waits" and "waited_s" (the number of
                 answers that waited for slower workers, and seconds), "lost" (why workers were lost, by rank).
        """
        server = self._server
        channels = [connection.channel for connection in self._connections.values()]
        channels += [] if server is None else server.channels
        found: dict[str, Any] = {
            "steps": self._steps,
            "step_s": self._step_s,
            "sent_bytes": sum(channel.sent_bytes for channel in channels),
            "received_bytes": sum(channel.received_bytes for channel in channels),
        }
        if server is not None:
            its = server.counters
            found |= {"updates": its.updates, "staleness": dict(sorted(its.staleness.items()))}
            found |= {"waits": its.waits, "waited_s": its.waited_s, "lost": dict(its.lost)}
        return found

    # ---- state -----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict, the same on every rank, and gives the servers its values; a collective.

        Raises:  UnsupportedError: with ``assign``, which would replace the parameters. What torch raises. If only some
                 ranks raise, the others raise AbortedError, and this object is closed on all.
        """
        with self._alone("load_state_dict"):
            if assign:
                raise UnsupportedError(
                    f"load_state_dict: rank {self.rank} got assign=True, expected False, because the wrapped "
                    "parameters cannot be replaced; leave it out"
                )
            found = super().load_state_dict(state_dict, strict)
            self._flat.pack_values()
            if self._server is not None:
                self._server.set_values(self._flat.value_shard(self.servers.index(self.rank)))
        return found

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Inside the block no rank makes a step. If only some ranks raise in it, every rank raises and closes this
        object; if all ranks raise, it stays open."""
        self._check_open(call)
        self.comm.barrier()
        mine: BaseException | None = None
        try:
            yield
        except BaseException as error:
            mine = error
        try:
            said = self.comm.exchange(b"" if mine is None else f"{type(mine).__name__}: {mine}".encode())
        except BaseException as error:  # what the other ranks have loaded is unknown
            self._end(error)
            raise
        failed = [rank for rank, text in enumerate(said) if text]
        if 0 < len(failed) < len(said):
            mine = mine or AbortedError(
                f"{call}: rank {self.rank} expected every rank to load the same state, got an error on rank "
                f"{failed[0]}: {said[failed[0]].decode()}; create a new {CALL}, and load the same on every rank"
            )
            self._end(mine)
        if mine is not None:
            raise mine

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Returns the optimizer's state of each parameter, gathered from the servers; other workers may continue."""
        self._check_open("state_dict")
        states = []
        try:
            for rank in self.servers:
                if rank == self.rank and self._server is not None:
                    states.append(self._server.state())
                    continue
                self._connections[rank].request("state_dict", STATE)
                states.append(pickle.loads(self._connections[rank].receive("state_dict", self.comm.timeout)[1]))
        except BaseException as error:
            self._end(error)
            raise
        return unsharded_state(self._flat, states)

    def load_optimizer_state(self, load: Callable[[], Mapping[nn.Parameter, dict[str, Any]]]) -> None:
        """Gives this rank's server its part of an optimizer's state; a collective.

        Args:
            load: loads the options, and returns the state of each parameter.
        """
        with self._alone("load_state_dict"):
            state = load()
            self._flat.separate(lambda p: state.get(p, {}), self.rank)
            if self._server is not None:
                self._server.set_state(lambda p: state.get(p, {}))

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            f"{CALL}: rank {self.rank} cannot copy or pickle it, because it has connections; copy model.module, or "
            "save state_dict()"
        )

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it was closed, or ended by an error."""
        return self._closed

    def close(self) -> None:
        """Ends this worker's steps, serves until every other worker has closed or was lost, and disconnects; a second
        call does nothing. The module keeps its last values.

        Raises:  CollectiveTimeoutError: a worker that has not closed has asked for nothing within the communicator's
                 time limit, or the servers have not answered within it. RingcommError: the server of this rank has
                 failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            ends = time.monotonic() + self.comm.timeout
            for connection in self._connections.values():
                with suppress(AbortedError, ClosedError):  # the server may be gone already
                    connection.request("close", LEAVE)
            for connection in self._connections.values():
                with suppress(AbortedError, ClosedError):
                    connection.receive("close", max(ends - time.monotonic(), 0.001))
            if self._server is not None:
                self._server.leave(self.rank)
                self._server.join()
        except BaseException as error:
            self._end(error)
            raise
        self._disconnect()

    def _end(self, error: BaseException) -> None:
        """Closes because of an error. If this rank serves, its workers get the error, too."""
        self._closed = True
        reason = f"rank {self.rank} left its {CALL} with {type(error).__name__}: {error}"
        self._failure = self._failure or f", got {type(error).__name__} in an earlier call: {error}"
        if self._server is not None:
            self._server.fail(error if isinstance(error, RingcommError) else AbortedError(reason))
        for connection in self._connections.values():
            connection.channel.abort(reason, error)
        if self._server is not None:
            self._server.abort(reason, error)
        self._disconnect()

    def _disconnect(self) -> None:
        _open.pop(self, None)
        for connection in self._connections.values():
            connection.channel.close()
        if self._server is not None:
            self._server.close()
        if self._made_comm:
            self.comm.close()

    def __enter__(self) -> AsynchronousDataParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif not self._closed:
            self._end(error)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ClosedError(
                f"{call}: rank {self.rank} expected an open {CALL}{self._failure or ', got one that was closed'}; "
                "create a new one"
            )


class ServerConnection:
    """A worker's connection to a server.

    Args:
        channel: the channel to the server; this object closes it.
        flat: the worker's gradients and values.
        server: the server's index among the servers.
    """

    def __init__(self, channel: Channel, flat: FlatParameters, server: int) -> None:
        self.channel = channel
        self._gradient, self._values = flat.gradient_shard(server), flat.value_shard(server)
        self._version = 0  # version of the module's values, in the server's shard
        self._options = b""  # the last that were sent

    def request(self, call: str, kind: int, options: bytes = b"") -> None:
        """Sends a request; STEP also sends the gradient, and the options if they have changed."""
        new = options if options != self._options else b""
        with self._explained(call):
            self.channel.send((kind, self._version, 0), new, self._gradient if kind == STEP else ())
        self._options = options or self._options

    def receive(self, call: str, limit_s: float) -> tuple[int, bytes]:
        """Returns the server's answer, (version of the values that follow, bytes), or raises the server's error."""
        with self._explained(call):
            (status, version, _), blob = self.channel.receive(limit_s)
        raise_answer(status, blob)
        return version, blob

    def receive_values(self, call: str, limit_s: float) -> None:
        """Receives the values that the server answers."""
        version, _ = self.receive(call, limit_s)
        with self._explained(call):
            self.channel.receive_tensors(self._values)
        self._version = version

    @contextmanager
    def _explained(self, call: str) -> Iterator[None]:
        """Adds the ranks to the errors of a connection, in which the two ranks are 0 and 1."""
        try:
            yield
        except (AbortedError, CollectiveTimeoutError, MismatchError) as error:
            rank, server = self.channel.rank, self.channel.peer
            lost = isinstance(error, RankLostError)
            raise type(error)(
                f"{call}: rank {rank} expected the server on rank {server} to answer, got an error of the "
                f"connection, whose ranks 0 and 1 are ranks {min(server, rank)} and {max(server, rank)}: {error}"
                + ("; a rank that is done calls close(), which serves the others" if lost else "")
            ) from error


class AsynchronousOptimizer(torch.optim.Optimizer):
    """The optimizer of an `AsynchronousDataParallel`. The servers apply this worker's gradients with this object's
    options, so learning rate schedulers work as usual. The optimizer's state is on the servers."""

    def __init__(self, model: AsynchronousDataParallel, made: torch.optim.Optimizer) -> None:
        self._model: AsynchronousDataParallel | None = None  # parameters may be added until it is set
        super().__init__([dict(group) for group in made.param_groups], made.defaults)
        self._model = model

    def options(self) -> list[dict[str, Any]]:
        """Returns the options of the groups, without the parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            f"{CALL}: rank {self.model.rank} cannot copy or pickle its optimizer, whose state is on the servers; save "
            "state_dict()"
        )

    @property
    def model(self) -> AsynchronousDataParallel:
        """The model whose parameters it steps."""
        assert self._model is not None
        return self._model

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the model: see `AsynchronousDataParallel.step`.

        Returns: the result of ``closure``, which is called first.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.model.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the servers' shards do not change.

        Raises:  UnsupportedError.
        """
        if self._model is not None:
            raise UnsupportedError(
                f"add_param_group: rank {self._model.rank} expected the parameters with which {CALL} was made, got "
                f"{shown(param_group)}; make a new one"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all shards, in torch's usual form. If other workers step during the call, different
        shards may have the states of different steps."""
        state = self.model.optimizer_state()
        order = [p for group in self.param_groups for p in group["params"]]
        found = super().state_dict()
        found["state"] = {i: state[p] for i, p in enumerate(order) if state.get(p)}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, the same on every rank, and gives the servers their parts; a collective."""

        def load() -> dict[nn.Parameter, dict[str, Any]]:
            order = [p for group in self.param_groups for p in group["params"]]
            super(AsynchronousOptimizer, self).load_state_dict({**state_dict, "state": {}})
            return {order[int(i)]: its for i, its in state_dict["state"].items()}

        self.model.load_optimizer_state(load)


def _refuse_engine(comm: Communicator) -> None:
    if not comm.lends_memory:
        raise UnsupportedError(
            f"{CALL}: rank {comm.rank} got a communicator over {comm.engine}, expected one of ringcomm's own engine, "
            "which survives the end of a rank; pass ringcomm.init()"
        )
    if comm.device != "cpu":
        raise DeviceError(
            f"{CALL}: rank {comm.rank} got a communicator on {comm.device}, expected one on the cpu, where the servers "
            "keep the parameters, wherever the module is; pass ringcomm.init(device='cpu')"
        )


def _servers(servers: Sequence[int] | None, comm: Communicator) -> list[int]:
    """Returns the ranks that serve, in order."""
    if servers is None:
        return [*range(comm.world_size)]
    found = sorted(set(servers))
    if not found or len(found) < len(servers) or not 0 <= found[0] <= found[-1] < comm.world_size:
        raise InvalidArgumentError(
            f"{CALL}: rank {comm.rank} got servers={shown(list(servers))}, expected one or more of the ranks 0 to "
            f"{comm.world_size - 1}, each once; pass a list of these"
        )
    return found


def _send_values(module: nn.Module, comm: Communicator) -> None:
    """Gives all ranks rank 0's parameters and buffers."""
    for x in (*module.parameters(), *module.buffers()):
        host = x.detach().cpu().contiguous()
        comm.broadcast(host, 0)
        with torch.no_grad():
            x.copy_(host)


def _connect(comm: Communicator, servers: Sequence[int]) -> tuple[dict[int, Channel], dict[int, Channel]]:
    """Makes a communicator of two ranks for each pair of a worker and a server; a collective. Ranks are paired as in a
    round-robin tournament: in each round every rank meets another one.

    Returns: the channels to the servers that this rank asks, and to the workers that it serves, by rank.
    """
    asked: dict[int, Channel] = {}
    served: dict[int, Channel] = {}
    rank, players = comm.rank, comm.world_size + comm.world_size % 2
    for number in range(players - 1):
        last = players - 1
        peer = number if rank == last else (2 * number - rank) % last
        peer = last if peer == rank else peer
        low, high = sorted((rank, peer))
        needed = [(worker, server) for worker, server in ((low, high), (high, low)) if server in servers]
        here = peer < comm.world_size and bool(needed)
        pair = comm.split(low if here else None, rank)
        for i, (worker, _) in enumerate(needed if pair is not None else []):
            assert pair is not None
            channel = Channel(pair if i == 0 else pair.dup(), rank, peer)
            (asked if worker == rank else served)[peer] = channel
    return dict(sorted(asked.items())), dict(sorted(served.items()))


def _end_all() -> None:
    """Closes all models at the end of the program. If an error ended the program, the other workers get it. In an
    interactive interpreter the last error did not end the program, so it is ignored."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    failure: Exception | None = None
    unclosed: list[int] = []
    for model in list(_open):
        try:
            model.__exit__(None if error is None else type(error), error, None)
        except ClosedError:  # the communicator was closed, by run_ranks when its function returned, or by the program
            unclosed.append(model.rank)
        except Exception as error_of_model:  # the other models are still closed
            failure = failure or error_of_model
    if failure is not None:
        raise failure
    if unclosed:
        warnings.warn(
            f"{CALL}: {rank_list(sorted(unclosed))} closed the communicator before the model, so the last updates may "
            "be lost; call the model's close() first, or use the model in a with block",
            stacklevel=1,
        )


atexit.register(_end_all)
