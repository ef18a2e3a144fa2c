r"""ExactClassifier: a linear classifier trained for its accuracy, with scikit-learn's conventions."""

import numbers
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,  # pyright: ignore[reportPrivateUsage]: what scikit-learn's own estimators use
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from expacc import _checks
from expacc.functional import argmax_probabilities
from expacc.linear.continuation import Path, follow, follow_large
from expacc.linear.merge import merge_rows
from expacc.linear.objective import DenseRows, Objective, SparseRows
from expacc.linear.rows import expected_errors
from expacc.linear.sgd import train
from expacc.linear.temperature import fit_temperature

if TYPE_CHECKING:
    from numpy.typing import NDArray

SOLVERS = ("continuation", "sgd")
DTYPES = [np.float64, np.float32]
SHARE = 20_000  # rows that walk the path where there are more than twice as many


class ExactClassifier(ClassifierMixin, BaseEstimator):
    r"""Linear classifier that maximises its training accuracy, smoothed by noise on the scores.

    The scores of the first class are 0, those of the others x·A + b. With noise of scale σ on the scores the expected
    accuracy is smooth; ``solver="continuation"`` minimises the expected error, with a margin, at falling σ, full batch
    and without a seed. ``solver="sgd"`` is the protocol of the paper. Features want to be of similar scale for `alpha`
    to mean something, as in scikit-learn's own linear models; the steps do not depend on it.

    Args:
        solver: "continuation" or "sgd".
        alpha: α of the penalty α/2·‖A‖², beside the mean loss.
        margin: r > 0: a competitor that is behind by r has nothing more to give; None: no margin.
        sigma_start, sigma_end: first and last σ. None: 3 and 0.1 times the margin for the continuation, 10 and 0.01 for
            sgd.
        n_sigmas: how many σ the continuation stops at.
        noise: "gaussian" or "gumbel", its closed-form twin.
        fit_intercept: whether there is a b.
        class_weight: weights by class, "balanced" or None.
        whiten: take steps in whitened features: higher training accuracy where features depend on each other, and more
            overfitting.
        learning_rate: first one of sgd.
        max_iter: most iterations at each σ (None: 60), or steps of sgd (None: 8000).
        tol: the continuation leaves a σ when the loss falls by less than this share.
        warm_start: begin where the last fit ended.
        random_state: of sgd's batches and first weights; the continuation has no use for it.
        verbose: 1 prints a line for every σ.

    Attributes:
        coef_: A, (1, features) for two classes and else (classes, features), the first row 0.
        intercept_: b, of as many entries.
        classes_: labels.
        n_iter_: iterations.
        loss_path_: expected error at the end of every σ, with penalty; of very many rows, of those σ that all rows see.
        train_accuracy_: weighted accuracy on the training rows.
        expected_accuracy_: the same with noise of the last σ.
        sigma_: the σ at whose end the weights are taken: that of the best training accuracy.
        temperature_: scale of the noise in `predict_proba`.
        n_features_in_, feature_names_in_: as everywhere.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> round(ExactClassifier().fit(x, y).train_accuracy_, 3)
    0.987
    """

    def __init__(
        self,
        *,
        solver: str = "continuation",
        alpha: float = 2.5e-5,
        margin: float | None = 1.0,
        sigma_start: float | None = None,
        sigma_end: float | None = None,
        n_sigmas: int = 12,
        noise: str = "gaussian",
        fit_intercept: bool = True,
        class_weight: "dict[Any, float] | str | None" = None,
        whiten: bool = False,
        learning_rate: float = 0.05,
        max_iter: int | None = None,
        tol: float = 1e-6,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.solver = solver
        self.alpha = alpha
        self.margin = margin
        self.sigma_start = sigma_start
        self.sigma_end = sigma_end
        self.n_sigmas = n_sigmas
        self.noise = noise
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.whiten = whiten
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "ExactClassifier":
        """Fit to rows X and labels y.

        Args:
            X: (rows, features): array, frame, or SciPy sparse; float32 is kept.
            y: labels.
            sample_weight: not negative; a weight of 2 is the row twice.

        Raises:
            ValueError, TypeError: what cannot be fitted; the message says what to write.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=DTYPES, order="C")
        check_classification_targets(y)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        counted = weight > 0
        if not counted.all():
            X, y, weight = X[counted], y[counted], weight[counted]
        earlier = getattr(self, "classes_", None)
        self.classes_, target = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"ExactClassifier needs rows of at least two classes; all {len(y)} rows of y are of the one class "
                f"{self.classes_.tolist()[0]!r}."
            )
        weight = weight * self._class_weights(target, weight)[target]
        X, target, weight = merge_rows(X, target, weight)
        rows = SparseRows(X) if hasattr(X, "tocsr") else DenseRows(_as_tensor(X))
        labels, weights = torch.from_numpy(target), torch.from_numpy(weight)
        objective = self._state(rows, labels, weights)
        same = self.warm_start and earlier is not None and np.array_equal(earlier, self.classes_)
        path = self._solve(objective, self._start(objective) if same else None)
        self._keep(objective, path, X.dtype)
        return self

    def _state(self, rows: DenseRows | SparseRows, target: Tensor, weight: Tensor) -> Objective:
        return Objective(rows, target, weight, len(self.classes_), float(self.alpha), self.fit_intercept, self.whiten)

    def _solve(self, objective: Objective, start: Tensor | None) -> Path:
        margin = np.inf if self.margin is None else float(self.margin)
        unit = 1.0 if self.margin is None else margin
        first, last = (3 * unit, 0.1 * unit) if self.solver == "continuation" else (10.0, 0.01)
        first = first if self.sigma_start is None else float(self.sigma_start)
        last = last if self.sigma_end is None else float(self.sigma_end)
        if self.solver == "sgd":
            return train(
                objective, sigma=(first, last), margin=self.margin, noise=self.noise, random_state=self.random_state,
                learning_rate=float(self.learning_rate), steps=8000 if self.max_iter is None else self.max_iter,
                start=start,
            )  # fmt: skip
        options: dict[str, Any] = {
            "sigma_start": first, "sigma_end": last, "n_sigmas": self.n_sigmas, "margin": margin, "noise": self.noise,
            "max_iter": 60 if self.max_iter is None else self.max_iter, "tol": float(self.tol),
            "watch": _print_sigma if self.verbose else None,
        }  # fmt: skip
        every = len(objective.target) // SHARE
        if every < 2 or start is not None:
            return follow(objective, **options, start=start)
        some = slice(None, None, every)
        share = self._state(objective.rows.some(some), objective.target[some], objective.weight[some])
        return follow_large(objective, share, **options)

    def _keep(self, objective: Objective, path: Path, dtype: Any) -> None:
        """Set what a fit leaves behind."""
        scores = objective.scores(path.v)
        error = expected_errors(scores, objective.target, path.sigma, np.inf, self.noise)[0]
        self.train_accuracy_ = objective.accuracy(scores)
        self.expected_accuracy_ = 1.0 - float(objective.weight @ error)
        self.loss_path_ = np.array(path.losses)
        self.n_iter_, self.sigma_ = max(1, path.iterations), path.sigma
        self.temperature_ = fit_temperature(scores, objective.target, objective.weight, self.noise)
        w, b = objective.weights(path.v)
        a, b = w.T.numpy(), b.numpy()
        if len(self.classes_) > 2:
            a, b = np.vstack([np.zeros_like(a[:1]), a]), np.concatenate([[0.0], b])
        self.coef_, self.intercept_ = a.astype(dtype), b.astype(dtype)

    def decision_function(self, X: Any) -> "NDArray[Any]":
        """Return the scores: of the second class, (rows,), for two classes; else of all, (rows, classes)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=DTYPES, reset=False)
        scores = X @ self.coef_.T + self.intercept_
        return scores.ravel() if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> "NDArray[Any]":
        """Return the label with the highest score; of equals the first."""
        scores = self._all_scores(X)
        return self.classes_[scores.argmax(1)]

    def predict_proba(self, X: Any) -> "NDArray[Any]":
        """Return the probability that each class's score is the highest under noise of scale `temperature_`.

        The temperature is fitted to the training rows by maximum likelihood, so these are as calibrated as one number
        can make them; training itself asks for the order of the scores only.
        """
        scores = torch.from_numpy(np.ascontiguousarray(self._all_scores(X), dtype=np.float64))
        if self.noise == "gumbel":
            return torch.softmax(scores / self.temperature_, 1).numpy()
        parts = [argmax_probabilities(part, self.temperature_) for part in scores.split(4096)]
        probabilities = torch.cat(parts)
        return (probabilities / probabilities.sum(1, keepdim=True)).numpy()

    def _all_scores(self, X: Any) -> "NDArray[Any]":
        scores = self.decision_function(X)
        return np.stack([np.zeros_like(scores), scores], 1) if scores.ndim == 1 else scores

    def _start(self, objective: Objective) -> Tensor | None:
        """Return V of the last fit, or None where the features have changed."""
        a, b = (self.coef_, self.intercept_) if len(self.classes_) == 2 else (self.coef_[1:], self.intercept_[1:])
        if a.shape[1] != objective.rows.shape[1]:
            return None
        return objective.coordinates(torch.from_numpy(a.T.astype(np.float64)), torch.from_numpy(b.astype(np.float64)))

    def _class_weights(self, target: "NDArray[Any]", weight: "NDArray[Any]") -> "NDArray[Any]":
        """Return a factor for every class; "balanced" counts a row as often as its weight says."""
        classes = len(self.classes_)
        if self.class_weight is None:
            return np.ones(classes)
        if isinstance(self.class_weight, str):
            counts = np.bincount(target, weights=weight, minlength=classes)
            return weight.sum() / (classes * counts)
        unknown = set(self.class_weight) - set(self.classes_.tolist())
        if unknown:
            raise ValueError(
                f"class_weight names {sorted(map(str, unknown))}, which y does not hold; its classes are "
                f"{self.classes_.tolist()}."
            )
        return np.array([float(self.class_weight.get(label, 1.0)) for label in self.classes_.tolist()])

    def _check_parameters(self) -> None:
        _checks.check_choice("solver", self.solver, SOLVERS)
        _checks.check_choice("noise", self.noise, _checks.NOISES)
        if not isinstance(self.alpha, numbers.Real) or not 0 <= float(self.alpha) < np.inf:
            raise ValueError(f"alpha must be a finite number that is not negative, such as 2.5e-5, got {self.alpha!r}.")
        if self.margin is not None:
            _checks.check_number("margin", self.margin, "1.0", positive=True)
        for name in ("sigma_start", "sigma_end"):
            if getattr(self, name) is not None:
                _checks.check_number(name, getattr(self, name), "0.1", positive=True)
        _checks.check_number("learning_rate", self.learning_rate, "0.05", positive=True)
        _checks.check_steps("n_sigmas", self.n_sigmas)
        if self.max_iter is not None:
            _checks.check_steps("max_iter", self.max_iter)
        _checks.check_number("tol", self.tol, "1e-6")
        for name in ("fit_intercept", "whiten", "warm_start"):
            _checks.check_flag(name, getattr(self, name))
        if isinstance(self.class_weight, str) and self.class_weight != "balanced":
            raise ValueError(f"class_weight must be a dict, 'balanced' or None, got {self.class_weight!r}.")


def _as_tensor(x: "NDArray[Any]") -> Tensor:
    # A read-only array (a memory map) is only read here: torch warns that it could be written.
    return torch.from_numpy(x) if x.flags.writeable else torch.frombuffer(x, dtype=_TORCH[x.dtype]).view(x.shape)


_TORCH = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


def _print_sigma(number: int, sigma: float, accuracy: float) -> None:
    print(f"sigma {number + 1}: {sigma:.4g}, training accuracy {accuracy:.4%}")
