"""The bundled tables and the image readers: shapes, traps, and files that are not what they should be."""

import gzip
import lzma
import struct

import numpy as np
import pytest
import torch

from expacc.datasets import IMAGES, TABLES, files, images, load_images, load_table, tables
from expacc.datasets.files import DataError, digest

# rows, features, of them numbers, missing values, classes, rows of the training part
SHAPES = {
    "adult": (48_842, 14, 6, 6465, 2, 32_561),
    "annealing": (898, 38, 16, 22_175, 5, 798),
    "audit-risk": (776, 26, 25, 1, 2, None),
    "balance-scale": (625, 4, 4, 0, 3, None),
    "breast-cancer-wisconsin": (569, 30, 30, 0, 2, None),
    "car": (1728, 6, 0, 0, 4, None),
    "cylinder-bands": (540, 35, 22, 999, 2, None),
    "dry-bean": (13_611, 16, 16, 0, 7, None),
    "mice-protein": (1080, 77, 77, 1396, 8, None),
    "wine": (178, 13, 13, 0, 3, None),
    "haberman": (306, 3, 3, 0, 2, None),
}


def test_the_papers_ten_and_haberman():
    assert set(SHAPES) == set(TABLES)
    assert len(tables.PAPER) == 10


@pytest.mark.parametrize("name", SHAPES)
def test_a_table(name):
    table = load_table(name)
    rows, columns, numbers, missing, classes, train = SHAPES[name]
    assert table.features.shape == (rows, columns)
    assert table.features.select_dtypes("number").shape[1] == numbers
    assert int(table.features.isna().sum().sum()) == missing
    assert table.target.nunique() == classes
    assert table.train_rows == train
    assert list(table.features.index) == list(range(rows))
    assert table.features.columns.is_unique
    assert TABLES[name].target not in table.features
    assert not set(TABLES[name].drop) & set(table.features)


@pytest.mark.parametrize("name", SHAPES)
def test_its_split(name):
    table = load_table(name)
    x, z, y, t = table.split()
    assert len(x) == len(y)
    assert len(z) == len(t)
    assert sorted([*x.index, *z.index]) == list(range(len(table.features)))
    if table.train_rows is None:
        assert len(z) == -(-len(table.features) // 5)
    else:
        assert list(z.index) == list(range(table.train_rows, len(table.features)))


def test_traps():
    adult, audit, bands = (load_table(name) for name in ("adult", "audit-risk", "cylinder-bands"))
    assert set(adult.target) == {"<=50K", ">50K"}  # no full stop in the test part
    assert not adult.features["workclass"].str.startswith(" ").any()
    assert {"Score_B", "Score_B.1"} <= set(audit.features)
    assert len(bands.features) == 540  # nine blank lines
    assert set(load_table("balance-scale").target) == {"L", "B", "R"}  # the label stands first
    assert load_table("car").features["doors"].unique().tolist() == ["2", "3", "4", "5more"]


def test_an_unknown_table_says_which_there_are():
    with pytest.raises(ValueError, match=r"name must be one of 'adult', .*, got 'iris'"):
        load_table("iris")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "car.data is missing from the installed package: install expacc again"),
        (b"not xz", "car.data in the installed package is damaged"),
        (lzma.compress(b"something else"), "car.data in the installed package is not the original file"),
    ],
    ids=["missing", "damaged", "other"],
)
def test_a_bundled_file_that_is_not_the_original(content, message, tmp_path, monkeypatch):
    if content is not None:
        (tmp_path / "car.data.xz").write_bytes(content)
    monkeypatch.setattr(files, "BUNDLED", tmp_path)
    with pytest.raises(DataError, match=message):
        load_table("car")


# ---- images ----


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """Write four small idx files and make them the official ones."""
    parts = {
        "train-images-idx3-ubyte": pixels(5, 28, 28), "train-labels-idx1-ubyte": np.arange(5, dtype=np.uint8),
        "t10k-images-idx3-ubyte": pixels(3, 28, 28), "t10k-labels-idx1-ubyte": np.arange(3, dtype=np.uint8),
    }  # fmt: skip
    for name, array in parts.items():
        (tmp_path / name).write_bytes(idx(array))
    monkeypatch.setattr(images, "MNIST", {name: digest(idx(array)) for name, array in parts.items()})
    return tmp_path, parts


