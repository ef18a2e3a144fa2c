"""ExactClassifier as a user meets it: scikit-learn's checks, the ten tables, labels, weights, frames, errors."""

import pickle
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from expacc import ExactClassifier
from expacc.datasets.preparation import make_preparation
from expacc.datasets.tables import load_table

X, Y = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[Y]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [{}, {"solver": "sgd", "max_iter": 200, "random_state": 0}, {"noise": "gumbel"}, {"whiten": True}, {"alpha": 0.0}],
    ids=["default", "sgd", "gumbel", "whiten", "alpha=0"],
)
def test_scikit_learn_finds_no_failure(options: Any) -> None:
    results = check_estimator(ExactClassifier(**options), on_fail=None, on_skip=None)
    assert [(r["check_name"], str(r["exception"])) for r in results if r["status"] == "failed"] == []
    assert len([r for r in results if r["status"] == "passed"]) > 50


@pytest.mark.parametrize(
    ("name", "least"),
    [("annealing", 1.0), ("audit-risk", 0.999), ("balance-scale", 0.916), ("breast-cancer-wisconsin", 0.991),
     ("car", 0.967), ("cylinder-bands", 0.882), ("mice-protein", 1.0), ("wine", 1.0)],
)  # fmt: skip
def test_training_accuracy_of_the_small_tables(name: str, least: float) -> None:
    train, _, labels, _ = load_table(name).split()
    x = make_preparation(train).fit_transform(train)
    model = ExactClassifier(alpha=0.0).fit(x, labels)
    assert model.train_accuracy_ >= least
    assert model.score(x, labels) == pytest.approx(model.train_accuracy_)


@pytest.mark.parametrize(
    ("options", "most"), [({}, 69), ({"whiten": True, "alpha": 0.0}, 67)], ids=["default", "whitened"]
)
def test_haberman_comes_near_the_proven_optimum_of_67_errors(options: Any, most: int) -> None:
    table = load_table("haberman")
    x, y = StandardScaler().fit_transform(table.features), table.target
    assert (ExactClassifier(**options).fit(x, y).predict(x) != y).sum() <= most
    assert (LogisticRegression().fit(x, y).predict(x) != y).sum() == 78


@pytest.mark.parametrize(
    "labels", [Y, NAMES, NAMES.astype(object), Y.astype(float) - 1], ids=["int", "str", "object", "float"]
)
def test_any_labels(labels: Any) -> None:
    model = ExactClassifier().fit(X, labels)
    assert set(model.predict(X)) <= set(labels)
    assert model.score(X, labels) > 0.96


@pytest.mark.parametrize(
    "options", [{}, {"noise": "gumbel"}, {"class_weight": "balanced"}], ids=["default", "gumbel", "balanced"]
)
def test_a_weight_is_a_repetition_to_the_bit(options: Any) -> None:
    weight = np.random.default_rng(0).integers(0, 4, len(Y))
    again = np.random.default_rng(1).permutation(np.repeat(np.arange(len(Y)), weight))
    weighted = ExactClassifier(**options).fit(X, Y, sample_weight=weight)
    repeated = ExactClassifier(**options).fit(X[again], Y[again])
    np.testing.assert_array_equal(weighted.coef_, repeated.coef_)
    np.testing.assert_array_equal(weighted.intercept_, repeated.intercept_)


def test_the_same_fit_twice_is_the_same_to_the_bit() -> None:
    first, second = (ExactClassifier().fit(X, Y) for _ in range(2))
    np.testing.assert_array_equal(first.coef_, second.coef_)


@pytest.mark.parametrize("seed", [0, 1])
def test_sgd_follows_its_seed(seed: int) -> None:
    options: Any = {"solver": "sgd", "max_iter": 100}
    first, second = (ExactClassifier(random_state=seed, **options).fit(X, Y) for _ in range(2))
    other = ExactClassifier(random_state=seed + 2, **options).fit(X, Y)
    np.testing.assert_array_equal(first.coef_, second.coef_)
    assert not np.array_equal(first.coef_, other.coef_)


def test_sgd_reproduces_the_paper_s_car_row() -> None:
    train, test, labels, held = load_table("car").split()
    preparation = make_preparation(train).fit(train)
    model = ExactClassifier(solver="sgd", alpha=0.0, margin=0.05, learning_rate=0.05, random_state=0)
    model.fit(preparation.transform(train), labels)
    assert 100 * model.train_accuracy_ == pytest.approx(96.67, abs=0.005)
    assert 100 * model.score(preparation.transform(test), held) == pytest.approx(95.2, abs=0.2)


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_are_of_winning(noise: Any, classes: int) -> None:
    x, y = (X, Y) if classes == 3 else (X[50:], Y[50:])
    model = ExactClassifier(noise=noise).fit(x, y)
    p = model.predict_proba(x)
    assert p.shape == (len(y), classes)
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-12)
    np.testing.assert_array_equal(model.classes_[p.argmax(1)], model.predict(x))
    truth = p[np.arange(len(y)), np.searchsorted(model.classes_, y)]
    assert -np.log(truth).mean() < 0.2  # log 2 and log 3 know nothing


