"""What the tests with hostile input share: what a refusal must look like."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ringcomm import errors

BROKEN = (errors.AbortedError, errors.CollectiveTimeoutError, errors.MismatchError)


def refusal(call: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The sentence of the error of ringcomm, or of one of ``kinds``, that a call must raise."""
    try:
        result = call()
    except errors.RingcommError as error:
        if isinstance(error, BROKEN) and not isinstance(error, kinds):
            raise AssertionError(f"was not refused, and broke the communicator: {error}") from error
        text = str(error)
        assert re.match(r"^[\w \[\]'.:#]+: ", text), f"does not name the call: {text}"
        assert "; " in text, f"does not say what to do: {text}"
        assert text.isprintable(), f"is no line of text: {text!r}"
        return text
    except kinds as error:
        return str(error)
    raise AssertionError(f"was accepted, and gave {type(result).__name__}")
