"""Readers of the image sets' official layouts: MNIST's idx, CIFAR's binary batches, SVHN's .mat. NumPy arrays out."""

import gzip
import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expacc.datasets.files import DataError, digest, read_checked, read_file, refuse

Part = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ImageSet:
    """One image set.

    Args:
        name: as in `IMAGES`.
        train_images, test_images: uint8, (N, channels, height, width), contiguous and writable.
        train_labels, test_labels: int64, (N,), from 0.
        classes: number of classes.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: int


MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
CIFAR_10 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR_100 = {
    "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
    "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
}
# Of the pixels, (N, 32, 32, 3) in row-major order, and of the labels as they stand there, 1 to 10, both as bytes: the
# bytes of a .mat file depend on the program that wrote it.
SVHN = {
    "train": (
        "a24062f843a6a12618ee9b23e91a9bfe13726bba939c0b549914638ba9ab7010",
        "9e3cce128a193644210f542b719cff670a667c31b1c0bda27ecb1820ed5a7f7a",
    ),
    "test": (
        "d9450824511009532ca0f47ac5621a3ceb71bfc7169dca110eeeed7e52f772bd",
        "55bdef57978d07ed482f3e01e795ac42bff2cf33b69f8121e65398dca0fb6aec",
    ),
}


def parse_idx(data: bytes) -> np.ndarray:
    """Return the array of an idx file of bytes: two zeros, the type 8, the number of dimensions, their sizes.

    Raises:
        DataError: it is not one.
    """
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError("this is not an idx file of unsigned bytes")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if values.size != np.prod(shape):
        raise DataError(f"this idx file promises {' × '.join(map(str, shape))} bytes and holds {values.size}")
    return values.reshape(shape)


def parse_cifar(data: bytes, label_bytes: int) -> Part:
    """Return images and labels of a CIFAR batch: per image its labels (the last one counts), then 3 × 32 × 32 bytes."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


def _mnist(folder: Path) -> tuple[Part, Part]:
    read = {}
    for name, sha256 in MNIST.items():
        packed = folder / f"{name}.gz"
        if packed.exists() and not (folder / name).exists():  # as the site hands it out
            data = _unpack(packed)
            if digest(data) != sha256:
                refuse(packed, "what it unpacks to is not the official file")
        else:
            data = read_checked(folder / name, sha256)
        read[name] = parse_idx(data)
    images = {part: read[f"{part}-images-idx3-ubyte"][:, None] for part in ("train", "t10k")}
    labels = {part: read[f"{part}-labels-idx1-ubyte"].astype(np.int64) for part in ("train", "t10k")}
    return (images["train"], labels["train"]), (images["t10k"], labels["t10k"])


def _unpack(packed: Path) -> bytes:
    """Return what a .gz file holds; a download that was cut off, or a site's error page, is refused."""
    data = read_file(packed)
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        refuse(packed, f"it cannot be unpacked ({error})")


def _cifar_10(folder: Path) -> tuple[Part, Part]:
    parts = [parse_cifar(read_checked(folder / name, sha256), 1) for name, sha256 in CIFAR_10.items()]
    images, labels = (np.concatenate([part[k] for part in parts[:-1]]) for k in (0, 1))
    return (images, labels), parts[-1]


def _cifar_100(folder: Path) -> tuple[Part, Part]:
    train, test = (parse_cifar(read_checked(folder / name, sha256), 2) for name, sha256 in CIFAR_100.items())
    return train, test


def _svhn(folder: Path) -> tuple[Part, Part]:
    train, test = (_svhn_part(folder / f"{part}_32x32.mat", *sums) for part, sums in SVHN.items())
    return train, test


def _svhn_part(path: Path, pixels_sha256: str, labels_sha256: str) -> Part:
    pixels, digits = _read_mat(path)
    if digest(pixels.tobytes()) != pixels_sha256:
        refuse(path, "its pixels are not the official ones")
    if digest(digits.tobytes()) != labels_sha256:
        refuse(path, "its labels are not the official ones")
    return pixels.transpose(0, 3, 1, 2), digits.astype(np.int64) % 10  # the digit 0 is label 10


def _read_mat(path: Path) -> Part:
    """Return the pixels of a .mat file, (N, 32, 32, 3), and its labels, as bytes."""
    from scipy.io import loadmat  # the only reader that needs SciPy

    data = read_file(path)
    try:
        held = loadmat(io.BytesIO(data), variable_names=["X", "y"])
        # What is checked is what is handed on: as bytes, in this order.
        return np.ascontiguousarray(held["X"].transpose(3, 0, 1, 2)), held["y"].ravel().astype(np.uint8)
    except MemoryError:  # says nothing about the file
        raise
    except KeyError as error:
        refuse(path, f"it holds no array {error}")
    except Exception as error:  # loadmat has an error of its own for every kind of damage
        refuse(path, f"it cannot be read ({error})")


# name → reader, folder of the official archive below the one given, number of classes
IMAGES: dict[str, tuple[Callable[[Path], tuple[Part, Part]], str, int]] = {
    "mnist": (_mnist, ".", 10),
    "svhn": (_svhn, ".", 10),
    "cifar-10": (_cifar_10, "cifar-10-batches-bin", 10),
    "cifar-100": (_cifar_100, "cifar-100-binary", 100),
}


def load_images(name: str, folder: str | Path) -> ImageSet:
    """Read an image set from a folder that holds its official files, unpacked.

    Give every set a folder of its own. Fashion-MNIST's and others' files have MNIST's names: in a folder of theirs, the
    first file that is not MNIST's is renamed to NAME.refused, like a damaged one, and has to be renamed back.

    Args:
        name: "mnist", "svhn", "cifar-10" or "cifar-100".
        folder: where the files are, or the folder of the archive (cifar-10-batches-bin, cifar-100-binary).

    Raises:
        DataError: a file is missing or cannot be read, or it is not the official one and is now called NAME.refused.
        ValueError: there is no such set.
    """
    if name not in IMAGES:
        raise ValueError(f"name must be one of {', '.join(map(repr, IMAGES))}, got {name!r}.")
    reader, below, classes = IMAGES[name]
    home = Path(folder)
    train, test = reader(home / below if (home / below).is_dir() else home)
    return ImageSet(name, *_own(train), *_own(test), classes)


def _own(part: Part) -> Part:
    """Return arrays in one piece that may be written: a reader's are views of a file's bytes, labels between them."""
    images, labels = (np.require(array, requirements=["C", "W"]) for array in part)
    return images, labels
