r"""The plan of the study that picks ExactLoss's default, written before it was run; docs/defaults.md has the words.

Eight problems, three optimizers, one grid of learning rates for all losses. **grid**: every loss at every rate, seed 0.
**best**: every loss at its own best rate by validation accuracy of seed 0 (ties: the rate nearest the grid's middle, of
two the smaller), seeds 1 to 5. **repeat**: where a candidate falls below cross-entropy by more than `COLLAPSE` in a
cell of the grid that counts, it and cross-entropy again with seeds 1 to 5; their means decide. A cell counts where
cross-entropy reaches at least half of its own best test accuracy on that problem with that optimizer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from expacc.baselines import GeneralizedCrossEntropyLoss, HingeLoss
from expacc.integrals.gumbel import UNIT_SIGMA
from expacc.losses import ExactLoss
from expacc.studies import CommandError
from expacc.studies.fleet import Part, Recipe, Task

RATES = {
    "SGD": (0.01, 0.03, 0.1, 0.3, 1.0),
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "AdamW": (0.0003, 0.001, 0.003, 0.01, 0.03),
}
GRID_SEED, SEEDS = 0, (1, 2, 3, 4, 5)
COLLAPSE = 0.02  # accuracy below cross-entropy's that breaks a cell
FLOOR = 0.5  # of cross-entropy's best accuracy, below which a cell does not count
LIMIT = 2.5  # paired standard errors that the default may stay behind on a problem
VALIDATION = 0.2  # of the training part
REFERENCE, DEFAULT = "cross-entropy", "Gaussian 0.3"
POWERS = (0.0, 0.15, 0.3, 0.5, 1.0)


def _recipes() -> dict[str, Recipe]:
    recipes = {
        REFERENCE: Recipe(nn.CrossEntropyLoss),
        "cross-entropy, normalised": Recipe(partial(ExactLoss, noise="gumbel", power=0.0)),
        "label smoothing 0.1": Recipe(partial(nn.CrossEntropyLoss, label_smoothing=0.1)),
        "hinge": Recipe(HingeLoss),
        "generalised cross-entropy 0.7": Recipe(GeneralizedCrossEntropyLoss),
    }
    recipes |= {f"Gaussian {q:g}": Recipe(partial(ExactLoss, power=q)) for q in POWERS}
    recipes |= {f"Gumbel {q:g}": Recipe(partial(ExactLoss, power=q, noise="gumbel", sigma=UNIT_SIGMA)) for q in POWERS}
    # Added after the first run, on the tables and the digits: see docs/defaults.md.
    recipes |= {
        "Gaussian 0.3, σ 0.7": Recipe(partial(ExactLoss, sigma=0.7)),
        "Gaussian 0.5, σ 0.7": Recipe(partial(ExactLoss, power=0.5, sigma=0.7)),
        "Gaussian 0.3, margin 2": Recipe(partial(ExactLoss, margin=2.0)),
        "Gaussian 0.3, raw logits": Recipe(partial(ExactLoss, normalize=False)),
    }
    # Added after the second run.
    recipes |= {
        f"Gaussian {q:g}, σ {sigma:g}, capped": Recipe(partial(ExactLoss, power=q, sigma=sigma, normalize="cap"))
        for sigma in (0.5, 0.7)
        for q in (0.3, 0.5)
    }
    recipes |= {
        f"Gumbel {q:g}, σ 0.55, capped": Recipe(
            partial(ExactLoss, power=q, sigma=0.7 * UNIT_SIGMA, normalize="cap", noise="gumbel")
        )
        for q in (0.0, 0.3)
    }
    # The paper's margin on MNIST and CIFAR-10; its schedule and normaliser, as attach(recipe="paper") sets them.
    recipes["published recipe"] = Recipe(partial(ExactLoss, power=1.0, margin=0.5), (10.0, 1.0), True)
    return recipes


RECIPES = _recipes()
CANDIDATES = tuple(name for name in RECIPES if name.startswith(("Gaussian", "Gumbel")))


def _divide(rows: np.ndarray, test: np.ndarray, seed: int = 0) -> Part:
    """Return a part whose validation rows are drawn from the training rows."""
    rows = np.random.default_rng(seed).permutation(rows)
    held = round(VALIDATION * len(rows))
    return Part(rows[held:], rows[:held], test)


def _digits(network: Callable[[], nn.Module], folder: Path | None) -> Task:
    """Return scikit-learn's digits, a third of them for the test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    inputs = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    part = _divide(order[len(order) // 3 :], order[: len(order) // 3])
    return Task(inputs, torch.as_tensor(labels).long(), [part], network, epochs=20, batch=64)