def test_mnist(mnist):
    folder, parts = mnist
    found = load_images("mnist", folder)
    assert found.train_images.shape == (5, 1, 28, 28)
    assert np.array_equal(found.train_images[:, 0], parts["train-images-idx3-ubyte"])
    assert found.test_labels.tolist() == [0, 1, 2]
    assert found.test_labels.dtype == np.int64
    assert found.classes == IMAGES["mnist"][2] == 10
    assert_own(found)


def assert_own(found) -> None:
    """Every array may be written, and torch takes it without a warning."""
    for part in (found.train_images, found.train_labels, found.test_images, found.test_labels):
        assert part.flags.c_contiguous
        assert part.flags.writeable
        assert torch.as_tensor(part).shape == part.shape


def test_mnist_as_the_site_hands_it_out(mnist):
    folder, _ = mnist
    want = load_images("mnist", folder)
    for path in list(folder.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(load_images("mnist", folder).train_images, want.train_images)


def test_a_file_that_is_not_the_official_one_is_refused_kept_aside_and_named(mnist):
    folder, _ = mnist
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte is refused: its SHA-256 is .* kept as t10k.*\.refused"
    ):
        load_images("mnist", folder)
    assert not path.exists()
    assert path.with_name("t10k-labels-idx1-ubyte.refused").exists()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte is not in"):
        load_images("mnist", folder)


GZ = gzip.compress(idx(np.arange(3, dtype=np.uint8)))
SPOILT = GZ[:12] + bytes(255 - byte for byte in GZ[12:])


@pytest.mark.parametrize(
    "download", [GZ[:-9], GZ[:7], SPOILT, b"<html>404 Not Found</html>"], ids=["cut", "head", "spoilt", "html"]
)
def test_a_download_that_cannot_be_unpacked_is_refused_kept_aside_and_named(download, mnist):
    folder, _ = mnist
    name = "t10k-labels-idx1-ubyte"
    (folder / name).unlink()
    (folder / f"{name}.gz").write_bytes(download)
    with pytest.raises(DataError, match=rf"{name}.gz is refused: it cannot be unpacked .* kept as {name}.gz.refused"):
        load_images("mnist", folder)
    assert (folder / f"{name}.gz.refused").read_bytes() == download


@pytest.mark.parametrize(
    ("name", "file"),
    [("mnist", "train-images-idx3-ubyte"), ("mnist", "train-images-idx3-ubyte.gz"), ("svhn", "train_32x32.mat")],
    ids=["idx", "gz", "mat"],
)
def test_a_folder_in_a_files_place_is_named_and_stays(name, file, tmp_path):
    (tmp_path / file).mkdir()
    with pytest.raises(DataError, match=rf"{file} in .* cannot be read \(Is a directory\): the official file"):
        load_images(name, tmp_path)
    assert (tmp_path / file).is_dir()


@pytest.mark.parametrize("below", ["", "cifar-100-binary"])
def test_cifar_100(below, tmp_path, monkeypatch):
    """The fine label is the second byte; the folder of the archive is found."""
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    sums = {}
    for name, n in (("train.bin", 4), ("test.bin", 2)):
        data = np.concatenate([np.stack([np.full(n, 7), np.arange(n) + 90], 1).astype(np.uint8), pixels(n, 3072)], 1)
        (folder / name).write_bytes(data.tobytes())
        sums[name] = digest(data.tobytes())
    monkeypatch.setattr(images, "CIFAR_100", sums)
    found = load_images("cifar-100", tmp_path)
    assert found.train_labels.tolist() == [90, 91, 92, 93]
    assert np.array_equal(found.train_images, pixels(4, 3072).reshape(4, 3, 32, 32))
    assert_own(found)


