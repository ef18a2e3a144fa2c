"""Compile the native CPU kernel beside the package, where there is a C compiler. All else is in pyproject.toml."""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_KERNELS = Path("expacc", "kernels")
_ROOT = Path(__file__).parent


def _load_build():
    """Return expacc.kernels.build without importing the package, which needs torch."""
    spec = importlib.util.spec_from_file_location("_expacc_build", _ROOT / "src" / _KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildKernel(build_ext):
    """A plain shared library, loaded with ctypes, in the place of an extension module; without it the package works."""

    _built: Path | None = None

    def run(self) -> None:
        """Build the library into the wheel's tree, or into the source tree for an editable installation."""
        build = _load_build()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        target = (_ROOT / "src" if in_place else Path(self.build_lib)) / _KERNELS / build.LIBRARY
        target.unlink(missing_ok=True)  # of an earlier build: a failing one must not ship it
        if os.environ.get("EXPACC_NO_KERNEL"):
            print("expacc: EXPACC_NO_KERNEL is set: installing without the native kernel.", file=sys.stderr)
            return
        try:
            variants = build.build(target)
        except build.BuildError as error:
            print(f"expacc: installing without the native kernel ({error}); the reference is used.", file=sys.stderr)
            return
        self._built = target
        print(f"expacc: native kernel with {', '.join(variants)}: {target}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        """Return what was built: one file, or none."""
        return [str(self._built)] if self._built else []

    def get_output_mapping(self) -> dict[str, str]:
        """Return nothing: an editable build writes into the source tree itself."""
        return {}

    def get_source_files(self) -> list[str]:
        """Return nothing: MANIFEST.in names the sources."""
        return []


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: compiled, but without Python's headers."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of any Python 3 on this platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("expacc.kernels._native", sources=[])],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)
