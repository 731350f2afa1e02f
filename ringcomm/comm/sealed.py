"""What ranks leave for each other in a store, under a seal: what was cut off, changed, or left there by another program
or another version is refused as it is read."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from ringcomm.errors import InvalidArgumentError

_WORD = b"ringcomm/1"
_HEAD = struct.Struct(f"<{len(_WORD)}sII")  # the word, a checksum of what follows it, the world size of the rank


def seal(payload: bytes, world_size: int) -> bytes:
    """``payload`` as a rank of so many leaves it for the others."""
    return _HEAD.pack(_WORD, zlib.crc32(payload, world_size), world_size) + payload


def unseal(value: bytes, call: str, rank: int, peer: int) -> tuple[int, bytes]:
    """(World size, payload) of what rank ``peer`` has left.

    Raises: InvalidArgumentError: it is not what a rank of this version left there.
    """
    if len(value) >= _HEAD.size:
        word, checksum, world_size = _HEAD.unpack_from(value)
        payload = value[_HEAD.size :]
        if word == _WORD and checksum == zlib.crc32(payload, world_size):
            return world_size, payload
    raise InvalidArgumentError(
        f"{call}: rank {rank} expected the message of rank {peer} under the seal of this version of ringcomm, got "
        f"{len(value)} bytes that begin with {value[:16]!r}; install one version of ringcomm everywhere, and keep "
        "other programs from these keys of the store"
    )


def generation(store: Any, key: str, call: str, rank: int) -> int:
    """How often this was called for ``key`` of a store, this time included.

    Raises: InvalidArgumentError: another program keeps something else there.
    """
    try:
        count = int(store.add(key, 1))
    except (ValueError, IndexError) as error:  # as torch says that it is no number, or too large a one
        got = str(error)
    else:
        if count >= 1:
            return count
        got = str(count)
    raise InvalidArgumentError(
        f"{call}: rank {rank} expected a count in the store under {key!r}, got what another program left ({got}); pass "
        "a store of its own, such as a PrefixStore"
    )
