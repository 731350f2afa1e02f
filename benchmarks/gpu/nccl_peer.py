"""
NCCL with several ranks on one GPU, driven by one thread: the peer that `bench.py` measures beside ringcomm.

    python -m benchmarks.gpu.nccl_peer LIBNCCL WORLD_SIZE    # then one JSON object a line on stdin, answers on stdout

    {"op": "all_reduce", "dtype": "float32", "nbytes": 1048576, "sets": 4, "calls": 20, "graph": true}  ->  {"us": 12.3}

NCCL 2.30.3 or newer allows several ranks on one device (``NCCL_MULTI_RANK_GPU_ENABLE=1``, experimental). Only ctypes
is used, not torch: torch comes with an NCCL of its own. Its kernels spin, so that a mistake here would hang: run it
under a time limit, as `Peer` does.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import json
import os
import subprocess
import sys
import threading
from typing import Any

DTYPES = {"float32": (7, 4), "bfloat16": (9, 2), "float16": (6, 2), "int8": (0, 1)}  # ncclDataType_t, bytes
OLDEST = 23003
Pointer = ctypes.c_void_p


# ---- the side of the benchmark ---------------------------------------------------------------------------------------


class Peer:
    """A process that runs NCCL. What goes wrong with it is said once, in `reason`, and ends it."""

    def __init__(self, library: str, world_size: int, multiprocessors: int, limit_s: float) -> None:
        self.reason, self.version, self._limit_s = "", "", limit_s
        environment = {
            **os.environ,
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_CTAS": str(max(1, min(32, multiprocessors // world_size))),  # all blocks must be there at once
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        }
        words = [sys.executable, __file__, library, str(world_size)]
        self._process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.version = str((self._answer() or {}).get("version", ""))

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-7:], line.strip()]

    def time_us(self, **request: Any) -> float | None:
        """Microseconds of one call; None once the peer has failed."""
        if self.reason:
            return None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: the answer says so
        answer = self._answer()
        return None if answer is None or answer["us"] is None else float(answer["us"])

    def _answer(self) -> dict[str, Any] | None:
        lines: list[str] = []
        assert self._process.stdout is not None
        reader = threading.Thread(target=lambda: lines.append(self._process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        reader.join(self._limit_s)
        if not lines:
            self._fail(f"no answer within {self._limit_s:g} s")
            return None
        answer: dict[str, Any] = json.loads(lines[0]) if lines[0].startswith("{") else {"error": "it ended"}
        if "error" in answer:
            self._fail(answer["error"])
            return None
        return answer

    def _fail(self, reason: str) -> None:
        self.close()
        said = "; ".join(line for line in self._said if line)[-300:]
        self.reason = f"{reason}{f' ({said})' if said else ''}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ---- the process -----------------------------------------------------------------------------------------------------


def cudart() -> ctypes.CDLL:
    """The CUDA runtime, of the system or of a wheel."""
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations or []) if wheels else []
    found = [path for folder in folders for path in sorted(glob.glob(f"{folder}/c*/lib/libcudart.so.*"), reverse=True)]
    for name in (*found, "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("no libcudart: expected one in the nvidia wheels or /usr/local/cuda")


class Ranks:
    """Communicators of all ranks on device 0, a stream for each."""

    def __init__(self, path: str, world_size: int) -> None:
        self.world_size = world_size
        self.cuda = cudart()
        self.cuda.cudaGetErrorString.restype = ctypes.c_char_p
        self.nccl = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        number = ctypes.c_int()
        self.call_nccl("ncclGetVersion", ctypes.byref(number))
        self.version = number.value
        if self.version < OLDEST:
            raise RuntimeError(f"NCCL {self.version} refuses two ranks on one device; expected {OLDEST} or newer")
        self.call("cudaSetDevice", 0)
        self.streams = [Pointer() for _ in range(world_size)]
        for stream in self.streams:
            self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)  # non-blocking
        self.comms = (Pointer * world_size)()
        self.call_nccl("ncclCommInitAll", self.comms, world_size, (ctypes.c_int * world_size)())
        self.fork, *self.ends = (self.event(2) for _ in range(world_size + 1))
        self.begin, self.end = self.event(0), self.event(0)

    def call(self, function: str, *args: Any) -> None:
        status = getattr(self.cuda, function)(*args)
        if status != 0:
            raise RuntimeError(f"{function}: {self.cuda.cudaGetErrorString(status).decode()}")

    def call_nccl(self, function: str, *args: Any) -> None:
        status = getattr(self.nccl, function)(*args)
        if status != 0:
            raise RuntimeError(f"{function}: {self.nccl.ncclGetErrorString(status).decode()}")

    def event(self, flags: int) -> Pointer:
        event = Pointer()
        self.call("cudaEventCreateWithFlags", ctypes.byref(event), flags)
        return event

    def memory(self, nbytes: int) -> Pointer:
        at = Pointer()
        self.call("cudaMalloc", ctypes.byref(at), ctypes.c_size_t(nbytes))
        return at

    # -- calls

    def collective(self, op: str, dtype: str, nbytes: int, inputs: list[Pointer], outputs: list[Pointer]) -> None:
        kind, width = DTYPES[dtype]
        whole = ctypes.c_size_t(nbytes // width)
        part = ctypes.c_size_t(nbytes // width // self.world_size)
        self.call_nccl("ncclGroupStart")
        for rank, (comm, stream) in enumerate(zip(self.comms, self.streams, strict=True)):
            ends, handle = (inputs[rank], outputs[rank]), Pointer(comm)
            if op == "all_reduce":
                self.call_nccl("ncclAllReduce", *ends, whole, kind, 0, handle, stream)
            elif op == "reduce_scatter":
                self.call_nccl("ncclReduceScatter", *ends, part, kind, 0, handle, stream)
            elif op == "all_gather":
                self.call_nccl("ncclAllGather", *ends, part, kind, handle, stream)
            else:
                self.call_nccl("ncclBroadcast", *ends, whole, kind, 0, handle, stream)
        self.call_nccl("ncclGroupEnd")

    def spread(self) -> None:
        """What comes now on any stream comes after what is on the first."""
        self.call("cudaEventRecord", self.fork, self.streams[0])
        for stream in self.streams[1:]:
            self.call("cudaStreamWaitEvent", stream, self.fork, 0)

    def gather(self) -> None:
        """What comes now on the first stream comes after what is on any."""
        for stream, end in zip(self.streams[1:], self.ends[1:], strict=True):
            self.call("cudaEventRecord", end, stream)
            self.call("cudaStreamWaitEvent", self.streams[0], end, 0)

    def is_written(self, at: Pointer, nbytes: int) -> bool:
        """Whether a result has come into a buffer that was full of ones."""
        end = ctypes.create_string_buffer(1)
        self.call("cudaMemcpy", end, at, ctypes.c_size_t(1), 2)  # to the host
        return end.raw != b"\xff"

    def time_us(self, op: str, dtype: str, nbytes: int, sets: int, calls: int, graph: bool) -> float | None:
        """Microseconds of one call, of `calls` back to back over `sets` of buffers; None if it has no result."""
        memory = [[self.memory(nbytes) for _ in range(2 * self.world_size)] for _ in range(sets)]
        for buffers in memory:
            for at, value in zip(buffers, [0x3C] * self.world_size + [0xFF] * self.world_size, strict=True):
                self.call("cudaMemset", at, value, ctypes.c_size_t(nbytes))

        def run() -> None:
            for i in range(calls):
                buffers = memory[i % sets]
                self.collective(op, dtype, nbytes, buffers[: self.world_size], buffers[self.world_size :])

        try:
            run()
            self.call("cudaDeviceSynchronize")
            if not all(self.is_written(at, nbytes) for at in memory[0][self.world_size :]):
                return None  # a library that was built without this sum enqueues nothing
            return self.time_graph(run, calls) if graph else self.time_stream(run, calls)
        finally:
            self.call("cudaDeviceSynchronize")
            for buffers in memory:
                for at in buffers:
                    self.call("cudaFree", at)

    def time_stream(self, run: Any, calls: int) -> float:
        self.call("cudaEventRecord", self.begin, self.streams[0])
        self.spread()
        run()
        self.gather()
        return self.elapsed_us() / calls

    def time_graph(self, run: Any, calls: int) -> float:
        graph, code = Pointer(), Pointer()
        self.call("cudaStreamBeginCapture", self.streams[0], 2)  # relaxed
        self.spread()
        run()
        self.gather()
        self.call("cudaStreamEndCapture", self.streams[0], ctypes.byref(graph))
        self.call("cudaGraphInstantiate", ctypes.byref(code), graph, ctypes.c_ulonglong(0))
        self.call("cudaGraphLaunch", code, self.streams[0])
        self.call("cudaStreamSynchronize", self.streams[0])
        replays = 3
        self.call("cudaEventRecord", self.begin, self.streams[0])
        for _ in range(replays):
            self.call("cudaGraphLaunch", code, self.streams[0])
        us = self.elapsed_us() / calls / replays
        self.call("cudaGraphExecDestroy", code)
        self.call("cudaGraphDestroy", graph)
        return us

    def elapsed_us(self) -> float:
        self.call("cudaEventRecord", self.end, self.streams[0])
        self.call("cudaEventSynchronize", self.end)
        ms = ctypes.c_float()
        self.call("cudaEventElapsedTime", ctypes.byref(ms), self.begin, self.end)
        return ms.value * 1e3


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NCCL writes its messages to stdout
    try:
        ranks = Ranks(sys.argv[1], int(sys.argv[2]))
        print(json.dumps({"version": ranks.version}), file=answers)
        for line in sys.stdin:
            print(json.dumps({"us": ranks.time_us(**json.loads(line))}), file=answers)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
