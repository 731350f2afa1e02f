"""Checks the arguments of a call before the call does anything; a decorator declares what each must be.

    @expects("stretch", times=validate_int(1), how=one_of("once", "twice"))
    def stretch(text: str, times: int, how: str | None = None) -> str:

Arguments that are not named are not checked.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ringcomm.errors import InvalidArgumentError, shown

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _unknown(value: Any) -> str:
    return ""


class Requirement(NamedTuple):
    """The requirement on an argument.

    Attributes:
        said: the requirement in words, for the error.
        take: converts the argument to the form that the call uses; raises any exception for a wrong argument.
        instead: of a wrong argument, what to pass in its place, for the error; empty if unknown.
    """

    said: str
    take: Callable[[Any], Any]
    instead: Callable[[Any], str] = _unknown


def _plain(value: Any) -> int | float:
    return operator.index(value) if isinstance(value, Integral) else float(value)


def that(
    said: str,
    fits: Callable[[Any], bool],
    take: Callable[[Any], Any] | None = None,
    instead: Callable[[Any], str] = _unknown,
) -> Requirement:
    """Requires that ``fits`` returns True."""

    def taken(value: Any) -> Any:
        if not fits(value):
            raise ValueError(said)
        return value if take is None else take(value)

    return Requirement(said, taken, instead)


def a(said: str, *types: type) -> Requirement:
    """Requires an object of one of these types."""
    return that(said, lambda value: isinstance(value, types))


def or_none(wanted: Requirement) -> Requirement:
    """Also accepts None, for arguments whose default is not None."""
    return Requirement(
        _with_none(wanted.said), lambda value: None if value is None else wanted.take(value), wanted.instead
    )


def _with_none(said: str) -> str:
    """The words for a requirement that None meets too: one "or", before the last choice."""
    return f"{said.replace(', or ', ' or ').replace(' or ', ', ')} or None"


def one_of(*known: str) -> Requirement:
    """Requires one of a few words."""
    return that(f"one of {', '.join(map(repr, known))}", lambda value: isinstance(value, str) and value in known)


def as_int(value: Any) -> int | None:
    """Returns Python's form of an integer of any library; None for any other value, and for True and False."""
    if type(value) is int:
        return value
    try:
        is_truth = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
        return None if is_truth else operator.index(value)
    except Exception:  # raised by the value's own code
        return None


def as_number(value: Any) -> int | float | None:
    """Returns Python's form of a real number of Python or NumPy; None for any other value, and for True and False."""
    try:
        return _plain(value) if _is_a(value, Real) else None
    except Exception:  # raised by the value's own code
        return None


def as_list(values: Any) -> list[Any] | None:
    """Returns the elements of a list, a tuple, a range or a NumPy array of one dimension; None for any other value."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(values, numpy.ndarray):
        return values.tolist() if values.ndim == 1 else None
    return list(values) if isinstance(values, (list, tuple, range)) else None


def validate_int(least: int = 0, most: int = (1 << 63) - 1, said: str = "") -> Requirement:
    """Requires an integer within these bounds, of any library; the call gets Python's."""
    said = said or f"a whole number from {least} to {most}"

    def taken(value: Any) -> int:
        number = as_int(value)
        if number is None or not least <= number <= most:
            raise ValueError(said)
        return number

    def instead(value: Any) -> str:
        """Returns the number that a text spells, if it is within the bounds."""
        spelled = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else None
        return str(spelled) if spelled is not None and least <= spelled <= most else ""

    return Requirement(said, taken, instead)


def number(least: float = -sys.float_info.max, most: float = sys.float_info.max, said: str = "a number") -> Requirement:
    """Requires a number within these bounds, of Python or NumPy; the call gets Python's."""
    return that(said, lambda value: _is_a(value, Real) and least <= float(value) <= most, _plain)


def several(said: str, wanted: Requirement) -> Requirement:
    """Requires an iterable of such values, which is iterated once; the call gets a list."""

    def taken(values: Iterable[Any]) -> list[Any]:
        if isinstance(values, (str, bytes, dict)):
            raise ValueError(said)
        return [wanted.take(value) for value in values]

    return Requirement(said, taken)


FLAG = a("True or False", bool)
TEXT = a("a text", str)
FUNCTION = that("a function", callable)
PATH = that("a path", lambda value: isinstance(value, (str, os.PathLike)) and "\0" not in str(value))
INTEGER = that("a whole number", lambda value: as_int(value) is not None, as_int)
NOT_NEGATIVE = number(0, said="a number from 0 on")
POSITIVE = that("a number above 0", lambda value: _is_a(value, Real) and 0 < float(value) < math.inf, _plain)


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def is_communicator(value: Any) -> bool:
    """Whether a value has a communicator's rank and world size, as test doubles also have."""
    return type(getattr(value, "rank", None)) is int and type(getattr(value, "world_size", None)) is int


def communicator_over(value: Any) -> str:
    """Returns how to make a communicator of a wrong argument, if that is a process group of torch."""
    is_group = any(kind.__name__ == "ProcessGroup" for kind in type(value).__mro__)
    return "ringcomm.Communicator.from_process_group(group)" if is_group else ""


COMMUNICATOR = that("a communicator", is_communicator, instead=communicator_over)


def expects(call: str, **wanted: Requirement) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function check its named arguments first; ``call`` is the name in errors. Defaults are always accepted.

    Raises:  InvalidArgumentError: from the call, if an argument does not meet its requirement.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(function).parameters
        assert wanted.keys() <= parameters.keys(), f"{call} has no {wanted.keys() - parameters.keys()}"
        names = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
        defaults = {name: parameters[name].default for name in wanted}

        def taken(name: str, value: Any) -> Any:
            if name not in wanted or value is defaults[name]:
                return value
            try:
                return wanted[name].take(value)
            except InvalidArgumentError:  # it says more than the requirement
                raise
            except Exception as error:
                expected = _with_none(wanted[name].said) if defaults[name] is None else wanted[name].said
                instead = wanted[name].instead(value)
                advice = f"pass {name}={instead}" if instead else "pass that"
                raise InvalidArgumentError(f"{call}: got {name}={shown(value)}, expected {expected}; {advice}") from (
                    None if type(error) is ValueError else error
                )

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = map(taken, names, args)
            named = {name: taken(name, value) for name, value in kwargs.items()}
            return function(*first, *args[len(names) :], **named)  # type: ignore[arg-type]

        # torch.compile counts compilations per code object.
        checked.__code__ = checked.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
        return checked

    return decorate
