"""Messages that ranks leave for each other in a store, with a header that detects damage: a message that is
truncated, changed, or written by another program or version is refused when it is read."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from ringcomm.errors import InvalidArgumentError

_WORD = b"ringcomm/1"
_HEAD = struct.Struct(f"<{len(_WORD)}sII")  # the word, a checksum of the payload, the rank's world size


def frame(payload: bytes, world_size: int) -> bytes:
    """Adds the header to ``payload``, with the rank's world size."""
    return _HEAD.pack(_WORD, zlib.crc32(payload, world_size), world_size) + payload


def unframe(value: bytes, call: str, rank: int, peer: int) -> tuple[int, bytes]:
    """Returns (world size, payload) of the message of rank ``peer``.

    Raises:  InvalidArgumentError: the value was not written by a rank of this version.
    """
    if len(value) >= _HEAD.size:
        word, checksum, world_size = _HEAD.unpack_from(value)
        payload = value[_HEAD.size :]
        if word == _WORD and checksum == zlib.crc32(payload, world_size):
            return world_size, payload
    raise InvalidArgumentError(
        f"{call}: rank {rank} expected the message of rank {peer} with the header of this version of ringcomm, got "
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
        f"{call}: rank {rank} expected a count in the store under {key!r}, got what another program left ({got}); pass "
        "a store of its own, such as a PrefixStore"
    )
