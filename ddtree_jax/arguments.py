"""Kinds of arguments, and how error messages show them."""

import reprlib
from typing import Any

import numpy as np

BYTES = (bytes, bytearray, memoryview)
"""Sequences of integers that nobody means as token ids."""

_SHOWN = reprlib.Repr(maxlevel=4, maxdict=8, maxlist=8, maxtuple=8, maxset=8, maxstring=80, maxlong=80, maxother=80)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value as error messages show it: not as long or as deep as it may be."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python turns no integer into more than 4300 digits.
        return f"{type(value).__name__} of too many digits"