def _images(name: str, per_class: int | None, network: Callable[[], nn.Module], epochs: int, batch: int,
            folder: Path | None) -> Task:  # fmt: skip
    """Return an image set, of whose training part the first `per_class` images of each class are taken."""
    from expacc.datasets.images import load_images

    if folder is None or not (folder / name).is_dir():
        where = "--data is not given" if folder is None else f"there is no folder {name} in {folder}"
        raise CommandError(
            f"{name} is read from its official files and {where}: write --data DIR, with them in DIR/{name}, or leave "
            "it out with --problems"
        )
    held = load_images(name, folder / name)
    rows = np.arange(len(held.train_labels))
    if per_class is not None:
        rows = np.concatenate([np.flatnonzero(held.train_labels == k)[:per_class] for k in range(held.classes)])
    images = np.concatenate([held.train_images[rows], held.test_images])
    inputs = torch.from_numpy(images).float() / 255
    train = inputs[: len(rows)]
    inputs = (inputs - train.mean((0, 2, 3), keepdim=True)) / train.std((0, 2, 3), keepdim=True)
    target = torch.from_numpy(np.concatenate([held.train_labels[rows], held.test_labels]))
    part = _divide(np.arange(len(rows)), np.arange(len(rows), len(target)))
    return Task(inputs, target, [part], network, epochs, batch)


def _table(name: str, folds: int, epochs: int, batch: int, folder: Path | None) -> Task:
    """Return a table, by its own test part or the paper's split; with `folds`, every row is once in a test part.

    The small tables are cross-validated because one of their test rows weighs up to a point.
    """
    from sklearn.model_selection import KFold

    from expacc.datasets.preparation import make_preparation
    from expacc.datasets.tables import load_table

    table = load_table(name)
    features, labels = table.features, np.unique(table.target, return_inverse=True)[1]
    if folds:
        divided = list(KFold(folds, shuffle=True, random_state=0).split(labels))
    else:
        train, test, *_ = table.split()
        divided = [(train.index.to_numpy(), test.index.to_numpy())]
    inputs, parts = [], []
    for begin, (train, test) in zip(range(0, len(divided) * len(labels), len(labels)), divided, strict=True):
        part = _divide(train, test)
        prepared = make_preparation(features).fit(features.iloc[part.train]).transform(features)
        inputs.append(torch.as_tensor(prepared, dtype=torch.float32))
        parts.append(Part(part.train + begin, part.validation + begin, part.test + begin))
    # The encoded width may differ from fold to fold, by a category that one of them lacks: zeros fill up.
    width = max(each.shape[1] for each in inputs)
    joined = torch.cat([nn.functional.pad(each, (0, width - each.shape[1])) for each in inputs])
    target = torch.from_numpy(np.tile(labels, len(divided)))
    return Task(joined, target, parts, partial(make_mlp, width, 64, int(labels.max()) + 1), epochs, batch)


def make_mlp(width: int, hidden: int, classes: int) -> nn.Module:
    """Return a network of one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def make_cnn(side: int, channels: Sequence[int], classes: int) -> nn.Module:
    """Return a network of 3 × 3 convolutions, each with a ReLU and 2 × 2 pooling, and one linear layer."""
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        side //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * side * side, classes))


# name → how to load it, given the folder of the image sets
PROBLEMS: dict[str, Callable[[Path | None], Task]] = {
    "digits-mlp": partial(_digits, partial(make_mlp, 64, 128, 10)),
    "digits-cnn": partial(_digits, partial(make_cnn, 8, (1, 16, 32), 10)),
    "adult": partial(_table, "adult", 0, 5, 256),
    "cylinder-bands": partial(_table, "cylinder-bands", 5, 60, 32),
    "dry-bean": partial(_table, "dry-bean", 0, 20, 128),
    "mice-protein": partial(_table, "mice-protein", 5, 40, 32),
    "mnist": partial(_images, "mnist", None, partial(make_cnn, 28, (1, 16, 32), 10), 3, 128),
    "cifar-100": partial(_images, "cifar-100", 50, partial(make_cnn, 32, (3, 32, 64, 128), 100), 20, 64),
}
