"""Reads small files and holds JSON against the form that it must have: whatever is wrong is said with the file's name."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree_jax.arguments import shown

_LARGEST = 2**63 - 1
_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: f"an integer from 0 to {_LARGEST}",
    bool: "a boolean",
}


class SourceError(ValueError):
    """Something is wrong with a file that is read; the message names the file or the tensor."""


def read_json(path: Path, form: Any = dict) -> dict[str, Any]:
    """A JSON object of a form, by default of any.

    Raises:
      SourceError: naming the file: it is missing, can't be read, names a key twice or has another form.
    """
    values = parse_json(read_file(path), path)
    if fault := form_fault(values, form):
        raise SourceError(f"{path}: {fault}")
    return values


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises SourceError, naming the file."""
    try:
        values = json.loads(data.decode(), object_pairs_hook=_unique)
    except ValueError as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise SourceError(f"{path} is not valid JSON: it is nested too deeply") from error
    if not isinstance(values, dict):
        raise SourceError(f"{path} holds a {type(values).__name__}; a JSON object is needed")
    return values


def read_file(path: Path) -> bytes:
    """All bytes of a small file. Raises SourceError, naming it, if it can't be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise SourceError(f"{path} is missing") from error
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives the OSErrors of reads and writes, which name no file, this one's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is in it twice")
    return values


def form_fault(value: Any, form: Any, where: str = "") -> str | None:
    """The first thing that keeps a value of JSON from having a form, None if it has it.

    A form is a type, where ``int`` means 0 to 2^63 - 1; ``{str: form}``, an object of any names; ``{name: form, ...}``, one
    of exactly these; ``[form]``, a list of any length; ``(form, ...)``, one of this length; or a value that it must equal.
    """
    if isinstance(form, type):
        is_right = type(value) is form and (form is not int or 0 <= value <= _LARGEST)
        return None if is_right else f"{where or 'it'} is {shown(value)}; {_NAMES[form]} is needed"
    kind = {dict: dict, list: list, tuple: list}.get(type(form))
    if kind is None:
        is_right = type(value) is type(form) and value == form
        return None if is_right else f"{where or 'it'} is {shown(value)}; {form!r} is needed"
    if fault := form_fault(value, kind, where):
        return fault
    if isinstance(form, dict) and str not in form:
        if value.keys() != form.keys():
            return f"{where or 'it'} has {shown(sorted(value))}; exactly {', '.join(sorted(form))} are needed"
        inner = [(value[name], form[name], name) for name in form]
    elif isinstance(form, dict):
        inner = [(entry, form[str], name) for name, entry in value.items()]
    elif isinstance(form, tuple) and len(value) != len(form):
        return f"{where or 'it'} is {shown(value)}; {len(form)} entries are needed"
    else:
        forms = form if isinstance(form, tuple) else form * len(value)
        inner = [(*pair, i) for i, pair in enumerate(zip(value, forms, strict=True))]
    faults = (form_fault(entry, needed, f"{where}: {name}" if where else str(name)) for entry, needed, name in inner)
    return next(filter(None, faults), None)
