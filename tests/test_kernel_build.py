"""Building the native kernel: with whatever compiler there is, and cleanly without one."""

import ctypes
import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from expacc.kernels import build, cpu

ROOT = Path(__file__).parents[1]
REQUIREMENT = "ziglang==0.17.0"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Hide every compiler: an empty path, no CC, no ziglang."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    return tmp_path


def _program(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _backend():
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_library_has_every_variant(tmp_path):
    target = tmp_path / "deeper" / build.LIBRARY
    names = build.build(target)
    assert names[0] == "baseline"
    assert ctypes.CDLL(str(target)).expacc_variants() & 1
    assert [path.name for path in target.parent.iterdir()] == [build.LIBRARY]  # nothing temporary is left


def test_compiler_named_by_cc(bare, monkeypatch):
    _program(bare, "mycc", "exit 0")
    monkeypatch.setenv("CC", "mycc -m64")
    assert build.find_compiler() == ["mycc", "-m64"]


def test_compiler_on_the_path(bare):
    path = _program(bare, "clang", "exit 0")
    assert build.find_compiler() == [str(path)]


def test_compiler_named_by_cc_is_missing(bare, monkeypatch):
    path = _program(bare, "gcc", "exit 0")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.find_compiler() == [str(path)]


def test_compiler_from_the_wheel(bare, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: name == "ziglang")
    assert build.find_compiler() == [sys.executable, "-m", "ziglang", "cc"]


def test_no_compiler(bare):
    assert build.find_compiler() is None
    with pytest.raises(build.BuildError, match="there is no C compiler: "):
        build.build(bare / build.LIBRARY)


def test_compiler_fails(tmp_path):
    failing = _program(tmp_path, "cc", "echo 'vec.h:1: error: no such thing' >&2; exit 1")
    with pytest.raises(build.BuildError, match=r"failed: vec\.h:1: error: no such thing"):
        build.build(tmp_path / build.LIBRARY, [str(failing)])
    assert not (tmp_path / build.LIBRARY).exists()


def test_compiler_without_wide_instructions(tmp_path, capfd):
    """A compiler that knows no -march but its own still makes the baseline, and says what is left out."""
    real = build.find_compiler()
    assert real is not None
    body = f'case "$*" in *x86-64-v*) echo "error: unknown -march" >&2; exit 1;; esac; exec {" ".join(real)} "$@"'
    old = _program(tmp_path, "oldcc", body)
    assert build.build(tmp_path / build.LIBRARY, [str(old)]) == ["baseline"]
    assert ctypes.CDLL(str(tmp_path / build.LIBRARY)).expacc_variants() == 1


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_backend_brings_a_compiler(bare, hook):
    assert REQUIREMENT in getattr(_backend(), hook)()


def test_backend_brings_none_where_there_is_one(bare):
    _program(bare, "cc", "exit 0")
    assert REQUIREMENT not in _backend().get_requires_for_build_wheel()


def test_backend_brings_none_where_no_kernel_is_wanted(bare, monkeypatch):
    monkeypatch.setenv("EXPACC_NO_KERNEL", "1")
    assert REQUIREMENT not in _backend().get_requires_for_build_wheel()


def test_build_code_needs_no_torch():
    """setup.py runs it in an environment that has only setuptools."""
    path = ROOT / "src" / "expacc" / "kernels" / "build.py"
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_library_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("EXPACC_CPU_LIBRARY", str(tmp_path / "nowhere.so"))
    assert "python -m expacc.kernels.build" in cpu._load(None).reason


def test_library_broken(monkeypatch, tmp_path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    monkeypatch.setenv("EXPACC_CPU_LIBRARY", os.fspath(path))
    assert cpu._load(None).reason.startswith("it cannot be loaded: ")


def test_kernel_missing(monkeypatch):
    """Without the library the kernel says so; it is never entered by mistake."""
    import torch

    monkeypatch.setattr(cpu, "_current", cpu._Failure("it was not built"))
    assert not cpu.available()
    assert cpu.unavailable_reason() == "it was not built"
    assert cpu.variant() == ""
    one = torch.tensor(1.0, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="not available: it was not built"):
        cpu.loss(torch.randn(2, 3), torch.tensor([0, 1]), one, one)


def test_library_of_other_sources(monkeypatch):
    monkeypatch.setattr(cpu, "_INTERFACE", -1)
    assert cpu._load(None).reason.startswith("it was built from other sources; with a C compiler: python -m")


def test_a_compiler_that_fails_is_passed_over(bare, monkeypatch):
    """It is there, but has no headers, say: the next one is taken, or the wheel's is brought along."""
    _program(bare, "cc", "exit 1")
    assert build.find_compiler() is None
    path = _program(bare, "gcc", "exit 0")
    assert build.find_compiler() == [str(path)]


def test_an_old_library_is_not_shipped(tmp_path):
    """An earlier build's library, which setuptools keeps in build/lib, must not stand in for one that was not built."""
    old = tmp_path / "lib" / "expacc" / "kernels" / build.LIBRARY
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of yesterday")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib")]
    environment = {**os.environ, "EXPACC_NO_KERNEL": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "without the native kernel" in done.stderr
    assert not old.exists()
