"""Files that are what they say they are: read, checked by SHA-256, refused and kept aside where they are not."""

import hashlib
import lzma
from pathlib import Path
from typing import NoReturn

BUNDLED = Path(__file__).with_name("uci")


class DataError(RuntimeError):
    """A file of data is missing, or is not the file it should be."""


def digest(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_bundled(name: str, sha256: str) -> bytes:
    """Return the original bytes of a file that comes with the package.

    Raises:
        DataError: it is missing or damaged.
    """
    path = BUNDLED / f"{name}.xz"
    try:
        data = lzma.decompress(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{name} is missing from the installed package: install expacc again.") from None
    except lzma.LZMAError as error:
        raise DataError(f"{name} in the installed package is damaged ({error}): install expacc again.") from error
    if digest(data) != sha256:
        raise DataError(f"{name} in the installed package is not the original file: install expacc again.")
    return data


def read_file(path: Path) -> bytes:
    """Return the bytes of a user's file.

    Raises:
        DataError: there is none, or it cannot be read (a folder, no permission). It stays where it is.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path.name} is not in {path.parent}: the official file of that name is needed there."
        ) from None
    except OSError as error:
        raise DataError(
            f"{path.name} in {path.parent} cannot be read ({error.strerror}): the official file is needed there."
        ) from error


def read_checked(path: Path, sha256: str) -> bytes:
    """Return the bytes of a user's file, or set it aside as ``NAME.refused`` where its SHA-256 is another.

    Raises:
        DataError: the file is missing, cannot be read, or is not the official one.
    """
    data = read_file(path)
    found = digest(data)
    if found != sha256:
        refuse(path, f"its SHA-256 is {found}, that of the official file {sha256}")
    return data


def refuse(path: Path, why: str) -> NoReturn:
    """Set a file aside, so that nothing takes it for the official one again, and raise.

    Raises:
        DataError: always; it names the file and where it is now.
    """
    aside = path.with_name(f"{path.name}.refused")
    try:
        path.rename(aside)
        where = f"It is kept as {aside.name}"
    except OSError:
        where = "It was left where it is, the folder cannot be written"
    raise DataError(f"{path.name} is refused: {why}. {where}; put the official file in its place.")
