"""The serving side of asynchronous training: a rank's shard of the parameters, and the optimizer that updates it.

    worker (any rank)                      server (a rank with a shard), one thread for each worker
      step: gradient of the shard  ----->    the user's optimizer updates the shard
                                             waits while the worker is too far ahead
      copies it into the module    <-----    the shard's values

Each pair of a worker and a server has a communicator of two ranks, so that a rank that ends breaks only its own
connections.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ringcomm import errors
from ringcomm.comm.communicator import Communicator
from ringcomm.data_parallel.buckets.layout import Atom, FlatLayout, Segment
from ringcomm.data_parallel.optim.state import check_shape, is_alike
from ringcomm.errors import CollectiveTimeoutError, InvalidArgumentError, RingcommError, rank_list

STEP, PULL, STATE, LEAVE = range(4)
"""Kinds of a worker's request: an update, which returns the new values; the values; the optimizer's state; to leave."""
_OK, _ERROR = 0, 1
_HEAD, _BODY = 0, 1  # tags
_FOREVER_S = 1e8  # time limit of a server for the next request of a worker that is alive
_CHECK_INTERVAL_S = 0.5  # between two checks for silent workers, while a rank only serves
GroupOptions = list[dict[str, Any]]
"""The options of an optimizer's groups, such as the learning rate, without the parameters."""


class ServerParameter(NamedTuple):
    """A parameter of a server's optimizer: a part of the server's shard of one layout.

    Attributes:
        group: index of the optimizer's parameter group.
        layout: index of the layout; ``start``, ``end``: the range in its buffer.
        shape: the shape of the module's parameter, or of one long tensor over several parameters.
    """

    group: int
    layout: int
    start: int
    end: int
    segments: tuple[int, ...]
    shape: tuple[int, ...]