@pytest.mark.parametrize("make", [scipy.sparse.csr_matrix, scipy.sparse.csc_array, scipy.sparse.coo_array])
def test_sparse_rows_are_dense_rows(make: Any) -> None:
    dense, sparse = ExactClassifier().fit(X, Y), ExactClassifier().fit(make(X), Y)
    assert sparse.train_accuracy_ == pytest.approx(dense.train_accuracy_, abs=0.01)
    np.testing.assert_array_equal(sparse.predict(make(X)), sparse.predict(X))


def test_float32_is_kept() -> None:
    model = ExactClassifier().fit(X.astype(np.float32), Y)
    assert (model.coef_.dtype, model.decision_function(X.astype(np.float32)).dtype) == (np.float32, np.float32)
    assert model.train_accuracy_ > 0.97


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame], ids=["pandas", "polars"])
def test_frames_keep_their_names(frame: Any) -> None:
    named = frame({name: X[:, k] for k, name in enumerate("abcd")})
    model = ExactClassifier().fit(named, Y)
    assert model.feature_names_in_.tolist() == list("abcd")
    np.testing.assert_array_equal(model.predict(named), ExactClassifier().fit(X, Y).predict(X))


def test_pipelines_searches_clones_and_pickles() -> None:
    search = GridSearchCV(
        make_pipeline(StandardScaler(), ExactClassifier()), {"exactclassifier__margin": [0.5, 2.0]}, cv=3
    )
    search.fit(X, Y)
    assert search.best_score_ > 0.93
    model = search.best_estimator_
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))
    assert clone(model).get_params()["exactclassifier__margin"] == model.get_params()["exactclassifier__margin"]


def test_a_warm_start_begins_where_the_last_fit_ended() -> None:
    model = ExactClassifier(sigma_start=0.1, sigma_end=0.1, n_sigmas=1, warm_start=True).fit(X, Y)
    before = model.train_accuracy_
    model.fit(X, Y)
    assert model.train_accuracy_ >= before
    assert model.n_iter_ <= 60


def test_class_weights_move_the_boundary() -> None:
    x, y = X[50:, :2], Y[50:]
    plain, heavy = (ExactClassifier(class_weight=w).fit(x, y) for w in (None, {1: 1.0, 2: 20.0}))
    assert (heavy.predict(x) == 2).sum() > (plain.predict(x) == 2).sum()


def test_verbose_prints_a_line_for_every_sigma(capsys: pytest.CaptureFixture[str]) -> None:
    ExactClassifier(verbose=1, n_sigmas=3).fit(X, Y)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["sigma 1", "sigma 2", "sigma 3"]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "solver": ({"solver": "newton"}, ValueError, "solver must be one of 'continuation', 'sgd', got 'newton'"),
    "noise": ({"noise": "cauchy"}, ValueError, "noise must be one of 'gaussian', 'gumbel', got 'cauchy'"),
    "alpha": ({"alpha": -1}, ValueError, "alpha must be a finite number that is not negative, such as 2.5e-5, got -1"),
    "alpha text": ({"alpha": "1"}, ValueError, "alpha must be a finite number"),
    "margin": ({"margin": 0}, ValueError, "margin must be"),
    "sigma_end": ({"sigma_end": -0.1}, ValueError, "sigma_end must be"),
    "n_sigmas": ({"n_sigmas": 0}, ValueError, "n_sigmas must be"),
    "max_iter": ({"max_iter": 2.5}, TypeError, "max_iter must be"),
    "whiten": ({"whiten": "yes"}, TypeError, "whiten must be True or False"),
    "class_weight": (
        {"class_weight": "fair"},
        ValueError,
        "class_weight must be a dict, 'balanced' or None, got 'fair'",
    ),
    "unknown class": ({"class_weight": {7: 2.0}}, ValueError, r"class_weight names \['7'\], which y does not hold"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters_are_said_at_fit(name: str) -> None:
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        ExactClassifier(**options).fit(X, Y)


def test_one_class_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rows of at least two classes; all 3 rows of y are of the one class 'a'"):
        ExactClassifier().fit(X[:3], ["a", "a", "a"])


def test_rows_without_weight_are_not_there() -> None:
    weight = (Y < 2).astype(float)
    assert ExactClassifier().fit(X, Y, sample_weight=weight).classes_.tolist() == [0, 1]


@pytest.mark.parametrize("make", [np.asarray, scipy.sparse.csr_matrix], ids=["dense", "sparse"])
def test_many_rows_walk_the_path_by_a_share(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(900, 5))
    y = (x @ random.normal(size=(5, 3)) + 0.3 * random.gumbel(size=(900, 3))).argmax(1)
    whole = ExactClassifier().fit(make(x), y)
    assert len(whole.loss_path_) == 12
    monkeypatch.setattr("expacc.linear.estimator.SHARE", 200)
    shared = ExactClassifier().fit(make(x), y)
    assert len(shared.loss_path_) == 4
    assert shared.train_accuracy_ > whole.train_accuracy_ - 0.01
    assert shared.n_iter_ > 4
