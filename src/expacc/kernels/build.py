"""Build the native CPU kernel: one shared library from plain C, with every variant of the instruction set in it.

    python -m expacc.kernels.build      # in place, for who runs from a source tree

setup.py uses the same code. Nothing here imports torch or the rest of the package, and the library needs neither
Python's nor torch's headers, so any C compiler will do: $CC, cc, gcc, clang, or the one in the `ziglang` wheel.
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

NATIVE = Path(__file__).parent / "native"
LIBRARY = {"win32": "_native.dll", "darwin": "_native.dylib"}.get(sys.platform, "_native.so")

# Compiled once per variant; the rest once.
_VARIED = ("driver.c", "direct.c", "gumbel.c", "binned.c")
# -ffp-contract=fast: a*b + c in one instruction. Nothing here is as loose as -ffast-math: NaN and inf are handled.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
          "-fno-trapping-math", "-fno-sanitize=undefined", "-Wno-psabi")  # fmt: skip


class BuildError(RuntimeError):
    """The library could not be built; the message says why."""


class Variant(NamedTuple):
    """One instruction set: its name in the symbols, and its -march in gcc's and in zig's spelling."""

    name: str
    march: tuple[str, str] | None


_X86 = (
    Variant("baseline", ("x86-64", "x86_64")),
    Variant("avx2", ("x86-64-v3", "x86_64_v3")),
    Variant("avx512", ("x86-64-v4", "x86_64_v4")),
)
_OTHER = (Variant("baseline", None),)


def find_compiler() -> list[str] | None:
    """Return the command of a C compiler that works: $CC, one on the path, the ziglang wheel's; None: none."""
    named = shlex.split(os.environ.get("CC", ""))
    if named and shutil.which(named[0]) and _works(named):
        return named
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) and _works([found]):
            return [found]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def _works(command: list[str]) -> bool:
    """Say whether a compiler makes an object of a file with the headers that the kernel includes."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.c"
        source.write_text(
            "#include <math.h>\n#include <stdlib.h>\n#include <string.h>\nint probe(void) { return 0; }\n"
        )
        try:
            _compile(command, source, source.with_suffix(".o"), [])
        except BuildError:
            return False
    return True


def build(target: Path, compiler: list[str] | None = None) -> list[str]:
    """Compile the library to `target` and return the names of its variants.

    A variant whose flags the compiler does not know is left out, except the baseline.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    if target.parent.is_dir() and not os.access(target.parent, os.W_OK):
        raise BuildError(f"the folder {target.parent} cannot be written")
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError("there is no C compiler: $CC, cc, gcc, clang or the ziglang wheel")
    zig = "ziglang" in compiler or Path(compiler[0]).stem == "zig"
    variants = _X86 if platform.machine().lower() in ("x86_64", "amd64") else _OTHER
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        # The baseline first and alone: if it fails, the message is the compiler's and nothing else was tried.
        made = {variants[0].name: _compile_variant(compiler, zig, variants[0], Path(scratch))}
        jobs = {v.name: pool.submit(_compile_variant, compiler, zig, v, Path(scratch)) for v in variants[1:]}
        for name, job in jobs.items():
            try:
                made[name] = job.result()
            except BuildError as error:
                print(f"expacc: variant {name} is left out: {error}", file=sys.stderr)
        have = [f"-DEXPACC_HAVE_{name.upper()}" for name in made if name != "baseline"]
        others = [path for path in sorted(NATIVE.glob("*.c")) if path.name not in _VARIED]
        march = _march(variants[0], zig)
        objects = [_compile(compiler, path, Path(scratch) / f"{path.stem}.o", [*march, *have]) for path in others]
        objects += [path for part in made.values() for path in part]
        target.parent.mkdir(parents=True, exist_ok=True)
        # Linked beside the target, then renamed: a process that has the old library loaded keeps it.
        fresh = target.with_name(f"{target.stem}-{os.getpid()}{target.suffix}")
        try:
            _run([*compiler, "-shared", "-o", str(fresh), *map(str, objects), *([] if os.name == "nt" else ["-lm"])])
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    return list(made)


def _compile_variant(compiler: list[str], zig: bool, variant: Variant, scratch: Path) -> list[Path]:
    flags = [*_march(variant, zig), f"-DEXPACC_VARIANT={variant.name}"]
    return [_compile(compiler, NATIVE / name, scratch / f"{name}-{variant.name}.o", flags) for name in _VARIED]


def _march(variant: Variant, zig: bool) -> list[str]:
    return [f"-march={variant.march[zig]}"] if variant.march else []


def _compile(compiler: list[str], source: Path, target: Path, flags: list[str]) -> Path:
    _run([*compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit {error.returncode}")
        raise BuildError(f"{shlex.join(command)} failed: {first}") from error


def main() -> int:
    """Build in place and say what was made."""
    target = Path(__file__).parent / LIBRARY
    try:
        variants = build(target)
    except BuildError as error:
        print(f"expacc: the native kernel is not built ({error}); the reference will be used.", file=sys.stderr)
        return 1
    print(f"{target}: {', '.join(variants)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