class FlatParameters:
    """A module's trained parameters, one layout for each element type with a shard for each server, and the flat
    buffers in which a worker sends gradients and receives values.

    Args:
        named: the parameters that are trained.
        group_of: the index of each parameter's optimizer group, by id.
        servers: the number of servers.
        atom: "tensor": the optimizer needs whole tensors; "element": it does not.

    Attributes:
        params: the module's parameters, by layout, in the order of its segments; ``all_params``: those of all layouts.
        joins: whether an entry may be several neighbouring parameters.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], group_of: dict[int, int], servers: int, atom: Atom
    ) -> None:
        kinds: dict[torch.dtype, list[Segment]] = {}
        for name, p in named:
            kinds.setdefault(p.dtype, []).append(Segment(name, tuple(p.shape), group_of[id(p)]))
        by_name = dict(named)
        self.joins = atom == "element"
        self.layouts = [FlatLayout.build(specs, dtype, servers, atom) for dtype, specs in kinds.items()]
        self.params = [[by_name[segment.name] for segment in layout.segments] for layout in self.layouts]
        self.all_params = [p for params in self.params for p in params]
        self._kinds = [[segment.group for segment in layout.segments] for layout in self.layouts]
        self._gradients, self._values = self._zeros(), self._zeros()
        # Views of these buffers, in the order of `all_params`.
        self._gradient_parts, self._value_parts = self._parts(self._gradients), self._parts(self._values)

    def _zeros(self) -> list[torch.Tensor]:
        return [torch.zeros(layout.numel, dtype=layout.dtype) for layout in self.layouts]

    def _parts(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x for layout, buffer in zip(self.layouts, buffers, strict=True) for x in layout.parts(buffer)]

    def pack_gradients(self) -> None:
        """Copies the parameters' gradients to the buffers; a parameter without a gradient gives zeros."""
        _fill(self._gradient_parts, [p.grad for p in self.all_params])

    def pack_values(self) -> None:
        """Copies the parameters to the buffers."""
        _fill(self._value_parts, [p.detach() for p in self.all_params])

    def unpack_values(self) -> None:
        """Copies the buffers to the parameters."""
        with torch.no_grad():
            torch._foreach_copy_(self.all_params, self._value_parts)

    def gradient_shard(self, server: int) -> list[torch.Tensor]:
        """Returns a server's shard of the gradients' buffers."""
        return self._shard(self._gradients, server)

    def value_shard(self, server: int) -> list[torch.Tensor]:
        """Returns a server's shard of the values' buffers."""
        return self._shard(self._values, server)

    def _shard(self, buffers: Sequence[torch.Tensor], server: int) -> list[torch.Tensor]:
        return [x[slice(*layout.shard_range(server))] for layout, x in zip(self.layouts, buffers, strict=True)]

    def separate(self, state_of: Callable[[nn.Parameter], dict[str, Any]], rank: int) -> None:
        """Splits entries whose parameters cannot share one state: from now on all parameters of an entry have the same
        group, counters and kinds of moments.

        Raises:  ShapeError: state of another shape than its parameter. Nothing has changed then.
        """
        if not self.joins:
            return
        numbers: dict[tuple[int, str], int] = {}
        self._kinds = [
            [
                numbers.setdefault((segment.group, _kind_of(segment, state_of(p), rank)), len(numbers))
                for segment, p in zip(layout.segments, params, strict=True)
            ]
            for layout, params in zip(self.layouts, self.params, strict=True)
        ]

    def entries(self, server: int) -> Iterator[ServerParameter]:
        """Yields the parameters of a server's optimizer."""
        for number, layout in enumerate(self.layouts):
            start, end = layout.shard_range(server)
            segments = layout.segments
            if self.joins:
                for run in layout.runs(start, end, self._kinds[number], layout.dtype.itemsize > 2):
                    group = segments[run.segments[0]].group
                    yield ServerParameter(group, number, run.start, run.end, run.segments, (run.end - run.start,))
            else:
                for fragment in layout.fragments(start, end, empty=True):
                    its = segments[fragment.segment]
                    yield ServerParameter(its.group, number, its.offset, its.end, (fragment.segment,), its.shape)

    def cut(self, shard: Sequence[torch.Tensor], server: int) -> list[torch.Tensor]:
        """Returns the part of a server's shard that belongs to each of `entries`."""
        found = []
        for entry in self.entries(server):
            first = self.layouts[entry.layout].shard_range(server)[0]
            found.append(shard[entry.layout][entry.start - first : entry.end - first].view(entry.shape))
        return found

    def overlaps(self, entry: ServerParameter) -> Iterator[tuple[nn.Parameter, slice, slice]]:
        """Yields the module's parameters that an entry overlaps, each with the overlap as a slice of the flattened
        parameter, and as a slice of the flattened entry."""
        for i in entry.segments:
            segment = self.layouts[entry.layout].segments[i]
            first, last = max(entry.start, segment.offset), min(entry.end, segment.end)
            if first <= last:
                inside = slice(first - segment.offset, last - segment.offset)
                yield self.params[entry.layout][i], inside, slice(first - entry.start, last - entry.start)


