"""Reads and writes files past the page cache, whose copy of every byte costs more than all that the converter computes.

The disk takes and gives whole pages, into memory that begins at a page. What is none, and file systems that know no such
access, go through the cache, by the same calls.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from checkpoints_tools.files import naming

ALIGNMENT = 4096
"""Bytes of whose multiple are places in a file, places in memory and sizes that can go past the cache."""


class Buffer:
    """Memory that begins at a page and is used again and again: new pages would have to be cleared first."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """So many bytes of it [num_bytes]. What was taken before is written over."""
        if num_bytes > len(self._bytes):
            self._bytes = np.empty(0, np.uint8)  # before there is more
            memory = mmap.mmap(-1, pages(num_bytes))
            with contextlib.suppress(OSError):  # a kernel that has none
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = np.frombuffer(memory, np.uint8)
        return self._bytes[:num_bytes]


def pages(num_bytes: int) -> int:
    """Bytes of the pages that so many bytes take."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def room(begin: int, end: int) -> int:
    """Bytes of memory that `read_range` needs."""
    return pages(end) - (begin - begin % ALIGNMENT)


def open_file(path: Path, flags: int, *, is_direct: bool = True) -> int:
    """Opens a file, past the cache where the file system lets it."""
    if is_direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o644)


def read_range(fd: int, begin: int, end: int, memory: np.ndarray) -> np.ndarray:
    """Bytes of a file, fewer where it ends: a view of ``memory``, which begins at a page and has `room`."""
    start, done = begin - begin % ALIGNMENT, 0
    memory = memory[: room(begin, end)]
    while start + done < end:
        left = memory[done:]
        count = _past_the_cache_or_not(fd, lambda left=left, place=start + done: os.preadv(fd, [left], place))
        if count == 0:
            break
        done += count
    return memory[begin - start : min(done, end - start)]


def write_file(path: Path, data: bytes | np.ndarray) -> None:
    """Writes a file and lets the disk begin; until a sync it need not be there."""
    view = memoryview(data)
    is_direct = isinstance(data, np.ndarray) and (data.ctypes.data | data.nbytes) % ALIGNMENT == 0
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, is_direct=is_direct)
    try:
        with naming(path):
            while len(view):
                view = view[_past_the_cache_or_not(fd, lambda left=view: os.write(fd, left)) :]
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _past_the_cache_or_not(fd: int, move: Callable[[], int]) -> int:
    try:
        return move()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return move()
