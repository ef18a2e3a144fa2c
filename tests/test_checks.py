"""Every message: its type, the argument it names, what arrived, and what to write instead."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from expacc import ExactLoss, _checks, argmax_probabilities, exact_loss, expected_accuracy, expected_error
from expacc import log_expected_accuracy as log_accuracy

X, Y = torch.zeros(2, 3), torch.tensor([0, 1])
SOFT = torch.full((2, 3), 1 / 3)
G = torch.Generator().manual_seed(0)

# ruff: noqa: E501 (a row per message)
# (arguments that replace those of a good call, type, message)
CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "logits-list": ({"logits": [[0.0, 1.0]]}, TypeError, r"logits must be a tensor, got list: write torch.as_tensor\("),
    "logits-int": ({"logits": X.long()}, TypeError, r"logits must be float32, .* got torch.int64: write .float\(\)"),
    "logits-complex": ({"logits": X.cfloat()}, TypeError, r"logits must be .* got torch.complex64"),
    "logits-0-dim": ({"logits": X[0, 0]}, ValueError, r"logits must have a class dimension .*\(N, C\).* got shape \(\)"),
    "logits-no-class": ({"logits": X[:, :0]}, ValueError, r"logits must have a class dimension .* got shape \(2, 0\)"),
    "logits-sparse": ({"logits": X.to_sparse()}, TypeError, r"logits must be a dense tensor, got layout .*: write logits.to_dense"),
    "soft-sparse": ({"target": SOFT.to_sparse()}, TypeError, r"target must be a dense tensor, got layout .*: write target.to_dense"),
    "normalize": ({"normalize": "yes"}, TypeError, r'normalize must be "cap" .*, True .* or False, got str'),
    "ignore_index-large": ({"ignore_index": 2**70}, TypeError, r"ignore_index must be an integer, got 1180.* \(64 bits\)"),
    "margin-numpy": ({"margin": np.float32(0.5)}, TypeError, r"margin must be a number, got float32: .* or float\(…\)"),
    "target-list": ({"target": [0, 1]}, TypeError, r"target must be a tensor, got list: write torch.as_tensor\(target"),
    "target-bool": ({"target": Y.bool()}, TypeError, r"target must hold integers .* got torch.bool: write target.long"),
    "target-complex": ({"target": Y.cfloat()}, TypeError, r"target must hold integers .* got torch.complex64"),
    "target-shape": (
        {"target": Y[:1]}, ValueError,
        r"target of class indices must have shape \(2,\) for logits of shape \(2, 3\), got \(1,\)",
    ),
    "target-last-dim": (
        {"logits": torch.zeros(2, 3, 4), "target": torch.zeros(2, 3, dtype=torch.int64)}, ValueError,
        r"must have shape \(2, 4\) for logits of shape \(2, 3, 4\), got \(2, 3\)",
    ),
    "target-float-indices": (
        {"target": Y.float()}, ValueError,
        r"target of floating point holds class probabilities .* shape \(2, 3\), got \(2,\); .* write target.long\(\)",
    ),
    "target-device": (
        {"target": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError,
        r"target is on meta and logits on cpu: write target.to\('cpu'\)",
    ),
    "target-range": ({"target": Y + 2}, IndexError, r"target\[1\] is 3, outside 0 … 2 and not ignore_index=-100: check"),
    "ignore-float": ({"ignore_index": 1.0}, TypeError, r"ignore_index must be an integer, got 1.0: write .*=-100"),
    "ignore-bool": ({"ignore_index": True}, TypeError, r"ignore_index must be an integer, got True"),
    "ignore-soft": (
        {"target": SOFT, "ignore_index": 0}, ValueError,
        r"ignore_index=0 has no meaning with probability targets: leave it out, and give .* probabilities of 0",
    ),
    "sigma-zero": ({"sigma": 0}, ValueError, r"sigma must be positive and finite, got 0: write for example sigma=1.0"),
    "sigma-negative": ({"sigma": -1.5}, ValueError, r"sigma must be positive and finite, got -1.5"),
    "sigma-nan": ({"sigma": math.nan}, ValueError, r"sigma must be positive and finite, got nan"),
    "sigma-inf": ({"sigma": math.inf}, ValueError, r"sigma must be positive and finite, got inf"),
    "sigma-text": ({"sigma": "1"}, TypeError, r"sigma must be a number, got str: write for example sigma=1.0"),
    "sigma-bool": ({"sigma": True}, TypeError, r"sigma must be a number, got bool"),
    "sigma-none": ({"sigma": None}, TypeError, r"sigma must be a number, got NoneType"),
    "sigma-int-tensor": ({"sigma": Y}, TypeError, r"sigma must be floating point, got torch.int64: write sigma.float\("),
    "sigma-shape": (
        {"sigma": torch.ones(3)}, ValueError,
        r"sigma must be a number, a 0-dim tensor or have one value per sample, shape \(2,\); got shape \(3,\)",
    ),
    "sigma-column": ({"sigma": torch.ones(2, 1)}, ValueError, r"one value per sample, shape \(2,\); got shape \(2, 1\)"),
    "margin-nan": ({"margin": math.nan}, ValueError, r"margin must be finite, got nan: write for example margin=0.5"),
    "margin-inf": ({"margin": math.inf}, ValueError, r"margin must be finite, got inf: .*\(None: no margin\)"),
    "margin-text": ({"margin": "1"}, TypeError, r"margin must be a number, got str"),
    "margin-soft": (
        {"target": SOFT, "margin": 1}, ValueError,
        r"a target of class probabilities cannot be combined with margin=1: .* Write margin=None, or class-index",
    ),
    "margin-smoothing": (
        {"label_smoothing": 0.1, "margin": 0.5}, ValueError,
        r"label_smoothing=0.1 cannot be combined with margin=0.5: the margin differs by target class. Write margin=None",
    ),
    "power-nan": ({"power": math.nan}, ValueError, r"power must be finite, got nan: .*power=0.3 \(1: expected error, 0"),
    "power-text": ({"power": "q"}, TypeError, r"power must be a number, got str"),
    "power-vector": (
        {"power": torch.ones(2)}, ValueError,
        r"power must be a number or a 0-dim floating-point tensor, got shape \(2,\) and dtype torch.float32",
    ),
    "power-int-tensor": ({"power": torch.tensor(1)}, ValueError, r"power must be .* got shape \(\) and dtype torch.int64"),
    "noise": ({"noise": "normal"}, ValueError, r"noise must be one of 'gaussian', 'gumbel', got 'normal'"),
    "noise-none": ({"noise": None}, ValueError, r"noise must be one of 'gaussian', 'gumbel', got None"),
    "reduction": ({"reduction": "avg"}, ValueError, r"reduction must be one of 'none', 'mean', 'sum', got 'avg'"),
    "backend": ({"backend": "gpu"}, ValueError, r"backend must be one of 'auto', 'reference', 'cpu', got 'gpu'"),
    "integrator": ({"integrator": "mc"}, ValueError, r"integrator must be one of 'quadrature', 'genz', 'monte_carlo', got"),
    "weight-list": ({"weight": [1, 2, 3]}, TypeError, r"weight must be a floating-point tensor .* per class, got list"),
    "weight-int": (
        {"weight": torch.ones(3, dtype=torch.int64)}, TypeError,
        r"weight must be a floating-point tensor .*, got a tensor of shape \(3,\) and dtype torch.int64",
    ),
    "weight-shape": ({"weight": torch.ones(2)}, ValueError, r"weight must have one number per class, shape \(3,\); got .*2"),
    "weight-device": (
        {"weight": torch.ones(3, device="meta")}, ValueError, r"weight is on meta and logits on cpu: write loss.to\('cpu'\)",
    ),
    "smoothing-high": ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
    "smoothing-low": ({"label_smoothing": -0.1}, ValueError, r"label_smoothing must lie in \[0, 1\], got -0.1"),
    "smoothing-text": ({"label_smoothing": "0.1"}, TypeError, r"label_smoothing must be a number, got str: .*=0.1"),
    "nodes-one": ({"nodes": 1}, ValueError, r"nodes must be 'auto' or an integer of at least 2, got 1"),
    "nodes-float": ({"nodes": 32.0}, ValueError, r"nodes must be 'auto' or an integer of at least 2, got 32.0"),
    "nodes-bool": ({"nodes": True}, ValueError, r"nodes must be 'auto' or an integer of at least 2, got True"),
    "nodes-text": ({"nodes": "many"}, ValueError, r"nodes must be 'auto' or an integer of at least 2, got 'many'"),
    "genz-gumbel": (
        {"integrator": "genz", "noise": "gumbel", "generator": G}, ValueError,
        r"integrator='genz' samples Gaussian noise only, got noise='gumbel'",
    ),
    "genz-soft": (
        {"integrator": "genz", "target": SOFT, "generator": G}, ValueError,
        r"integrator='genz' takes class indices without label_smoothing: write integrator='quadrature'",
    ),
    "monte-carlo-smoothing": (
        {"integrator": "monte_carlo", "label_smoothing": 0.1, "generator": G}, ValueError,
        r"integrator='monte_carlo' takes class indices without label_smoothing",
    ),
    "genz-no-generator": ({"integrator": "genz"}, (TypeError, ValueError), r"generator.*torch.Generator\(\).manual_seed\(0"),
    "genz-samples": ({"integrator": "genz", "generator": G, "samples": 0}, ValueError, r"samples must be .*got 0: .*=16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_meant_says_so(name: str) -> None:
    changed, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        exact_loss(**{"logits": X, "target": Y, **changed})


MODULE = {name: CALLS[name] for name in CALLS if not {"logits", "target", "sigma", "weight"} & set(CALLS[name][0])}


@pytest.mark.parametrize("name", MODULE)
def test_the_module_says_the_same(name: str) -> None:
    changed, error, message = MODULE[name]
    if "power" in changed or "ignore_index" in changed:
        message = f"{next(iter(changed))}"  # the state's own words, and those that need a target
    with pytest.raises(error, match=message):
        ExactLoss(**changed)(X, Y)


# What the module can know is refused when it is made, not at the first batch.
EARLY = ("margin", "power", "noise", "reduction", "label_smoothing", "nodes", "integrator", "backend", "ignore_index")


@pytest.mark.parametrize("name", [n for n in MODULE if set(EARLY) & set(MODULE[n][0])])
def test_the_module_says_so_when_it_is_made(name: str) -> None:
    changed, error, _ = MODULE[name]
    with pytest.raises(error, match=rf"{'|'.join(changed)}"):
        ExactLoss(**changed)


@pytest.mark.parametrize(
    "value", [[1.0], torch.ones(3, dtype=torch.int64), torch.ones(3, 1)], ids=["list", "int", "2-d"]
)
def test_the_module_refuses_a_weight_that_cannot_be_one(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"weight must"):
        ExactLoss(weight=value)


@pytest.mark.parametrize("name", ["logits-list", "logits-int", "target-list", "target-shape", "target-range"])
def test_the_modules_call_says_the_same(name: str) -> None:
    changed, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        ExactLoss()(**{"logits": X, "target": Y, **changed})


@pytest.mark.parametrize("function", [expected_accuracy, expected_error, log_accuracy], ids=lambda f: f.__name__)
def test_functions_take_class_indices_only(function: Any) -> None:
    with pytest.raises(
        ValueError, match=r"target must hold class indices here, got torch.float32: write target.long\(\), or"
    ):
        function(X, SOFT)


@pytest.mark.parametrize("function", [expected_accuracy, expected_error, log_accuracy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [n for n in CALLS if n.split("-")[0] in ("logits", "target", "sigma", "nodes", "noise")
                                  and n != "target-float-indices"])  # fmt: skip
def test_functions_say_the_same(function: Any, name: str) -> None:
    changed, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        function(**{"logits": X, "target": Y, **changed})


@pytest.mark.parametrize("name", [n for n in CALLS if n.split("-")[0] in ("logits", "sigma", "nodes", "noise")])
def test_argmax_probabilities_say_the_same(name: str) -> None:
    changed, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        argmax_probabilities(**{"logits": X, **changed})


def test_argmax_probabilities_have_no_kernel() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', 'reference', got 'cpu'"):
        argmax_probabilities(X, backend="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("generator", [None, 0], ids=str)
def test_a_sampled_integrator_wants_a_generator(generator: Any) -> None:
    with pytest.raises(TypeError, match=r"integrator='genz' needs generator=torch.Generator\(\).manual_seed\(0\), got"):
        ExactLoss(integrator="genz", generator=generator)


@pytest.mark.parametrize("samples", [0, -1, 1.5, True], ids=str)
def test_a_sampled_integrator_wants_a_number_of_points(samples: Any) -> None:
    with pytest.raises(ValueError, match=rf"samples must be an integer of at least 1, got {samples!r}: .*samples=16"):
        ExactLoss(integrator="genz", generator=G, samples=samples)


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.zeros(2, 1), "a tensor of shape (2, 1) and dtype torch.float32"), ([1], "list"), (None, "NoneType")],
    ids=["tensor", "list", "none"],
)
def test_describe(value: Any, said: str) -> None:
    assert _checks.describe(value) == said


def test_numpy_numbers_are_numbers() -> None:
    want = exact_loss(X, Y, 2.0, power=0.5, margin=1.0)
    assert torch.equal(exact_loss(X, Y, np.float64(2.0), power=np.float64(0.5), margin=np.float64(1.0)), want)