class Channel:
    """One end of the connection between a worker and a server.

    Args:
        pair: a communicator of the two; this object closes it.
        rank, peer: this rank and the other one, in the user's communicator.
    """

    def __init__(self, pair: Communicator, rank: int, peer: int) -> None:
        self._pair, self.rank, self.peer = pair, rank, peer
        self._other = 1 - pair.rank
        # On one host receives from any rank, because the search for deadlocks ignores such waits: a server waits here
        # while a worker computes.
        self._source = None if len(pair.hosts) == 1 else self._other
        self.sent_bytes = self.received_bytes = 0

    def send(self, numbers: Sequence[int], blob: bytes = b"", tensors: Sequence[torch.Tensor] = ()) -> None:
        """Sends a message of three numbers, bytes, and tensors."""
        head = torch.tensor([*numbers, len(blob)], dtype=torch.int64)
        self._send(head, _HEAD)
        if blob:
            self._send(torch.frombuffer(bytearray(blob), dtype=torch.uint8), _BODY)
        self.send_tensors(tensors)

    def send_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends the tensors that belong to a message."""
        for x in tensors:
            self._send(x, _BODY)

    def receive(self, limit_s: float | None) -> tuple[list[int], bytes]:
        """Returns the numbers and the bytes of a message; its tensors follow.

        Args:
            limit_s: None: no limit, as long as the other rank lives.
        """
        head = torch.empty(4, dtype=torch.int64)
        self._recv(head, _HEAD, _FOREVER_S if limit_s is None else limit_s)
        *numbers, nbytes = head.tolist()
        blob = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self._recv(blob, _BODY, None)
        return numbers, blob.numpy().tobytes()

    def receive_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receives the tensors that belong to a message."""
        for x in tensors:
            self._recv(x, _BODY, None)

    def _send(self, x: torch.Tensor, tag: int) -> None:
        self._pair.send(x, self._other, tag)
        self.sent_bytes += x.nbytes

    def _recv(self, x: torch.Tensor, tag: int, limit_s: float | None) -> None:
        self._pair.recv(x, self._source, tag, timeout=limit_s)
        self.received_bytes += x.nbytes

    def abort(self, reason: str, cause: BaseException | None) -> None:
        """Makes the waits of both ranks, in any thread, raise an error of the kind of ``cause``."""
        self._pair._open.abort(reason, cause)

    def close(self) -> None:
        """Disconnects."""
        self._pair.close()


class Shard:
    """A server's shard of the parameters, and the optimizer over it. One thread at a time may use it.

    Args:
        server: the server's index among the servers.
        values: the shard's values, one tensor for each layout; this object keeps and changes them.
        optimizer: a new optimizer over the module's parameters; this object makes it one over the shard.
        staleness_scale: see `AsynchronousDataParallel`.
    """

    def __init__(
        self,
        flat: FlatParameters,
        server: int,
        values: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        staleness_scale: Callable[[int], float] | None,
    ) -> None:
        self._flat, self._server, self._values = flat, server, values
        self._optimizer, self._scale = optimizer, staleness_scale
        begun = {id(p): state for p, state in optimizer.state.items()}
        self._replace_params()
        for p, entry in zip(self._params, self._entries, strict=True):
            first = next((its for its, _, _ in flat.overlaps(entry)), None)
            if id(first) in begun:  # each entry is one whole parameter in this case
                optimizer.state[p] = {
                    key: value.to(p.device) if torch.is_tensor(value) else value
                    for key, value in begun[id(first)].items()
                }

    def _replace_params(self) -> None:
        """Replaces the optimizer's parameters by the shard's, without state."""
        self._entries = [*self._flat.entries(self._server)]
        self._params = [nn.Parameter(x) for x in self._flat.cut(self._values, self._server)]
        self._optimizer.state.clear()
        for number, group in enumerate(self._optimizer.param_groups):
            group["params"] = [p for p, e in zip(self._params, self._entries, strict=True) if e.group == number]

    def empty(self) -> list[torch.Tensor]:
        """Returns new buffers of the shard's size."""
        return [torch.empty_like(x) for x in self._values]

    def copy_values(self, out: Sequence[torch.Tensor]) -> None:
        """Copies the values to ``out``."""
        for target, source in zip(out, self._values, strict=True):
            target.copy_(source)

    def set_values(self, values: Sequence[torch.Tensor]) -> None:
        """Replaces the values."""
        with torch.no_grad():
            for target, source in zip(self._values, values, strict=True):
                target.copy_(source)

    def update(self, gradient: list[torch.Tensor], options: GroupOptions, staleness: int) -> None:
        """Makes one step of the optimizer, with a worker's options."""
        try:
            for group, new in zip(self._optimizer.param_groups, options, strict=True):
                group.update(new)
                if self._scale is not None:
                    group["lr"] = group["lr"] * self._scale(staleness)
            for p, grad in zip(self._params, self._flat.cut(gradient, self._server), strict=True):
                p.grad = grad
            self._optimizer.step()
        finally:
            for p in self._params:
                p.grad = None

    def state(self) -> list[dict[str, Any]]:
        """Returns a copy of the optimizer's state of each of the shard's entries."""
        return [
            {
                key: value.clone() if torch.is_tensor(value) else value
                for key, value in self._optimizer.state.get(p, {}).items()
            }
            for p in self._params
        ]

    def set_state(self, state_of: Callable[[nn.Parameter], dict[str, Any]]) -> None:
        """Sets the optimizer's state from the state of the module's parameters, with which `FlatParameters.separate`
        was called."""
        self._replace_params()
        for p, entry in zip(self._params, self._entries, strict=True):
            mine: dict[str, Any] = {}
            for its, inside, place in self._flat.overlaps(entry):
                for key, value in state_of(its).items():
                    if not is_alike(key, value, its):
                        mine[key] = _loaded(key, value, p)
                        continue
                    part = _loaded(key, value.reshape(-1)[inside], p)
                    if key not in mine:
                        mine[key] = torch.zeros(p.shape, dtype=part.dtype)
                    mine[key].view(-1)[place] = part
            if mine:
                self._optimizer.state[p] = mine


