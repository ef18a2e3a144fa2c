"""The paper's ten tables, and haberman, as they come from the UCI Machine Learning Repository (CC BY 4.0).

One row of `TABLES` each: the files by SHA-256, how to read them, the target, what to leave out. Rows stay in their
original order, which matters: the paper's splits are drawn by row number. Values stay as they are; filling, encoding
and scaling are the model's business, by statistics of its training part.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from expacc.datasets.files import read_bundled

if TYPE_CHECKING:
    import pandas as pd

LICENCE = "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/"


@dataclass(frozen=True)
class Source:
    """What a table is made of.

    Args:
        files: SHA-256 by name; where there are two, the first is the training part.
        target: column to predict.
        url: page of the set, where its authors are named.
        columns: names, where the file has no header.
        drop: columns that are no features: numbers of rows, or the label in other words.
        options: of the reader, beside these.
        clean: what the file needs beyond that.
        excel: the file is a workbook.
    """

    files: Mapping[str, str]
    target: str
    url: str
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    clean: "Callable[[pd.DataFrame], pd.DataFrame] | None" = None
    excel: bool = False


@dataclass(frozen=True)
class Table:
    """One table.

    Args:
        name: as in `TABLES`.
        features: numbers as numbers, everything else as text; NaN where missing.
        target: text.
        train_rows: number of rows of the training part, where the set has a test part of its own; else None.
    """

    name: str
    features: "pd.DataFrame"
    target: "pd.Series"
    train_rows: int | None

    def split(self, random_state: int = 0) -> tuple[Any, Any, Any, Any]:
        """Return features and target of the training and the test part: X_train, X_test, y_train, y_test.

        The set's own parts; where it has none, 20 % of the rows drawn for the test, as the paper does.
        """
        if self.train_rows is not None:
            n = self.train_rows
            return self.features[:n], self.features[n:], self.target[:n], self.target[n:]
        from sklearn.model_selection import train_test_split  # needed here only

        x, z, y, t = train_test_split(self.features, self.target, test_size=0.2, random_state=random_state)
        return x, z, y, t


def _strip_labels(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Take the full stop off the labels of adult.test."""
    return frame.assign(income=frame["income"].str.rstrip("."))


_CELL = tuple(
    f"{what}_{part}"
    for part in ("mean", "se", "worst")
    for what in ("radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave_points",
                 "symmetry", "fractal_dimension")
)  # fmt: skip
_UCI = "https://archive.ics.uci.edu/dataset"

