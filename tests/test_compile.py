"""torch.compile(fullgraph=True): the same numbers, the same path, and no recompilation when σ or q moves."""

from typing import Any

import pytest
import torch
from plain import BACKENDS, TOLERANCE, draw, run, value_and_grad
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from expacc import ExactLoss, argmax_probabilities, attach, exact_loss

both = pytest.mark.parametrize("backend", BACKENDS)
TARGET = torch.tensor([0, 2, 1])


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def kernel_ran(graphs: list[torch.fx.GraphModule]) -> str:
    """Return the path that a captured graph holds: the kernel is an operator of its own."""
    # Dynamo may compile a frame twice before it settles on the floats among a module's attributes: the last counts.
    names = [str(node.target) for node in graphs[-1].graph.nodes]
    return "cpu" if any(name.startswith("expacc.loss") for name in names) else "reference"


def compiled(loss: ExactLoss) -> tuple[Any, CompileCounterWithBackend]:
    # aot_eager traces forward and backward as inductor does, without a minute of C++ compilation per case.
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(loss, fullgraph=True, backend=counter), counter


DEFAULT: dict[str, Any] = {}
PAPER: dict[str, Any] = {"power": 1, "margin": 0.5, "normalize": False}


# A compilation of the reference takes seconds: every cell with the kernel, a choice of them with the definition.
@pytest.mark.parametrize(
    ("backend", "noise", "options"),
    [
        ("cpu", "gaussian", DEFAULT),
        ("cpu", "gaussian", PAPER),
        ("cpu", "gumbel", DEFAULT),
        ("cpu", "gumbel", PAPER),
        ("reference", "gaussian", DEFAULT),
        ("reference", "gumbel", PAPER),
    ],
)
def test_compiled_equals_eager(backend: Any, noise: Any, options: dict[str, Any]) -> None:
    loss = ExactLoss(noise=noise, backend=backend, **options)
    check_equals_eager(loss, backend, draw(3, 4, dtype=torch.float32), TARGET)


def test_compiled_equals_eager_in_float64() -> None:
    check_equals_eager(ExactLoss(), "reference", draw(3, 4), TARGET)


@pytest.mark.parametrize(
    ("backend", "noise", "kind"),
    [
        ("cpu", "gaussian", "weight-ignored-none"),
        ("cpu", "gumbel", "weight-ignored-none"),
        ("reference", "gaussian", "weight-ignored-none"),
        ("cpu", "gaussian", "sigma-per-sample"),
        ("cpu", "gumbel", "sigma-per-sample"),
        ("cpu", "gaussian", "class-dim-1-half"),
        ("cpu", "gumbel", "class-dim-1-half"),
        ("reference", "gumbel", "class-dim-1-half"),
    ],
)
def test_compiled_arguments(backend: Any, noise: Any, kind: str) -> None:
    logits, target, sigma, options = draw(3, 4, dtype=torch.float32), TARGET, None, {}
    if kind == "weight-ignored-none":
        options = {"weight": torch.tensor([1.0, 2.0, 3.0, 4.0]), "ignore_index": 2, "reduction": "none"}
    elif kind == "sigma-per-sample":
        sigma = torch.tensor([0.5, 1.0, 2.0])
    else:
        logits, target = draw(2, 4, 3, dtype=torch.bfloat16), torch.stack((TARGET, TARGET))
    check_equals_eager(ExactLoss(noise=noise, backend=backend, **options), backend, logits, target, sigma)


def check_equals_eager(loss: ExactLoss, path: str, logits: torch.Tensor, *rest: Any) -> None:
    step, counter = compiled(loss)
    value, grad = value_and_grad(lambda x: step(x, *rest), logits)
    want, slope = value_and_grad(lambda x: loss(x, *rest), logits)
    torch.testing.assert_close(value, want, **TOLERANCE[logits.dtype])
    torch.testing.assert_close(grad, slope, **TOLERANCE[logits.dtype])
    assert kernel_ran(counter.graphs) == path


@pytest.mark.parametrize(("backend", "noise"), [("cpu", "gaussian"), ("cpu", "gumbel"), ("reference", "gumbel")])
def test_compiled_without_gradient(backend: Any, noise: Any) -> None:
    loss, logits = ExactLoss(noise=noise, backend=backend), draw(3, 4, dtype=torch.float32)
    step, counter = compiled(loss)
    with torch.no_grad():
        torch.testing.assert_close(step(logits, TARGET), loss(logits, TARGET), **TOLERANCE[torch.float32])
    assert kernel_ran(counter.graphs) == backend