def test_cifar_10(tmp_path, monkeypatch):
    sums = {}
    for k, name in enumerate(images.CIFAR_10):
        data = np.concatenate([np.full((2, 1), k, np.uint8), pixels(2, 3072)], 1).tobytes()
        (tmp_path / name).write_bytes(data)
        sums[name] = digest(data)
    monkeypatch.setattr(images, "CIFAR_10", sums)
    found = load_images("cifar-10", tmp_path)
    assert found.train_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert found.test_labels.tolist() == [5, 5]
    assert found.train_images.shape == (10, 3, 32, 32)
    assert_own(found)


@pytest.fixture
def svhn(tmp_path, monkeypatch):
    """Write two small .mat files and make their arrays the official ones."""
    parts = {
        "train": (pixels(3, 32, 32, 3), np.array([10, 1, 9], np.uint8)),
        "test": (pixels(2, 32, 32, 3), np.array([10, 1], np.uint8)),
    }
    for part, arrays in parts.items():
        write_mat(tmp_path / f"{part}_32x32.mat", *arrays)
    sums = {part: tuple(digest(array.tobytes()) for array in arrays) for part, arrays in parts.items()}
    monkeypatch.setattr(images, "SVHN", sums)
    return tmp_path, parts


def write_mat(path, shown, digits) -> None:
    from scipy.io import savemat

    held = {
        "X": None if shown is None else shown.transpose(1, 2, 3, 0),
        "y": None if digits is None else digits[:, None],
    }
    savemat(path, {name: array for name, array in held.items() if array is not None})


def test_svhns_zero_is_zero(svhn):
    folder, parts = svhn
    found = load_images("svhn", folder)
    assert found.train_labels.tolist() == [0, 1, 9]
    assert np.array_equal(found.train_images, parts["train"][0].transpose(0, 3, 1, 2))
    assert_own(found)


def test_svhn_is_checked_by_its_arrays_not_by_its_bytes(svhn):
    """Another program may have written the file: other bytes, another type of the labels."""
    folder, parts = svhn
    write_mat(folder / "train_32x32.mat", parts["train"][0], parts["train"][1].astype(float))
    assert load_images("svhn", folder).train_labels.tolist() == [0, 1, 9]


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ({"digits": np.array([3, 3, 3])}, "its labels are not the official ones"),
        ({"digits": np.array([10, 1])}, "its labels are not the official ones"),
        ({"digits": None}, "it holds no array 'y'"),
        ({"shown": pixels(4, 32, 32, 3)[1:]}, "its pixels are not the official ones"),
        ({"shown": None}, "it holds no array 'X'"),
        (b"no .mat file", "it cannot be read"),
    ],
    ids=["labels", "fewer-labels", "no-labels", "pixels", "no-pixels", "no-mat"],
)
def test_svhns_arrays_that_are_not_the_official_ones_are_refused(held, why, svhn):
    folder, parts = svhn
    path = folder / "train_32x32.mat"
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        write_mat(path, **dict(zip(("shown", "digits"), parts["train"], strict=True)) | held)
    with pytest.raises(DataError, match=rf"train_32x32.mat is refused: {why}.* kept as train_32x32.mat.refused"):
        load_images("svhn", folder)
    assert [each.name for each in sorted(folder.iterdir())] == ["test_32x32.mat", "train_32x32.mat.refused"]


def test_a_missing_mat_file(svhn):
    folder, _ = svhn
    (folder / "test_32x32.mat").unlink()
    with pytest.raises(DataError, match=r"test_32x32.mat is not in"):
        load_images("svhn", folder)


def test_memory_that_runs_out_says_nothing_about_the_file(svhn, monkeypatch):
    folder, _ = svhn

    def read(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("scipy.io.loadmat", read)
    with pytest.raises(MemoryError):
        load_images("svhn", folder)
    assert (folder / "train_32x32.mat").exists()


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\x0d\1", idx(np.arange(5, dtype=np.uint8))[:-1]], ids=["empty", "type", "cut"]
)
def test_an_idx_file_that_is_none(data):
    with pytest.raises(DataError, match="idx file"):
        images.parse_idx(data)


def test_an_unknown_image_set_says_which_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"name must be one of 'mnist', .*, got 'imagenet'"):
        load_images("imagenet", tmp_path)
