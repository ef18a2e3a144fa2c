r"""Peak extra memory of one forward and backward, the kernel's own buffers included.

What the system says: the high-water mark of the resident set during the call, less what was resident before it, less
what the call mapped from files (code paged in). torch.profiler is the rejected alternative: it sees torch's allocator
only, and a kernel's scratch is malloc's. Logits and target exist before; the gradient (once the logits) is created
inside and counts.

Every cell runs in a process of its own, forked from one that imported torch and did nothing else, after a call on
another, small batch (which loads the code and starts the threads). malloc maps every block from 64 KiB separately, so
what was freed is gone; pages are 4 KiB and small blocks share them: differences below 0.2 MB are noise. Linux only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks import CHECKOUT

_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def measurable() -> bool:
    """Say whether this system can answer."""
    return os.path.exists("/proc/self/clear_refs") and hasattr(os, "fork")


def peak_bytes(cells: Iterable[tuple[str, str, int, int]], repeats: int = 3) -> list[float | None]:
    """Return the peak of every (method, dtype, batch, classes): the least of `repeats` processes."""
    cells = list(cells)
    if not measurable():
        return [None] * len(cells)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", str(repeats)],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, **_SETTINGS},
    )
    if done.returncode:
        raise RuntimeError(f"the memory measurement failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _status() -> dict[str, int]:
    """Return the sizes of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = (line.split() for line in file if line.startswith(("VmHWM", "RssAnon", "RssFile", "RssShmem")))
        return {field[0].rstrip(":"): 1024 * int(field[1]) for field in fields}


def _measure(method: str, dtype: str, batch: int, classes: int) -> int:
    from benchmarks.loss import METHODS, make_batch, step

    call = METHODS[method].make()
    step(call, *make_batch(dtype, 3, 10, 2.0))
    # the path for many classes is other code than that for few: load it too, with a row of its own
    step(call, *make_batch(dtype, 1, min(classes, 2048), 2.0))
    logits, target = make_batch(dtype, batch, classes, 2.0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the high-water mark starts anew
    before = _status()
    step(call, logits, target)
    after = _status()
    files = after["RssFile"] + after["RssShmem"] - before["RssFile"] - before["RssShmem"]
    start = before["RssAnon"] + before["RssFile"] + before["RssShmem"]
    return max(0, after["VmHWM"] - start - files)


def _fork(cell: tuple[str, str, int, int]) -> int | None:
    """Measure in a child, which answers through a pipe and ends without cleaning up after its parent."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(_measure(*cell)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int(answer) if answer else None


def main() -> None:
    """Read the cells from stdin, write the peaks to stdout."""
    import benchmarks.loss  # noqa: F401  torch and the package, once for all children

    results: list[Any] = []
    for cell in json.load(sys.stdin):
        peaks = [peak for peak in (_fork(tuple(cell)) for _ in range(int(sys.argv[1]))) if peak is not None]
        results.append(min(peaks, default=None))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
