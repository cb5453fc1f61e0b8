"""How far a conversion is: a bar with GB/s and the time left on a terminal, a line a part elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple


class State(NamedTuple):
    """Finished parts of all parts; bytes written in this run of those it has to write; the part in hand."""

    parts: int
    num_parts: int
    num_bytes: int
    total_bytes: int
    part: str


Reporter = Callable[[State], None]


class Progress:
    """Shows states as they come, on stderr."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._parts = -1

    def __call__(self, state: State) -> None:
        is_terminal = sys.stderr.isatty()
        is_new = state.parts != self._parts
        self._parts = state.parts
        if not is_terminal and not is_new:
            return
        line = describe(state, time.monotonic() - self._start)
        end = "" if is_terminal and state.parts < state.num_parts else "\n"
        print(f"\r{line}" if is_terminal else line, end=end, file=sys.stderr, flush=True)


def describe(state: State, seconds: float) -> str:
    """The line for a state that was reached in so many seconds."""
    share = state.num_bytes / max(state.total_bytes, 1)
    rate = state.num_bytes / max(seconds, 1e-9)
    left = (state.total_bytes - state.num_bytes) / rate if rate else 0.0
    bar = "#" * int(24 * share)
    minutes, rest = divmod(round(left), 60)
    return (
        f"[{bar:<24}] {state.parts}/{state.num_parts} parts, {state.num_bytes / 1e9:,.2f} of "
        f"{state.total_bytes / 1e9:,.2f} GB, {rate / 1e9:.2f} GB/s, {minutes}:{rest:02} left, {state.part:<10}"
    )
