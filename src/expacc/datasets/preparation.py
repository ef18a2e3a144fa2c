"""From a table's columns to numbers, as in the paper's section 5.2: fill, encode, standardise by training data."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.pipeline import Pipeline

Missing = Literal["own category", "most frequent"]


def make_preparation(features: "pd.DataFrame", missing: Missing = "own category") -> "Pipeline":
    """Return an unfitted scikit-learn pipeline: fill, one-hot, standardise; fit it on the training part only.

    A missing number becomes the mean; a category that the training part does not have becomes zeros; a constant column
    becomes 0.

    Args:
        features: the table, of which only the kinds of columns are read: numbers, or categories.
        missing: what a missing category becomes.

    >>> from expacc.datasets.tables import load_table
    >>> train, test, *_ = load_table("annealing").split()
    >>> make_preparation(train).fit(train).transform(test).shape
    (100, 74)
    """
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    # A column without a single value is 0, not dropped: the folds of a cross-validation keep their width.
    numbers = SimpleImputer(keep_empty_features=True)
    categories = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    if missing == "most frequent":
        categories = make_pipeline(SimpleImputer(strategy="most_frequent", keep_empty_features=True), categories)
    encode = make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (categories, make_column_selector(dtype_exclude="number")),
    )
    return make_pipeline(encode, StandardScaler())