def _fill(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor | None]) -> None:
    """Copies each source to its target; None: zeros."""
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if source is not None]
    with torch.no_grad():
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
        for target, source in zip(targets, sources, strict=True):
            if source is None:
                target.zero_()


def _kind_of(segment: Segment, state: dict[str, Any], rank: int) -> str:
    """Returns what parameters in one entry must have in common: the counters, and which moments they have."""
    kinds: dict[str, Any] = {}
    for key, value in sorted(state.items()):
        if is_alike(key, value, segment):
            kinds[key] = value.dtype
        else:
            check_shape(key, value, segment.name, segment.shape, rank)
            kinds[key] = value.tolist() if torch.is_tensor(value) else value
    return repr(kinds)


def _loaded(key: str, value: Any, param: torch.Tensor) -> Any:
    """Returns a copy of loaded state on the parameter's device, in the element type that torch gives it."""
    if not torch.is_tensor(value):
        return value
    floats = key != "step" and param.is_floating_point()
    return value.to(param.device, param.dtype if floats else value.dtype, copy=True)


class ArrivalOrder:
    """The order of a server's events: the order in which they come, or that of an earlier run.

    An event is a worker's rank when its gradient is used, and ``-1 - rank`` when it reads the values.

    Args:
        record: whether to record the events.
        replay: the events of an earlier run; None: any order.

    Attributes:
        events: the recorded events.
    """

    def __init__(self, record: bool, replay: Sequence[int] | None) -> None:
        self._record, self._replay = record, replay
        self._next = 0
        self._left = Counter(replay)  # the events of the replay that have not happened
        self.events: list[int] = []

    def validate(self, event: int, server: int) -> None:
        """Raises an error if the event is not among the remaining events of the replay.

        Args:
            server: the server's rank.
        """
        if self._replay is not None and not self._left[event]:
            raise InvalidArgumentError(
                f"step: the server on rank {server} got a {'gradient' if event >= 0 else 'request for values'} of "
                f"rank {max(event, -1 - event)} that is not in replay, expected one of its {len(self._replay)} events, "
                f"of which {self._next} have happened; make the steps of the recorded run"
            )

    def expected(self, event: int) -> int:
        """Returns the event that must happen next: without a replay, ``event``."""
        return event if self._replay is None else self._replay[self._next]

    def timeout_error(self, event: int, server: int, limit_s: float) -> CollectiveTimeoutError:
        """Returns the error of a worker whose event was not the next one within the limit."""
        worker, other = (max(each, -1 - each) for each in (event, self.expected(event)))
        return CollectiveTimeoutError(
            f"step: rank {worker} expected its turn on the server on rank {server} within the timeout of "
            f"{limit_s:g} s, but event {self._next} of replay belongs to rank {other}, which did not come; make the "
            "steps of the recorded run"
        )

    def add(self, event: int) -> None:
        """Records that the event has happened."""
        if self._record:
            self.events.append(event)
        self._left[event] -= 1
        self._next += 1


