from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

DTYPES: dict[str, int]
REDUCE_OPS: dict[str, int]
OPS: dict[str, int]
ALGORITHMS: dict[str, int]
RECORD_NAME: str
RECORD_HEAD_BYTES: int

def build_info() -> dict[str, str]:
    """Returns what this build is and has: its version, compiler, vector instructions and CUDA."""

def scan_mark(dtype: int, op: int, exclusive: bool) -> int: ...
def record_group(head: bytes) -> int:
    """Returns the communicator's number in the first RECORD_HEAD_BYTES bytes of a record; 0: not connected, or no
    record."""

def read_record(
    bytes: bytes, with_calls: bool = True
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], list[int]]: ...
def set_step(step: int) -> None: ...
def crc32c(data: Buffer, before: int = 0, by_instruction: bool = True) -> int:
    """Returns the CRC-32C (Castagnoli) of contiguous bytes, without holding Python's lock."""

def addresses(dicts: list[dict[str, Any]]) -> bytes:
    """Returns the addresses of the values of some dicts, in order: two results are equal if the dicts hold the same
    objects."""

class Arrivals:
    """Records the gradients that autograd adds to the parameters of a model.

    Attributes:
        expected: the number of the autograd pass whose gradients are recorded without calling Python; -1: none.
    """

    expected: int
    def __init__(self, current_task: Callable[[], int]) -> None: ...
    def hook(
        self, group: int, params: int, index: int, arrival_sets: list[set[int]], prepare: Callable[[int], None]
    ) -> Callable[[tuple[Any, ...]], None]:
        """Returns the hook that a node calls before it accumulates a gradient. It adds the parameter's index to the
        first set in ``arrival_sets`` and, if the gradient is defined, to the second. It calls ``prepare(index)`` first
        if ``arrival_sets`` is empty or the pass is not the expected one."""

    def take_complete(self) -> int:
        """Returns the group whose last gradient this thread has added since the previous call; -1: none."""

    def adding_elsewhere(self) -> int:
        """Returns the group to which another thread may be adding a gradient; -1: none."""

    def end(self) -> None:
        """Called at the end of a pass."""

def trace_start(spans_per_thread: int) -> None: ...
def trace_stop() -> tuple[list[tuple[int, str, list[tuple[str, str, int, int, dict[str, Any]]]]], int]: ...
def ring_step(rank: int, world_size: int, step: int) -> tuple[int, int, bool]: ...
def hierarchical_engine(
    local: Engine,
    transport: object,
    rank: int,
    hosts: Sequence[Sequence[int]],
    names: Sequence[str],
    wire_dtype: int = -1,
    slice_bytes: int = 0,
) -> Engine: ...
def order_over(hosts: Sequence[Sequence[int]]) -> tuple[str, str, list[tuple[int, int]]]: ...
def supports(dtype: int, reduce_op: int) -> bool: ...
def why_no_cuda() -> str: ...

NCCL_IDS: int

def nccl_transport(
    path: str, rank: int, world_size: int, unique_ids: Sequence[bytes], device: int, timeout_ms: int = 0
) -> Any: ...
def nccl_unique_id(path: str) -> bytes: ...
def why_no_nccl(path: str) -> str: ...
def nccl_version(path: str) -> str: ...
def open_pool(engine: Engine, nbytes: int, device: int) -> int: ...
def close_pool(number: int) -> None: ...
def give_back_pools() -> None: ...
def abs_max(spans: Sequence[tuple[int, int]], dtype: int) -> float: ...

BETWEEN_SLICES: dict[str, int]

def simulate(
    *,
    collective: str,
    between: str,
    inside: str,
    flat: bool,
    hosts: int,
    ranks_per_host: int,
    count: int,
    element_bytes: tuple[int, int, int],
    inside_link: tuple[float, float, float, float, int, int, int],
    between_link: tuple[float, float, float, float, int, int, int],
    shared_nic: bool,
    link_share: Sequence[float],
    start_us: Sequence[float],
    slowdown: Sequence[float],
    root_host: int,
    fold: bool,
) -> dict[str, Any]: ...
def fold_sums(spans: Sequence[tuple[int, int]], dtype: int, exponent: int) -> list[int]: ...
def work_stream(array: object, device: int, /) -> int | None: ...

class Request:
    @property
    def done(self) -> bool: ...
    @property
    def source(self) -> int: ...
    def wait(self, timeout_ms: int = 0) -> None: ...
    def start_now(self) -> None: ...
    def join(self, stream: int) -> None: ...

class Engine:
    timeout_ms: int
    def __init__(
        self,
        kind: str,
        rank: int,
        world_size: int,
        timeout_ms: int = 0,
        slot_bytes: int = 0,
        device: int = 0,
        channels: int = 0,
    ) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def aborted(self) -> bool: ...
    @property
    def why_aborted(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def handle(self) -> bytes: ...
    def connect(self, handles: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...
    @property
    def aborted_as(self) -> str: ...
    def abort(self, reason: str, error: str = "AbortedError") -> None: ...
    def agree_on_shrink(self, payload: bytes, members: Sequence[int], limit_ms: int) -> list[bytes]: ...
    def describe(self) -> dict[str, str]: ...
    def allocate(self, nbytes: int) -> int: ...
    def release(self, data: int) -> None: ...
    def exchange(self, payload: bytes) -> list[bytes]: ...
    def capsule(self) -> Any: ...
    def synchronize(self, stream: int = 0) -> None: ...
    def probe(self, root: int, tag: int, timeout_ms: int, waits: bool) -> tuple[int, int, int, int] | None: ...
    def run_list(self, calls: Sequence[tuple[Any, ...]]) -> None: ...
    def pack(
        self,
        pieces: Sequence[tuple[int, int, int]],
        from_dtype: int,
        to_dtype: int,
        factor: float = 1.0,
        stream: int = 0,
    ) -> None: ...
    def combine(
        self,
        first: int,
        second: int,
        output: int,
        count: int,
        dtype: int,
        reduce_op: int,
        divisor: int = 1,
        stream: int = 0,
    ) -> None: ...
    def run_plain(
        self, op: str, reduce_op: str, root: int | None, tag: int, input: object, output: object, /
    ) -> int | None: ...
    def submit_plain(
        self, op: str, reduce_op: str, root: int | None, tag: int, input: object, output: object, /
    ) -> Request | None: ...
    def pack_plain(self, tensors: object, bucket: object, scale: object, unpacks: bool, /) -> bool: ...
    def run(
        self,
        op: int,
        dtype: int,
        reduce_op: int,
        algorithm: int,
        root: int,
        tag: int,
        input: int,
        output: int,
        count: int,
        factor: float = 1.0,
        timeout_ms: int = 0,
        input_parts: Sequence[tuple[int, int]] | None = None,
        output_parts: Sequence[tuple[int, int]] | None = None,
        stream: int = 0,
    ) -> int: ...
    def submit(
        self,
        op: int,
        dtype: int,
        reduce_op: int,
        algorithm: int,
        root: int,
        tag: int,
        input: int,
        output: int,
        count: int,
        factor: float = 1.0,
        timeout_ms: int = 0,
        input_parts: Sequence[tuple[int, int]] | None = None,
        output_parts: Sequence[tuple[int, int]] | None = None,
        stream: int = 0,
    ) -> Request: ...