@pytest.mark.parametrize(("noise", "kind"), [("gaussian", "smoothing"), ("gumbel", "probabilities")])
def test_compiled_soft_targets(noise: Any, kind: str) -> None:
    target = TARGET[:2] if kind == "smoothing" else torch.softmax(draw(2, 3, seed=2), 1)
    loss = ExactLoss(noise=noise, label_smoothing=0.1 * (kind == "smoothing"))
    step, _ = compiled(loss)
    value, grad = value_and_grad(lambda x: step(x, target), draw(2, 3))
    want, slope = value_and_grad(lambda x: loss(x, target), draw(2, 3))
    torch.testing.assert_close(value, want, **TOLERANCE[torch.float64])
    torch.testing.assert_close(grad, slope, **TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    ("backend", "noise", "way"),
    [
        ("reference", "gaussian", "attribute"),
        ("reference", "gumbel", "fill"),
        ("cpu", "gaussian", "attribute"),
        ("cpu", "gumbel", "attribute"),
        ("cpu", "gaussian", "fill"),
        ("cpu", "gumbel", "copy"),
        ("cpu", "gaussian", "state_dict"),
    ],
)
def test_moving_sigma_and_power_does_not_recompile(backend: Any, noise: Any, way: str) -> None:
    loss = ExactLoss(noise=noise, backend=backend)
    logits = draw(3, 4, dtype=torch.float32)
    step, counter = compiled(loss)
    step(logits, TARGET)
    other = ExactLoss(sigma=2.0, power=0.0)
    if way == "attribute":
        loss.sigma, loss.power = 2.0, 0.0  # type: ignore[assignment]
    elif way == "fill":
        loss.sigma.fill_(2.0)
        loss.power.fill_(0.0)
    elif way == "copy":
        loss.sigma.copy_(other.sigma)
        loss.power.copy_(other.power)
    else:
        loss.load_state_dict(other.state_dict())
    want = run(backend, logits, TARGET, 2.0, power=0.0, noise=noise, reduction="mean", backend=backend)
    before = counters["stats"]["unique_graphs"], counter.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(step(logits, TARGET), want, **TOLERANCE[torch.float32])
    assert (counters["stats"]["unique_graphs"], counter.frame_count) == before
    assert not counters["graph_break"]
    assert kernel_ran(counter.graphs) == backend


