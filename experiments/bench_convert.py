"""Converts a checkpoint of K2.6's true layer shapes: speed against copying the same bytes, peak memory.

::

    python -m experiments.bench_convert --folder DIR [--num_layers 4] [--runs 3]

Source, copy and output lie on one disk. Each run copies every file of the source and then converts it, both from a cold
cache, both until everything is on the disk; copies are deleted file by file, so that the disk needs room for the source
twice. Memory is the peak of the converter's process, all of its pages counted.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from checkpoints_tools.convert import WORKERS
from checkpoints_tools.source import read_json
from checkpoints_tools.synthesize import synthesize
from checkpoints_tools.verify import verify
from experiments.results_file import provenance, write_lines

MAX_PEAK_BYTES = 6e9
MIN_SHARE = 0.6
_PIECE_BYTES = 1 << 24


def drop_from_cache(folder: Path) -> None:
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_copy(source: Path, folder: Path) -> float:
    """Seconds that it takes to copy all files of a folder to another on the same disk."""
    folder.mkdir()
    seconds = 0.0
    for path in sorted(filter(Path.is_file, source.rglob("*"))):
        start = time.perf_counter()
        with path.open("rb") as read, (folder / path.name).open("wb", buffering=0) as write:
            os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while data := read.read(_PIECE_BYTES):
                write.write(data)
            os.fsync(write.fileno())
        seconds += time.perf_counter() - start
        (folder / path.name).unlink()
    folder.rmdir()
    return seconds


def time_conversion(source: Path, out: Path, workers: int) -> tuple[float, float, int]:
    """Seconds of the command, its start included, those of its cores, and the most bytes it had in memory."""
    command = [sys.executable, "-m", "checkpoints_tools.convert"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, f"--source={source}", f"--out={out}", f"--workers={workers}"])
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        sys.exit("bench_convert: the converter failed")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def measure(folder: Path, source: Path, runs: int, workers: int) -> dict[str, Any]:
    """Medians over runs; ``ceiling_seconds`` is what copying takes."""
    num_bytes = sum(path.stat().st_size for path in source.iterdir())
    copies, conversions, cores, peaks, loads = [], [], [], [], []
    for run in range(runs):
        loads.append(round(os.getloadavg()[0], 2))
        drop_from_cache(source)
        copies.append(time_copy(source, folder / "copy"))
        drop_from_cache(source)
        shutil.rmtree(folder / "out", ignore_errors=True)
        seconds, busy, peak = time_conversion(source, folder / "out", workers)
        conversions.append(seconds)
        cores.append(busy)
        peaks.append(peak)
        print(
            f"run {run}: copied at {num_bytes / copies[-1] / 1e9:.3f} GB/s, converted at {num_bytes / seconds / 1e9:.3f} "
            f"GB/s, {busy:.0f} s of cores, peak {peak / 1e9:.2f} GB, load before {loads[-1]}",
            flush=True,
        )
    seconds, copy = statistics.median(conversions), statistics.median(copies)
    return {
        "seconds": seconds,
        "ceiling_seconds": copy,
        "ceiling": f"copying the same {num_bytes / 1e9:.1f} GB on the same disk",
        "fraction_of_ceiling": round(copy / seconds, 3),
        "fractions": [round(a / b, 3) for a, b in zip(copies, conversions, strict=True)],
        "gb_per_second": round(num_bytes / seconds / 1e9, 3),
        "copy_gb_per_second": round(num_bytes / copy / 1e9, 3),
        "core_seconds": statistics.median(cores),
        "peak_bytes": max(peaks),
        "load_before": loads,
        "runs": runs,
    }


def main(_: list[str]) -> None:
    folder = Path(_FOLDER.value)
    source = folder / "source"
    if not source.exists():
        synthesize(read_json(Path(_CONFIG.value)), source, num_layers=_LAYERS.value)
    result = measure(folder, source, _RUNS.value, _WORKERS.value)
    report = verify(source, folder / "out")
    if report.errors:
        sys.exit("bench_convert: " + "\n".join(report.errors))
    case = {"config": Path(_CONFIG.value).stem, "num_layers": _LAYERS.value, "workers": _WORKERS.value}
    case |= {"cores": os.cpu_count(), "values_verified": report.num_values}
    line = {"benchmark": "convert", "case": case, **provenance(), **result}
    print(json.dumps(line))
    print(f"wrote {write_lines('convert', [line])}")
    for is_met, what in (
        (result["peak_bytes"] < MAX_PEAK_BYTES, f"peak below {MAX_PEAK_BYTES / 1e9:.0f} GB"),
        (result["fraction_of_ceiling"] >= MIN_SHARE, f"at least {MIN_SHARE:.0%} of the speed of copying"),
    ):
        print(f"{'met' if is_met else 'NOT MET'}: {what}")


if __name__ == "__main__":
    _FOLDER = flags.DEFINE_string("folder", None, "Where source and output go; room for both is needed.", required=True)
    _CONFIG = flags.DEFINE_string("config", "tests/configs/kimi_k26.json", "Whose shapes the layers have.")
    _LAYERS = flags.DEFINE_integer("num_layers", 4, "Of which the first is dense.")
    _RUNS = flags.DEFINE_integer("runs", 3, "Of which the medians are taken.")
    _WORKERS = flags.DEFINE_integer("workers", WORKERS, "Threads of the converter.")
    app.run(main)