TABLES: dict[str, Source] = {
    "adult": Source(
        {
            "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        },
        "income", f"{_UCI}/2/adult",
        ("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
         "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
        options={"skipinitialspace": True, "comment": "|"}, clean=_strip_labels,
    ),
    "annealing": Source(
        {
            "anneal.data": "d72d954215fe205ba51365a5850ec7db9a0def2b1f5514250db6248852bd0789",
            "anneal.test": "ccc4601cb1dcf0da78444e206aeed69896ada93616776775bc51fb59138afa37",
        },
        "class", f"{_UCI}/3/annealing",
        ("family", "product-type", "steel", "carbon", "hardness", "temper-rolling", "condition", "formability",
         "strength", "non-ageing", "surface-finish", "surface-quality", "enamelability", "bc", "bf", "bt", "bw/me",
         "bl", "m", "chrom", "phos", "cbond", "marvi", "exptl", "ferro", "corr", "blue/bright/varn/clean", "lustre",
         "jurofm", "s", "p", "shape", "thick", "width", "len", "oil", "bore", "packing", "class"),
    ),
    "audit-risk": Source(
        {"audit_risk.csv": "b6ddd36fdb22db325c0a381b0acbe0dd062ea2484e725f4c73a313342acdf949"},
        "Risk", f"{_UCI}/475/audit+data",
    ),
    "balance-scale": Source(
        {"balance-scale.data": "5611187ef7345d807aa8ae22615945ade52a190537c0b1434bd44c3e877c5bb4"},
        "class", f"{_UCI}/12/balance+scale",
        ("class", "left-weight", "left-distance", "right-weight", "right-distance"),
    ),
    "breast-cancer-wisconsin": Source(
        {"wdbc.data": "d606af411f3e5be8a317a5a8b652b425aaf0ff38ca683d5327ffff94c3695f4a"},
        "diagnosis", f"{_UCI}/17/breast+cancer+wisconsin+diagnostic",
        ("id", "diagnosis", *_CELL), drop=("id",),
    ),
    "car": Source(
        {"car.data": "b703a9ac69f11e64ce8c223c0a40de4d2e9d769f7fb20be5f8f2e8a619893d83"},
        "class", f"{_UCI}/19/car+evaluation",
        ("buying", "maint", "doors", "persons", "lug_boot", "safety", "class"),
        options={"dtype": str},  # "2" doors and "5more": categories all
    ),
    "cylinder-bands": Source(
        {"bands.data": "63d7b897e6710196cb492d96a84343c63ac13040d514b8243541a1fa3a8768a7"},
        "band type", f"{_UCI}/32/cylinder+bands",
        ("timestamp", "cylinder number", "customer", "job number", "grain screened", "ink color", "proof on ctd ink",
         "blade mfg", "cylinder division", "paper type", "ink type", "direct steam", "solvent type",
         "type on cylinder", "press type", "press", "unit number", "cylinder size", "paper mill location",
         "plating tank", "proof cut", "viscosity", "caliper", "ink temperature", "humidity", "roughness",
         "blade pressure", "varnish pct", "press speed", "ink pct", "solvent pct", "ESA voltage", "ESA amperage",
         "wax", "hardener", "roller durometer", "current density", "anode space ratio", "chrome content", "band type"),
        drop=("timestamp", "cylinder number", "customer", "job number"),
    ),
    "dry-bean": Source(
        {"Dry_Bean_Dataset.xlsx": "a9efa69741c6c5d95167c962a13da23a456f7e940402a5add12639790e01f714"},
        "Class", f"{_UCI}/602/dry+bean+dataset", excel=True,
    ),
    "mice-protein": Source(
        {"Data_Cortex_Nuclear.xls": "b4f9c2b423e5747cec6e86be14c72002bc5f30c51bdb3dcff553bd30605d3a2e"},
        "class", f"{_UCI}/342/mice+protein+expression",
        drop=("MouseID", "Genotype", "Treatment", "Behavior"), excel=True,
    ),
    "wine": Source(
        {"wine.data": "6be6b1203f3d51df0b553a70e57b8a723cd405683958204f96d23d7cd6aea659"},
        "class", f"{_UCI}/109/wine",
        ("class", "alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids",
         "nonflavanoid_phenols", "proanthocyanins", "color_intensity", "hue", "od280/od315", "proline"),
    ),
    "haberman": Source(
        {"haberman.data": "c54ce4172a643f141b2e20e361e1adea4299b39ed28696468097756af50f77c4"},
        "survival", f"{_UCI}/43/haberman+s+survival", ("age", "year", "nodes", "survival"),
    ),
}  # fmt: skip
PAPER = tuple(name for name in TABLES if name != "haberman")


def parse(source: Source, contents: Mapping[str, bytes]) -> tuple[Any, list[int]]:
    """Return all rows of a table's files in order, and how many each file has.

    Args:
        source: the table's row.
        contents: the bytes of each file.
    """
    import pandas as pd  # an extra, and slow to import

    frames = []
    for name in source.files:
        if source.excel:
            frame = pd.read_excel(io.BytesIO(contents[name]), engine="calamine")
        else:
            names: dict[str, Any] = {"header": None, "names": list(source.columns)} if source.columns else {}
            frame = pd.read_csv(
                io.BytesIO(contents[name]), na_values=["?"], keep_default_na=True, **names, **source.options
            )
        frames.append(frame)
    joined = pd.concat(frames, ignore_index=True)
    return source.clean(joined) if source.clean else joined, [len(frame) for frame in frames]


def load_table(name: str) -> Table:
    """Return a table that comes with the package.

    Args:
        name: a key of `TABLES`.

    Raises:
        ValueError: there is no such table.
        DataError: the package's copy is damaged.

    >>> car = load_table("car")
    >>> car.features.shape, sorted(car.target.unique())
    ((1728, 6), ['acc', 'good', 'unacc', 'vgood'])
    """
    if name not in TABLES:
        raise ValueError(f"name must be one of {', '.join(map(repr, TABLES))}, got {name!r}.")
    source = TABLES[name]
    frame, lengths = parse(source, {file: read_bundled(file, sha256) for file, sha256 in source.files.items()})
    features = frame.drop(columns=[source.target, *source.drop])
    return Table(name, features, frame[source.target].astype(str), lengths[0] if len(lengths) > 1 else None)