@both
def test_a_new_batch_size_compiles_at_most_once_more(backend: Any) -> None:
    loss = ExactLoss(backend=backend)
    step, counter = compiled(loss)
    batches = [(draw(n, 4, dtype=torch.float32), torch.zeros(n, dtype=torch.int64)) for n in (3, 5, 7, 9)]
    values = [step(*batch) for batch in batches[:2]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        values += [step(*batch) for batch in batches[2:]]
    torch.testing.assert_close(values, [loss(*batch) for batch in batches], **TOLERANCE[torch.float32])
    assert kernel_ran(counter.graphs) == backend


@pytest.mark.parametrize(("backend", "noise"), [("cpu", "gaussian"), ("cpu", "gumbel"), ("reference", "gaussian")])
def test_compiled_gradient_of_sigma(backend: Any, noise: Any) -> None:
    loss, logits = ExactLoss(noise=noise, backend=backend), draw(3, 4, dtype=torch.float32)
    step, _ = compiled(loss)
    _, grad = value_and_grad(lambda s: step(logits, TARGET, s), torch.tensor([0.5, 1.0, 2.0]))
    _, want = value_and_grad(lambda s: loss(logits, TARGET, s), torch.tensor([0.5, 1.0, 2.0]))
    torch.testing.assert_close(grad, want, **TOLERANCE[torch.float32])


@both
def test_compiled_model_and_loss_in_one_graph(backend: Any) -> None:
    model, loss = torch.nn.Linear(5, 4), ExactLoss(backend=backend)
    counter = CompileCounterWithBackend("aot_eager")
    features = draw(3, 5, dtype=torch.float32)

    @torch.compile(fullgraph=True, backend=counter)
    def step(x: torch.Tensor) -> torch.Tensor:
        return loss(model(x), TARGET)

    step(features).backward()
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss(model(features), TARGET).backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()], **TOLERANCE[torch.float32])
    assert kernel_ran(counter.graphs) == backend


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of what enters a graph
@pytest.mark.parametrize("parts", ["model", "loss", "both", "one-graph"])
def test_attached_sigma_moves_without_compiling_again(parts: str) -> None:
    """Whatever is compiled of a training; and the weights are those of one that is not."""
    ends, features, target = [], draw(8, 5, dtype=torch.float32), torch.arange(8) % 4
    for compiles in (False, True):
        model, loss = torch.nn.Linear(5, 4), ExactLoss(power=1, margin=0.5)
        with torch.no_grad():
            for k, p in enumerate(model.parameters()):
                p.copy_(draw(*p.shape, dtype=torch.float32, seed=k))
        counter = CompileCounterWithBackend("aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = attach(optimizer, loss, total_steps=6, power=(1.0, 0.5))
        forward: Any = torch.compile(model, backend=counter) if compiles and parts in ("model", "both") else model
        value: Any = torch.compile(loss, backend=counter) if compiles and parts in ("loss", "both") else loss
        step: Any = lambda x, y, f=forward, g=value: g(f(x), y)  # noqa: E731
        step = torch.compile(step, backend=counter, fullgraph=True) if compiles and parts == "one-graph" else step
        seen, graphs = [], 0
        for k in range(6):
            seen.append(float(loss.sigma))
            optimizer.zero_grad()
            step(features, target).backward()
            optimizer.step()
            graphs = counter.frame_count if k == 0 else graphs
        assert counter.frame_count == graphs  # none after the first step
        assert bool(graphs) == compiles
        assert seen == [attachment.schedules["sigma"].value_at(k) for k in range(6)]
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(ends[1], ends[0], **TOLERANCE[torch.float32])


def test_attach_takes_a_compiled_loss() -> None:
    """σ moves in the loss within."""
    loss, optimizer = ExactLoss(), torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    attach(optimizer, torch.compile(loss, backend="aot_eager"), total_steps=5, sigma=(3.0, 1.0), schedule="linear")
    assert float(loss.sigma) == 3.0


def test_the_kernel_compiles_with_inductor() -> None:
    # Once with the compiler that users get; the reference's some thousand operations would take it minutes.
    loss, logits = ExactLoss(backend="cpu"), draw(3, 4, dtype=torch.float32)
    step = torch.compile(loss, fullgraph=True)
    value, grad = value_and_grad(lambda x: step(x, TARGET), logits)
    want, slope = value_and_grad(lambda x: loss(x, TARGET), logits)
    torch.testing.assert_close(value, want, **TOLERANCE[torch.float32])
    torch.testing.assert_close(grad, slope, **TOLERANCE[torch.float32])


@both
def test_numbers_that_move_do_not_compile_again(backend: Any) -> None:
    """σ and q as Python numbers, too, become inputs of the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    x = draw(3, 4, dtype=torch.float32)

    @torch.compile(fullgraph=True, backend=counter)
    def step(sigma: float, power: float) -> torch.Tensor:
        return exact_loss(x, TARGET, sigma, power=power, backend=backend)

    for k in range(12):
        sigma, power = 1.5 + k / 8, 0.2 + k / 16
        torch.testing.assert_close(
            step(sigma, power), exact_loss(x, TARGET, sigma, power=power, backend=backend), **TOLERANCE[torch.float32]
        )
    assert counter.frame_count <= 3


FORWARD: dict[str, Any] = {
    "kernel": lambda x: ExactLoss()(x, TARGET),
    "gumbel": lambda x: ExactLoss(noise="gumbel", normalize=False)(x, TARGET),
    "reference": lambda x: ExactLoss(backend="reference")(x, TARGET),
    "smoothing": lambda x: ExactLoss(label_smoothing=0.1)(x, TARGET),
    "argmax": lambda x: argmax_probabilities(x).square().sum(),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_inside_a_graph_is_refused(name: str) -> None:
    """An operator has no forward-mode rule, and torch would take its tangent for 0."""
    x = draw(3, 4, dtype=torch.float32)
    step = torch.compile(lambda v: torch.func.jvp(FORWARD[name], (x,), (v,))[1], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"forward-mode AD .* has no rule inside torch.compile"):
        step(x)


@pytest.mark.parametrize("place", ["compile", "vmap"])
def test_smoothing_refuses_a_target_out_of_range_everywhere(place: str) -> None:
    x, wrong = draw(3, 4, dtype=torch.float32), torch.tensor([0, 77, 1])
    loss = ExactLoss(label_smoothing=0.1, normalize=False)
    call = torch.func.vmap(loss) if place == "vmap" else torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        call(x, wrong)