@dataclass
class ServerCounters:
    """Counts the work of a server.

    Attributes:
        updates: the number of updates of the shard, which is also the version of its values.
        staleness: the number of gradients, by their staleness.
        waits, waited_s: the number of answers that waited for slower workers, and their waiting time.
        lost: the workers that were lost, and why.
    """

    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    waits: int = 0
    waited_s: float = 0.0
    lost: dict[int, str] = field(default_factory=dict)


class ParameterServer:
    """Serves a shard to the workers: with a thread for each other worker, and `push` and `pull` for this rank's own.

    Args:
        order: the order in which gradients are used and values are read.
        rank: this rank.
        servers: the ranks that serve.
        workers: the ranks that work; none of them has made a step.
        max_staleness: see `AsynchronousDataParallel`.
        limit_s: the longest time that an answer may wait for another worker.
    """

    def __init__(
        self,
        shard: Shard,
        order: ArrivalOrder,
        rank: int,
        servers: Sequence[int],
        workers: Sequence[int],
        max_staleness: int | None,
        limit_s: float,
    ) -> None:
        self._shard, self.order, self._rank, self._servers = shard, order, rank, servers
        self._max_staleness = math.inf if max_staleness is None else max_staleness
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._clock = dict.fromkeys(workers, 0)  # steps made, by worker that has not left
        self._heard = dict.fromkeys(workers, time.monotonic())  # time of the last request or answer
        # With max_staleness=0: the gradients of the step, and their options, by worker.
        self._round: dict[int, tuple[list[torch.Tensor], GroupOptions]] = {}
        self._failure: RingcommError | None = None
        self._threads: dict[Channel, threading.Thread] = {}
        self.counters = ServerCounters()

    # ---- threads ---------------------------------------------------------------------------------------------------

    def start(self, channels: Iterable[Channel]) -> None:
        """Starts to serve the workers at the other ends of the channels; this object closes the channels."""
        for channel in channels:
            name = f"ringcomm server of rank {channel.peer}"
            self._threads[channel] = threading.Thread(target=self._serve, args=(channel,), name=name, daemon=True)
        for thread in self._threads.values():
            thread.start()

    @property
    def channels(self) -> list[Channel]:
        """The channels to the workers that this server serves."""
        return [*self._threads]

    def join(self) -> None:
        """Waits until the other workers have closed or are lost.

        Raises:  CollectiveTimeoutError: a worker that has not closed has sent no request within the time limit. The
                 error with which this server has failed.
        """
        began = time.monotonic()
        for thread in self._threads.values():
            while thread.is_alive():
                thread.join(_CHECK_INTERVAL_S)
                silent = self._silent(began)
                if silent:
                    raise CollectiveTimeoutError(
                        f"close: rank {self._rank} expected a step or close() of {rank_list(silent)}, which it serves, "
                        f"got none within the timeout of {self._limit_s:g} s; see whether they have stalled"
                    )
        self._check()

    def abort(self, reason: str, cause: BaseException) -> None:
        """Ends the connections to the workers with an error, and the threads."""
        for channel in self._threads:
            channel.abort(reason, cause)
        for thread in self._threads.values():
            thread.join()

    def close(self) -> None:
        """Disconnects from the workers, once the threads have ended."""
        for channel in self._threads:
            channel.close()

    def _serve(self, channel: Channel) -> None:
        """Answers a worker's requests until it leaves or is lost; the body of a thread."""
        worker = channel.peer
        buffers = self._shard.empty()  # for the worker's gradient, then for the answer
        options: GroupOptions = []
        try:
            while True:
                self._heard[worker] = time.monotonic()
                (kind, base, _), blob = channel.receive(None)
                self._heard[worker] = time.monotonic()
                if kind == STEP:
                    options = pickle.loads(blob) if blob else options
                    channel.receive_tensors(buffers)
                try:
                    answer, more = self._answer(kind, worker, base, buffers, options)
                except RingcommError as error:
                    channel.send((_ERROR, 0, 0), pickle.dumps((type(error).__name__, str(error))))
                    continue
                channel.send((_OK, answer, 0), more, buffers if kind in (STEP, PULL) else ())
                if kind == LEAVE:
                    return
        except RingcommError as error:
            self._lose(worker, error)
        except Exception as error:  # a thread that ends silently would leave the worker waiting
            self.fail(
                RingcommError(
                    f"step: the server on rank {self._rank} expected to answer rank {worker}, raised "
                    f"{type(error).__name__}: {error}; every worker ends"
                )
            )
            channel.abort(str(self._failure), None)

    def _answer(
        self, kind: int, worker: int, base: int, buffers: list[torch.Tensor], options: GroupOptions
    ) -> tuple[int, bytes]:
        """Handles a request. Returns the version of the values that it has put into the buffers, and pickled state."""
        if kind == STEP:
            self.push(worker, base, buffers, options)
        if kind in (STEP, PULL):
            return self.pull(worker, buffers), b""
        if kind == STATE:
            return 0, pickle.dumps(self.state())
        self.leave(worker)
        return 0, b""

    def _lose(self, worker: int, error: RingcommError) -> None:
        """Records that a worker was lost. The other workers continue, unless the lost rank also serves: then they get
        an error."""
        with self._changed:
            ends = worker in self._servers or self._failure is not None or worker not in self._clock
            self.counters.lost.setdefault(worker, str(error))
        with suppress(RingcommError):  # the optimizer's error in a round that this ends; later requests raise it
            self.leave(worker)
        if not ends:
            with suppress(Warning):  # a filter may turn the warning into an error, which would end this thread
                warnings.warn(
                    f"AsynchronousDataParallel: the server on rank {self._rank} lost worker {worker}, the others go "
                    f"on without it: {error}",
                    stacklevel=2,
                )

    def _silent(self, since: float) -> list[int]:
        """Returns the workers that have not left, and have requested nothing within the time limit.

        Args:
            since: the time of `time.monotonic` from which on silence counts.
        """
        now = time.monotonic()
        with self._changed:
            return [w for w in self._clock if now - max(since, self._heard[w]) > self._limit_s]

    # ---- requests of workers ---------------------------------------------------------------------------------------

    def push(self, worker: int, base: int, gradient: list[torch.Tensor], options: GroupOptions) -> None:
        """Updates the shard with a worker's gradient.

        Args:
            base: the version of the values with which the gradient was computed.
            gradient: of the shard; kept until the worker's next `pull` returns.
        """
        with self._changed:
            self._await_turn(worker)
            self._clock[worker] += 1
            if self._max_staleness:
                self._update(gradient, options, self.counters.updates - base)
            else:
                self._round[worker] = gradient, options
                self._end_round()
            self._happened(worker)

    def pull(self, worker: int, out: list[torch.Tensor]) -> int:
        """Copies the shard's values to ``out``, once the worker may continue; returns their version."""
        with self._changed:
            self._await_others(worker)
            self._await_turn(-1 - worker)
            self._shard.copy_values(out)
            self._happened(-1 - worker)
            return self.counters.updates

    def state(self) -> list[dict[str, Any]]:
        """Returns a copy of the optimizer's state of each of the shard's entries."""
        with self._changed:
            return self._shard.state()

    def leave(self, worker: int) -> None:
        """Records that a worker makes no more steps."""
        with self._changed:
            self._clock.pop(worker, None)
            if not self._max_staleness:
                self._end_round()
            self._changed.notify_all()

    # ---- calls of its own rank -------------------------------------------------------------------------------------

    def set_values(self, values: Sequence[torch.Tensor]) -> None:
        """Replaces the shard's values."""
        with self._changed:
            self._shard.set_values(values)

    def set_state(self, state_of: Callable[[nn.Parameter], dict[str, Any]]) -> None:
        """Sets the optimizer's state from the state of the module's parameters."""
        with self._changed:
            self._shard.set_state(state_of)

    def fail(self, error: RingcommError) -> None:
        """Ends the training: every request from now on raises ``error``."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _await_others(self, worker: int) -> None:
        """Waits until the worker is at most ``max_staleness`` steps ahead of the slowest."""

        def may_go() -> bool:
            ahead = self._clock[worker] - min(self._clock.values())
            return worker not in self._round and ahead <= self._max_staleness

        if worker in self._clock and not may_go():
            began = time.monotonic()
            self.counters.waits += 1
            self._wait(may_go, lambda: self._slow(worker))
            self.counters.waited_s += time.monotonic() - began
        self._check()

    def _slow(self, worker: int) -> CollectiveTimeoutError:
        mine = self._clock[worker]
        slowest = min(self._clock, key=self._clock.__getitem__)
        return CollectiveTimeoutError(
            f"step: rank {worker} has made {mine} steps and expected step {mine - self._max_staleness:g} of rank "
            f"{slowest}, which has made {self._clock[slowest]}, within the timeout of {self._limit_s:g} s "
            f"(max_staleness={self._max_staleness:g}); see whether rank {slowest} has stalled; it calls close() when "
            "it makes no more steps"
        )

    def _await_turn(self, event: int) -> None:
        """With ``replay``, waits until the event is the next one."""
        self._check()
        self.order.validate(event, self._rank)
        self._wait(
            lambda: self.order.expected(event) == event,
            lambda: self.order.timeout_error(event, self._rank, self._limit_s),
        )

    def _wait(self, ready: Callable[[], bool], late: Callable[[], CollectiveTimeoutError]) -> None:
        if not self._changed.wait_for(lambda: self._failure is not None or ready(), self._limit_s):
            raise late()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _happened(self, event: int) -> None:
        self.order.add(event)
        self._changed.notify_all()

    # ---- updates ---------------------------------------------------------------------------------------------------

    def _end_round(self) -> None:
        """With max_staleness=0: updates the shard with the mean of the gradients, once all have come."""
        if not self._round or not self._clock.keys() <= self._round.keys():
            return
        came = [self._round[worker] for worker in sorted(self._round)]
        self._round = {}
        mean = [_mean(list(some)) for some in zip(*(gradient for gradient, _ in came), strict=True)]
        self._update(mean, came[0][1], 0)

    def _update(self, gradient: list[torch.Tensor], options: GroupOptions, staleness: int) -> None:
        """Updates the shard, and counts it; an error of the optimizer ends the training."""
        try:
            self._shard.update(gradient, options, staleness)
        except Exception as error:
            self._failure = RingcommError(
                f"step: the optimizer of the server on rank {self._rank} expected to update its shard, raised "
                f"{type(error).__name__}: {error}; every worker ends"
            )
            self._changed.notify_all()
            raise self._failure from error
        self.counters.updates += 1
        self.counters.staleness[staleness] += 1


def unsharded_state(
    flat: FlatParameters, states: Sequence[Sequence[dict[str, Any]]]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns the state of the module's parameters.

    Args:
        states: by server, what `ParameterServer.state` returned.
    """
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for server, its in enumerate(states):
        for entry, state in zip(flat.entries(server), its, strict=True):
            for p, inside, place in flat.overlaps(entry):
                mine = found.setdefault(p, {}) if state else {}
                for key, value in state.items():
                    if not is_alike(key, value, entry):
                        mine[key] = value.clone() if torch.is_tensor(value) else value
                        continue
                    if key not in mine:
                        mine[key] = torch.zeros(p.shape, dtype=value.dtype)
                    mine[key].view(-1)[inside] = value.reshape(-1)[place]
    return found


def raise_answer(status: int, blob: bytes) -> None:
    """Raises the error that a server has answered."""
    if status == _ERROR:
        name, text = pickle.loads(blob)
        raise getattr(errors, name)(text)


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    """Returns the mean with the bits of the canonical order: a balanced tree over the ranks, and 16-bit floats in
    float32, rounded once."""
    dtype = values[0].dtype
    if dtype.itemsize < 4:
        values = [x.float() for x in values]
    return (_tree_sum(values) / len(values)).to(dtype)


def _tree_sum(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    cut = 1 << ((len(values) - 1).bit_length() - 1)
    return _tree_sum(values[:cut]) + _tree_sum(values[cut:])
