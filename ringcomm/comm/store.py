"""Messages that ranks leave for each other in a store, with a header that detects damage: a message that is
truncated, changed, or written by another program or version is refused when it is read."""

from __future__ import annotations

import contextlib
import struct
import time
import zlib
from datetime import timedelta
from typing import Any

from ringcomm.errors import (
    CollectiveTimeoutError,
    EngineError,
    InvalidArgumentError,
    RingcommError,
    one_line,
    rank_list,
)
from ringcomm.terminal import Progress

_CHECK_INTERVAL_S = 2.0  # how often rank 0 checks which ranks are missing
_WORD = b"ringcomm/1"
_HEAD = struct.Struct(f"<{len(_WORD)}sII")  # the word, a checksum of the payload, the rank's world size


def add_checksum(payload: bytes, world_size: int) -> bytes:
    """Adds the header to ``payload``, with the rank's world size."""
    return _HEAD.pack(_WORD, zlib.crc32(payload, world_size), world_size) + payload


def strip_checksum(value: bytes, call: str, rank: int, peer: int) -> tuple[int, bytes]:
    """Returns (world size, payload) of a message from rank ``peer``.

    Raises:  InvalidArgumentError: the value was not written by a rank of this version.
    """
    if len(value) >= _HEAD.size:
        word, checksum, world_size = _HEAD.unpack_from(value)
        payload = value[_HEAD.size :]
        if word == _WORD and checksum == zlib.crc32(payload, world_size):
            return world_size, payload
    raise InvalidArgumentError(
        f"{call}: rank {rank} expected the message of rank {peer} with the checksum of this version of ringcomm, got "
        f"{len(value)} bytes that begin with {value[:16]!r}; install one version of ringcomm everywhere, and keep "
        "other programs from these keys of the store"
    )


def generation(store: Any, key: str, call: str, rank: int) -> int:
    """Returns the number of calls for ``key`` of a store, including this one.

    Raises:  InvalidArgumentError: another program uses the key.
    """
    try:
        count = int(store.add(key, 1))
    except (ValueError, IndexError) as error:  # torch's errors for a value that is not a number, or too large
        got = str(error)
    else:
        if count >= 1:
            return count
        got = str(count)
    raise InvalidArgumentError(
        f"{call}: rank {rank} expected a count in the store under {key!r}, got another program's value ({got}); pass a "
        "store that no other program uses, such as a PrefixStore"
    )


def exchange(
    store: Any, prefix: str, call: str, rank: int, world_size: int, payload: bytes, limit: timedelta, advice: str
) -> tuple[str, list[bytes]]:
    """Gives ``payload`` to all ranks and gets theirs; a collective. Rank 0 says which ranks it waits for.

    Args:
        prefix: of the keys. The n-th calls of every rank with this prefix belong together.
        advice: what to do if ranks do not come in time; the end of a sentence.
    Returns: (a name that no other exchange over this store has, the payloads by rank).
    Raises:  CollectiveTimeoutError: ranks did not come within ``limit``. InvalidArgumentError: a rank has another world
             size, or another program uses the keys. EngineError: the store was lost.
    """
    payloads: list[bytes] = []
    try:
        name = f"{prefix}/{generation(store, f'{prefix}/generation/{rank}', call, rank)}"
        keys = [f"{name}/{peer}" for peer in range(world_size)]
        store.set(keys[rank], add_checksum(payload, world_size))
        deadline = time.monotonic() + limit.total_seconds()
        with Progress(f"{call}: waiting", shows=rank == 0, limit_s=limit.total_seconds()) as waiting:
            # In rank order: with different world sizes, the highest ranks may not exist, but rank 0 tells its size.
            for peer, key in enumerate(keys):
                there = rank == 0 and _look_for(store, keys, key, deadline, waiting, call)
                late = None if there else _wait_for(store, key, deadline)
                if late is not None:
                    missing = [other for other, each in enumerate(keys) if not store.check([each])]
                    raise CollectiveTimeoutError(
                        f"{call}: rank {rank} expected all {world_size} ranks within {limit.total_seconds():g} s, got "
                        f"none of {rank_list(missing or [peer])}; {advice}"
                    ) from late
                its_world_size, value = strip_checksum(bytes(store.get(key)), call, rank, peer)
                if its_world_size != world_size:
                    _await_same_mismatch(store, key, keys[rank])
                    raise InvalidArgumentError(
                        f"{call}: rank {peer} was started with world_size {its_world_size}, this rank ({rank}) with "
                        f"{world_size}; start every rank with the same world size"
                    )
                payloads.append(value)
    except RingcommError:
        raise
    except RuntimeError as error:
        raise EngineError(
            f"{call}: rank {rank} of {world_size} lost the store through which the ranks meet: {one_line(error)}; look "
            "at the other ranks' output, rank 0 may have ended"
        ) from error
    return name, payloads


def _look_for(store: Any, keys: list[str], wanted: str, deadline: float, waiting: Progress, call: str) -> bool:
    """Returns True once the key ``wanted`` exists, False if it does not by the deadline. Meanwhile shows which ranks'
    keys are missing. It polls, because torch logs two warnings for every wait that ends without the key."""
    pause, noted = 0.001, time.monotonic()
    while not store.check([wanted]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if time.monotonic() - noted > _CHECK_INTERVAL_S:
            missing = [peer for peer, each in enumerate(keys) if not store.check([each])]
            if missing:
                waiting.note(f"{call}: waiting for {rank_list(missing)}")
            noted = time.monotonic()
    return True


def _wait_for(store: Any, key: str, deadline: float) -> RuntimeError | None:
    """Waits until the deadline. Returns the store's error if the key is not there."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:  # the stores raise different classes
        return None if store.check([key]) else error  # `check` raises if the store was lost
    return None


def _await_same_mismatch(store: Any, their_key: str, my_key: str) -> None:
    """Waits a second at most until the other rank has found the mismatch, too. If this rank owns the store, the other
    rank loses the store, and with it the reason, once this rank ends."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{my_key}/differs", b"")
        store.wait([f"{their_key}/differs"], timedelta(seconds=1))
