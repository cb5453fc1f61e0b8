"""Files are read and written past the page cache where that can be, and otherwise through it, with the same bytes."""

import errno
import os
import zlib

import numpy as np
import pytest

from checkpoints_tools import direct_io
from checkpoints_tools.checksums import join_crc32
from checkpoints_tools.direct_io import ALIGNMENT, Buffer, open_file, read_range, room, write_file


def bytes_in(buffer, num_bytes):
    data = buffer.take(num_bytes)
    data[:] = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    return data


@pytest.fixture(params=["past the cache", "no such files", "no such moves"])
def disk(request, monkeypatch):
    """File systems that open files past the cache, that do not, and that do but then refuse."""
    calls = {name: getattr(os, name) for name in ("open", "write", "preadv")}
    direct = set()

    def open_as(path, flags, mode=0o777):
        if flags & os.O_DIRECT and request.param == "no such files":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = calls["open"](path, flags, mode)
        direct.add(fd) if flags & os.O_DIRECT else direct.discard(fd)
        return fd

    def refuse(name, fd, *args):
        if fd in direct and request.param == "no such moves":
            direct.discard(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return calls[name](fd, *args)

    monkeypatch.setattr(os, "open", open_as)
    monkeypatch.setattr(os, "write", lambda *args: refuse("write", *args))
    monkeypatch.setattr(os, "preadv", lambda *args: refuse("preadv", *args))
    return request.param


@pytest.mark.parametrize("num_bytes", [0, 1, ALIGNMENT, 5 * ALIGNMENT + 8])
def test_what_is_written_is_read(disk, tmp_path, num_bytes):
    data, path = bytes_in(Buffer(), num_bytes), tmp_path / "file"
    write_file(path, data)
    assert path.read_bytes() == data.tobytes()
    fd = open_file(path, os.O_RDONLY)
    for begin, end in ((0, num_bytes), (num_bytes // 2, num_bytes), (num_bytes // 3, num_bytes // 2)):
        found = read_range(fd, begin, end, Buffer().take(room(begin, end)))
        np.testing.assert_array_equal(found, data[begin:end])
    begin = max(num_bytes - 3, 0)
    found = read_range(fd, begin, num_bytes + 2 * ALIGNMENT, Buffer().take(room(begin, num_bytes + 2 * ALIGNMENT)))
    np.testing.assert_array_equal(found, data[begin:], err_msg="behind the end there is nothing")
    os.close(fd)


def test_only_whole_pages_go_past_the_cache(tmp_path, monkeypatch):
    opened, open_before = [], direct_io.open_file
    monkeypatch.setattr(direct_io, "open_file", lambda *a, is_direct: opened.append(is_direct) or open_before(*a))
    data = bytes_in(Buffer(), 3 * ALIGNMENT)
    for part in (data, data[ALIGNMENT:], data[1:], data[:-1], data.tobytes()):
        write_file(tmp_path / "file", part)
    assert opened == [True, True, False, False, False]


def test_other_errors_than_a_refusal_are_not_tried_again(tmp_path, monkeypatch):
    def fail(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "file", bytes_in(Buffer(), ALIGNMENT))


def test_buffer_is_the_same_memory_until_it_has_to_grow():
    buffer = Buffer()
    first = buffer.take(3 * ALIGNMENT)
    assert buffer.take(ALIGNMENT).ctypes.data == first.ctypes.data
    assert len(buffer.take(5 * ALIGNMENT)) == 5 * ALIGNMENT
    assert buffer.take(1).ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 7), (7, 0), (1, 1), (1000, 3), (3, 100_003)])
def test_crcs_of_pieces_join_to_that_of_all(first, second):
    data = np.random.default_rng(first + second).integers(0, 256, first + second, np.uint8).tobytes()
    joined = join_crc32(zlib.crc32(data[:first]), zlib.crc32(data[first:]), second)
    assert joined == zlib.crc32(data)
