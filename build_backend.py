"""setuptools' build backend, which brings a C compiler along where the machine has none.

`ziglang` is a wheel that contains clang. pip installs it into the isolated environment of the build and removes it
afterwards. Set EXPACC_NO_KERNEL=1 to build without the kernel and without a compiler.
"""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable

COMPILER = "ziglang==0.17.0"  # the version that was run


def _compiler() -> list[str]:
    """Return the requirement for a compiler: none where there is one, or where zig has no wheel."""
    if os.environ.get("EXPACC_NO_KERNEL") or platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return []
    path = Path(__file__).parent / "src" / "expacc" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("_expacc_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return [] if module.find_compiler() else [COMPILER]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what a wheel's build needs besides build-system.requires."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable installation needs besides build-system.requires."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]
