"""Records: the JSON file that every study and benchmark leaves behind, and from which tables and figures are made.

    {"claim", "command", "commit", "versions", "hardware", "rows": [{"method", "metric", "value", ...}, ...]}

A row is one measured cell with its keys spelled out. A record names no host and no path, so it can be committed.
"""

import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ROW_KEYS = ("method", "metric", "value")  # what no cell can do without; every other key is the study's own
CHECKOUT = Path(__file__).resolve().parents[3]
# Recorded where they were imported: anything that can have moved a number. The name to import, then that of the wheel.
DISTRIBUTIONS = {
    name: {"sklearn": "scikit-learn", "flint": "python-flint"}.get(name, name)
    for name in (
        "torch", "numpy", "scipy", "sklearn", "numba", "triton", "pandas", "optuna", "torchvision", "kornia",
        "matplotlib", "mpmath", "flint",
    )
}  # fmt: skip


class RecordError(ValueError):
    """Report a record, or a row, that is not what this module writes."""


@dataclass
class Record:
    """Hold one study's claim, where it was measured, and its rows.

    Args:
        claim: one sentence that the rows support or refute.
        command: the command that makes the record again.
        commit: the commit that ran, ``-dirty`` where the code differed from it; the version outside a checkout.
        versions: version by package name.
        hardware: processor, cores, memory and accelerator.
        rows: one mapping per measured cell.

    >>> record = Record("two is even", "count 2", "0.1.0", {"python": "3.11"}, {"cores": 1})
    >>> record.add(method="division", metric="remainder", value=0)
    >>> record.value(metric="remainder")
    0
    """

    claim: str
    command: str
    commit: str
    versions: dict[str, str]
    hardware: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **cell: Any) -> None:
        """Append one cell, and refuse it here, where the study can still say which cell it was.

        Raises:
            RecordError: for a missing key, or a value that JSON cannot hold (NaN, inf, a tensor).
        """
        _check_row(cell, f"rows[{len(self.rows)}]")
        self.rows.append(cell)

    def value(self, **keys: Any) -> Any:
        """Return the value of the one row that has these keys.

        Raises:
            KeyError: where no row, or more than one, has them.
        """
        found = [row for row in self.rows if all(key in row and row[key] == want for key, want in keys.items())]
        if len(found) != 1:
            raise KeyError(f"{len(found)} rows have {keys}; name keys that only one row has")
        return found[0]["value"]

    def text(self) -> str:
        """Return the record as JSON with a line per row, so that a changed number is one changed line.

        Raises:
            RecordError: where a field or a row is not what a record holds.
        """
        held = {name: getattr(self, name) for name in FIELDS}
        _check_fields(held, "the record")
        rows = ",\n".join("    " + _dump(row) for row in held.pop("rows"))
        head = "".join(f"  {_dump(name)}: {_dump(value)},\n" for name, value in held.items())
        return f'{{\n{head}  "rows": [\n{rows}\n  ]\n}}\n'

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the text; the file at ``path`` is whole at every moment (see ``write_atomically``)."""
        write_atomically(path, self.text().encode())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Record":
        """Read a record and check it.

        Raises:
            RecordError: with the file's name and what is wrong with it.
            FileNotFoundError: where there is no file.
        """
        name = Path(path).name
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # JSON and UTF-8 errors alike
            raise RecordError(f"{name} is not a record: {error}; was it cut short or edited?") from error
        _check_fields(held, name)
        return cls(**held)


FIELDS = tuple(each.name for each in fields(Record))


def begin_record(claim: str, command: str | Sequence[str]) -> Record:
    """Begin a record of what runs here, with no rows yet.

    Args:
        claim: one sentence.
        command: as text, or as the words the user typed; of a word that is an absolute path only the last part is
            kept, because a record must not tell where somebody keeps their files.
    """
    if not isinstance(command, str):
        command = shlex.join(Path(word).name if os.path.isabs(word) else word for word in command)
    return Record(claim, command, find_commit(), find_versions(), find_hardware())


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is either the old one or the whole new one, whatever happens meanwhile.

    Temporary file in the same folder, synced, renamed over the target, then the folder synced: without the last
    step a power cut may forget the rename. A killed run leaves at most a hidden ``.tmp`` file.

    Raises:
        OSError: where the disk refuses; the old file stays.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # Not tempfile: its 0600 would survive the rename and hide the record from everybody else.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder, and renames durably without it
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def find_version() -> str:
    """Return the version of the package: installed metadata, else the checkout's pyproject.toml."""
    try:
        return importlib.metadata.version("expacc")
    except importlib.metadata.PackageNotFoundError:
        project = CHECKOUT / "pyproject.toml"
        if not project.is_file():
            return "unknown"
        return tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("version", "unknown")


def find_commit() -> str:
    """Return the commit the package runs from, with ``-dirty`` where the code differs; else its version.

    Only what can move a number makes it dirty: the record being written must not.
    """
    # A virtual environment may lie inside somebody else's repository: ask whether this very file is tracked.
    if _output("git", "ls-files", "--error-unmatch", __file__) is None or not (
        head := _output("git", "rev-parse", "HEAD")
    ):
        return find_version()
    return head + (
        "-dirty" if _output("git", "status", "--porcelain", "--", "src", "benchmarks", "pyproject.toml") else ""
    )


def find_versions() -> dict[str, str]:
    """Return the versions of python, expacc and every imported package that can have moved a number."""
    versions = {"python": platform.python_version(), "expacc": find_version()}
    for module, distribution in DISTRIBUTIONS.items():
        if module in sys.modules:
            try:
                versions[distribution] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                versions[distribution] = str(getattr(sys.modules[module], "__version__", "unknown"))
    return versions


def find_hardware() -> dict[str, Any]:
    """Return processor, cores (those this process may use), memory in GiB, threads and accelerator, not the host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware: dict[str, Any] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": cores,
        "memory_gib": _memory_gib(),
        "threads": None,
        "accelerator": None,
    }
    torch = sys.modules.get("torch")  # not imported here: a record of something without torch need not wait for it
    if torch is not None:
        hardware["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            hardware["accelerator"] = torch.cuda.get_device_name()
        elif torch.backends.mps.is_available():
            hardware["accelerator"] = "Apple MPS"
    return hardware


def _processor() -> str:
    name = None
    if sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
    elif sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return name or platform.processor() or platform.machine() or "unknown"


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _check_fields(held: Any, name: str) -> None:
    if not isinstance(held, dict) or set(held) != set(FIELDS):
        found = ", ".join(held) if isinstance(held, dict) else type(held).__name__
        raise RecordError(f"{name} holds {found}; a record has exactly {', '.join(FIELDS)}")
    for key, kind in zip(FIELDS, (str, str, str, dict, dict, list), strict=True):
        if not isinstance(held[key], kind):
            raise RecordError(f"{name}: {key} must be {kind.__name__}, not {type(held[key]).__name__}")
    for index, row in enumerate(held["rows"]):
        _check_row(row, f"{name}: rows[{index}]")


def _check_row(row: Any, name: str) -> None:
    if missing := [key for key in ROW_KEYS if not isinstance(row, dict) or key not in row]:
        raise RecordError(f"{name} lacks {', '.join(missing)}: every cell says its {', '.join(ROW_KEYS)}")
    try:
        _dump(row)
    except (TypeError, ValueError) as error:  # a tensor; NaN
        raise RecordError(
            f"{name} cannot be written as JSON: {error}; put numbers, text, lists, or None with the reason beside it"
        ) from error
