"""The paper's studies, one module each, with the records and reports that they share.

Nothing here imports torch: the command line reads this package before it knows what it is asked to do.
"""

import errno
import importlib.util
import os
from pathlib import Path


class CommandError(Exception):
    """Report a mistake of the caller that one line explains; the command line prints the line and exits with 2."""


def require_extra(command: str, extra: str, *modules: str) -> None:
    """Refuse to run a command before its optional dependencies are there.

    Args:
        command: what the user typed, e.g. ``"expacc study toy"``.
        extra: the extra of the package that brings the modules.
        modules: import names that the command needs.

    Raises:
        CommandError: with the missing modules, the extra and the line that installs it.

    >>> require_extra("expacc study toy", "studies", "json")
    >>> require_extra("expacc study toy", "studies", "json", "no_such_module")
    Traceback (most recent call last):
    expacc.studies.CommandError: expacc study toy needs no_such_module, part of the extra 'studies': \
in a checkout, pip install '.[studies]' -c constraints.txt
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"{command} needs {', '.join(missing)}, part of the extra '{extra}': "
            f"in a checkout, pip install '.[{extra}]' -c constraints.txt"
        )


def prepare_folder(out: Path) -> None:
    """Make the folder of a study's results, before the work: an error now costs nothing.

    Raises:
        CommandError: it is a file.
        OSError: it cannot be made, or written to.
    """
    if out.exists() and not out.is_dir():
        raise CommandError(f"--out {out} is a file; name a folder")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise PermissionError(errno.EACCES, "no permission to write there", str(out))
