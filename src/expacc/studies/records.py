"""Records: the JSON file that every study and benchmark leaves behind, and from which tables and figures are made.

    {"claim", "command", "commit", "versions", "hardware", "rows": [{"method", "metric", "value", ...}, ...]}

A row is one measured cell with its keys spelled out. A record names no host and no path, so it can be committed.
"""

import importlib.metadata
import json
import math
import os
import platform
import secrets
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

ROW_KEYS = ("method", "metric", "value")  # what no cell can do without; every other key is the study's own
PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parents[1]
# Recorded where they were imported: anything that can have moved a number.
DISTRIBUTIONS = {
    "torch": "torch",
    "numpy": "numpy",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "numba": "numba",
    "triton": "triton",
    "pandas": "pandas",
    "optuna": "optuna",
    "torchvision": "torchvision",
    "kornia": "kornia",
    "matplotlib": "matplotlib",
    "mpmath": "mpmath",
    "flint": "python-flint",
}


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
    >>> record.rows
    [{'method': 'division', 'metric': 'remainder', 'value': 0}]
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

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON, a line per row, so that the file at ``path`` is whole at every moment.

        Raises:
            RecordError: where a field or a row is not what a record holds; the old file stays.
            OSError: where the disk refuses; the old file stays.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        _check_fields(fields, "the record")
        rows = ",\n".join("    " + _dump(row) for row in fields.pop("rows"))
        head = "".join(f"  {_dump(name)}: {_dump(value)},\n" for name, value in fields.items())
        write_atomically(path, f'{{\n{head}  "rows": [\n{rows}\n  ]\n}}\n'.encode())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Record":
        """Read a record and check it.

        Raises:
            RecordError: with the file's name and what is wrong with it.
            FileNotFoundError: where there is no file.
        """
        name = Path(path).name
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except ValueError as error:  # JSON and UTF-8 errors alike
            raise RecordError(f"{name} is not a record: {error}; was it cut short or edited?") from error
        _check_fields(fields, name)
        return cls(**fields)


def begin_record(claim: str, command: str | Sequence[str]) -> Record:
    """Begin a record of what runs here, with no rows yet.

    Args:
        claim: one sentence.
        command: as text, or as the arguments the user typed, without the program's own path.
    """
    if not isinstance(command, str):
        command = shlex.join(without_paths(command))
    return Record(claim, command, find_commit(), find_versions(), find_hardware())


def without_paths(arguments: Sequence[str]) -> list[str]:
    """Cut absolute paths down to their last part: a record must not tell where somebody keeps their files.

    >>> without_paths(["study", "toy", "--out", "/home/ada/toy", "--seed=3"])
    ['study', 'toy', '--out', 'toy', '--seed=3']
    """
    return [_last_part(argument) for argument in arguments]


def _last_part(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(value).is_absolute():
            value = kind(value).name or "."
    return option + equals + value


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is either the old one or the whole new one, whatever happens meanwhile.

    Temporary file in the same folder, synced, renamed over the target, then the folder synced: without the last
    step a power cut may forget the rename. A killed run leaves at most a hidden ``.tmp`` file.
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
    if _git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return find_version()
    head = _git("rev-parse", "HEAD")
    if head is None:
        return find_version()
    return head + ("-dirty" if _git("status", "--porcelain", "--", "src", "benchmarks", "pyproject.toml") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
    """Return processor, cores (those this process may use), memory in GiB, threads and accelerator; no names of hosts."""
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
    try:
        if sys.platform == "darwin":
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip() or "unknown"
        if sys.platform == "linux":
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    return platform.processor() or platform.machine() or "unknown"


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse_constant(constant: str) -> Any:
    raise RecordError(f"it holds {constant}, which JSON does not have")


def _check_fields(fields: Any, name: str) -> None:
    kinds = {"claim": str, "command": str, "commit": str, "versions": dict, "hardware": dict, "rows": list}
    if not isinstance(fields, dict):
        raise RecordError(f"{name} must be a JSON object, not {type(fields).__name__}")
    if wrong := sorted(set(kinds) ^ set(fields)):
        missing = [key for key in wrong if key in kinds]
        unknown = [key for key in wrong if key not in kinds]
        says = [f"{what} {', '.join(keys)}" for what, keys in (("lacks", missing), ("has unknown", unknown)) if keys]
        raise RecordError(f"{name} {' and '.join(says)}; a record has exactly {', '.join(kinds)}")
    for key, kind in kinds.items():
        if not isinstance(fields[key], kind):
            raise RecordError(f"{name}: {key} must be {kind.__name__}, not {type(fields[key]).__name__}")
    _check_value(fields["versions"], f"{name}: versions")
    _check_value(fields["hardware"], f"{name}: hardware")
    for index, row in enumerate(fields["rows"]):
        _check_row(row, f"{name}: rows[{index}]")


def _check_row(row: Any, name: str) -> None:
    if not isinstance(row, dict):
        raise RecordError(f"{name} must be an object, not {type(row).__name__}")
    if missing := [key for key in ROW_KEYS if key not in row]:
        raise RecordError(f"{name} lacks {', '.join(missing)}: every cell says its {', '.join(ROW_KEYS)}")
    _check_value(row, name)


def _check_value(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{name} is {value}, which JSON cannot hold; put None, and the reason in a key of its own")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordError(f"{name} has the key {key!r}; keys must be text")
            _check_value(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_value(item, f"{name}[{index}]")
    elif not isinstance(value, str | int | float | bool | None):
        raise RecordError(f"{name} is a {type(value).__name__}; put a number, text, None or a list of them")
