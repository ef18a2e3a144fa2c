"""The watch over σ: it disturbs no call, says nothing of good trainings, and finds the ones that stand still."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from loops import Run, X, Y, bits, network
from sklearn.datasets import load_digits
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from expacc import ExactLoss, attach, collapse
from expacc.collapse import CollapseWatch, look

LOGITS = 2.0 * torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
TARGET = torch.arange(8) % 4


def attached(total_steps: int = 20, sigma: tuple[float, float] | None = None, **options: Any) -> ExactLoss:
    loss = ExactLoss(**options)
    attach(torch.optim.SGD(network().parameters(), lr=0.1), loss, total_steps, sigma=sigma)
    return loss


def said(make: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(each.message) for each in caught]


def slope(loss: Any, **options: Any) -> torch.Tensor:
    x = LOGITS.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(x, TARGET, **options), x)
    return found


def with_tangent(loss: Any) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(LOGITS, torch.ones(8, 4)), TARGET)).tangent


def inferred(loss: Any) -> torch.Tensor:
    with torch.inference_mode():
        return loss(LOGITS, TARGET) + 0


def checkpointed(loss: Any, reentrant: bool) -> torch.Tensor:
    x = LOGITS.clone().requires_grad_()
    # Work behind the loss, too: what a checkpoint saves is told apart by its order.
    checkpoint(lambda x, y: loss(2.0 * x, y) * x.sin().sum(), x, TARGET, use_reentrant=reentrant).backward()
    return x.grad


def each_by_itself(loss: Any) -> torch.Tensor:
    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(x.unsqueeze(0), y.unsqueeze(0))

    return torch.func.vmap(torch.func.grad(one))(LOGITS, TARGET)


CALLS = {
    "plain": slope,
    "keyword-target": lambda loss: slope(lambda x, y: loss(x, target=y)),
    "keywords": lambda loss: slope(lambda x, y: loss(target=y, logits=x)),
    "keyword-sigma": lambda loss: slope(loss, sigma=torch.full((8,), 0.5)),
    "number-sigma": lambda loss: slope(loss, sigma=0.5),
    "inference-mode": inferred,
    "no-grad": torch.no_grad()(lambda loss: loss(LOGITS, TARGET)),
    "func-grad": lambda loss: torch.func.grad(lambda x: loss(x, TARGET))(LOGITS),
    "vmap-grad": each_by_itself,
    "jvp": lambda loss: torch.func.jvp(lambda x: loss(x, TARGET), (LOGITS,), (torch.ones(8, 4),))[1],
    "jacfwd": lambda loss: torch.func.jacfwd(lambda x: loss(x, TARGET))(LOGITS),
    "dual": with_tangent,
    "make-fx": lambda loss: make_fx(lambda x: slope(loss) + x)(LOGITS)(LOGITS),
    "checkpoint": lambda loss: checkpointed(loss, False),
    "checkpoint-reentrant": lambda loss: checkpointed(loss, True),
    "unbatched": lambda loss: slope(lambda x, y: loss(x[0], y[0])),
    "images": lambda loss: slope(lambda x, y: loss(x.view(2, 4, 4).movedim(-1, 1), y.view(2, 4))),
    "probabilities": lambda loss: slope(lambda x, y: loss(x, nn.functional.one_hot(y, 4).float())),
    "int32": lambda loss: slope(lambda x, y: loss(x, y.int())),
    "one-class": lambda loss: slope(lambda x, y: loss(x[:, :1], 0 * y)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "raw"])
def test_every_call_works_as_before(name, normalize):
    want = CALLS[name](ExactLoss(normalize=normalize))
    loss = attached(normalize=normalize)
    for _ in range(3):
        assert torch.equal(CALLS[name](loss), want)


def test_a_trace_does_not_hold_the_look():
    x = LOGITS.clone().requires_grad_()
    sizes = [len(make_fx(loss)(x, TARGET).graph.nodes) for loss in (ExactLoss(), attached())]
    assert sizes[0] == sizes[1]


def test_a_look_that_fails_is_nobodys_business(monkeypatch):
    monkeypatch.setattr(collapse, "look", lambda *args, **kwargs: 1 / 0)
    run = Run("sgd", 20)
    assert said(lambda: run.go(0, 20)) == []
    assert run.attachment.steps == 20


def test_the_training_is_the_same_bit_for_bit():
    ends = []
    for watched in (True, False):
        run = Run("sgd", 20)
        if not watched:
            run.loss._forward_hooks.clear()
        run.go(0, 20)
        ends.append(bits(run.model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("make", ["copy", "pickle", "save"])
def test_a_copy_of_the_loss_is_not_watched(make, monkeypatch):
    loss = attached()
    if make == "copy":
        twin = copy.deepcopy(loss)
    elif make == "pickle":
        twin = pickle.loads(pickle.dumps(loss))
    else:
        file = io.BytesIO()
        torch.save(loss, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    seen = []
    monkeypatch.setattr(collapse, "look", lambda *args, **kwargs: seen.append(1))
    assert torch.equal(slope(twin), slope(ExactLoss()))
    assert not any(isinstance(hook, CollapseWatch) for hook in twin._forward_hooks.values())
    assert seen == []


# When it looks.


@pytest.mark.parametrize(
    ("total_steps", "steps"),
    [
        (10**6, [0, 1, 2, 4, 8, 16, 32, 64]),
        (1000, [0, 1, 2, 4, 8, 16, 20, 40, 60]),
        (200, [0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68]),
        (20, list(range(20))),
    ],
    ids=["million", "1000", "200", "20"],
)
def test_it_looks_after_these_steps(total_steps, steps, monkeypatch):
    """Optimizer steps, whatever is evaluated between them: accumulated batches, validation."""
    run, seen = Run("sgd", total_steps, sigma=None), []
    monkeypatch.setattr(collapse, "look", lambda *args: seen.append(run.attachment.steps) or torch.zeros(5))
    for _ in range(min(70, total_steps)):
        with torch.no_grad():
            run.loss(run.model(X), Y)
        run.loss.eval()
        run.loss(run.model(X), Y)
        run.loss.train()
        for _ in range(3):
            run.loss(run.model(X), Y).backward()
        run.optimizer.step()
    assert seen == steps


def test_what_is_not_here_yet_is_not_waited_for(monkeypatch):
    """As on a GPU, where numbers are on their way: no second look meanwhile, and what arrives is reported."""
    looks, here = [], [False]
    monkeypatch.setattr(collapse._Copy, "is_here", lambda self: here[0])
    found = collapse.look
    monkeypatch.setattr(collapse, "look", lambda *args: looks.append(1) or found(*args))
    run = Run(lambda p: torch.optim.SGD(p, lr=0.0), 50, sigma=(1e-4, 1e-4))
    assert said(lambda: [run.step(X, Y) for _ in range(10)]) == []
    assert len(looks) == 1
    here[0] = True
    assert len(said(lambda: [run.step(X, Y) for _ in range(10)])) == 1


def test_the_last_look_is_reported_with_the_last_step():
    run = Run(lambda p: torch.optim.SGD(p, lr=0.0), 50, sigma=None)
    assert said(lambda: [run.step(X, Y) for _ in range(48)]) == []
    run.loss.sigma = 1e-4
    assert said(lambda: run.step(X, Y)) == []
    (warning,) = said(lambda: run.step(X, Y))
    assert "has collapsed: after optimizer step 49," in warning


# What it finds.


def test_a_samples_gradient_is_its_own():
    """5 of 1000 are open: not through mean and deviation, by which every sample has some of theirs."""
    target = torch.arange(1000) % 10
    x = 0.1 * torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    x[torch.arange(1000), target] += 5.0
    for k in range(5):
        x[k, (target[k] + 1) % 10] = x[k, target[k]] - 0.01
    for normalize in (True, False):
        valid, dead, unsatisfied, *_ = look(ExactLoss(power=1, sigma=0.01, normalize=normalize), x, target).tolist()
        assert (valid, dead, unsatisfied) == (1000, 995, 0)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "raw"])
def test_masked_classes_and_ignored_rows(normalize):
    """A score of -inf is no NaN, a row that is ignored counts nothing."""
    x = LOGITS.clone()
    x[:, 3] = -torch.inf
    target = TARGET % 3
    target[0] = -100
    x[0] = torch.nan
    valid, dead, unsatisfied, sigma, lead = look(ExactLoss(sigma=1e-4, normalize=normalize), x, target).tolist()
    wrong = (x[1:].argmax(1) != target[1:]).sum().item()
    assert (valid, dead, unsatisfied) == (7, 7, wrong)
    assert sigma == pytest.approx(7e-4)
    assert 0 < lead < 100


@pytest.mark.parametrize(
    "options",
    [{}, {"margin": 0.3}, {"noise": "gumbel"}, {"power": 0.0}, {"ignore_index": 2}],
    ids=["plain", "margin", "gumbel", "log", "ignored"],
)
def test_the_numbers_of_a_batch(options):
    """By hand: σ far below every gap leaves no gradient, σ far above leaves one to every sample."""
    loss = ExactLoss(**({"power": 1.0} | options), normalize=False)
    keep = ~torch.isin(TARGET, torch.tensor(options.get("ignore_index", -100)))
    own = LOGITS.gather(1, TARGET.unsqueeze(1)).squeeze(1)
    lead = own - LOGITS.scatter(1, TARGET.unsqueeze(1), -torch.inf).amax(1)
    open_ = (keep & (lead < options.get("margin", 0.0))).sum().item()
    for sigma, dead in ((1e-4, keep.sum().item()), (10.0, 0)):
        if sigma < 1 and options.get("power") == 0.0:
            continue  # -log P never lets go of a sample
        loss.sigma = sigma
        # What has met the margin has no gradient at any σ.
        met = (keep & (lead >= 0.3)).sum().item() if "margin" in options and sigma > 1 else 0
        found = look(loss, LOGITS, TARGET).tolist()
        assert found[0] == keep.sum().item()
        assert found[1] == dead + met
        assert found[2] == open_
        assert found[3] == pytest.approx(sigma * found[0])
        assert found[4] == pytest.approx(lead[keep].abs().sum().item())


def test_the_calls_own_sigma_is_the_one():
    loss = ExactLoss(power=1, normalize=False)
    small = torch.where(torch.arange(8) < 3, 1e-4, 1.0)
    assert look(loss, LOGITS, TARGET)[1] == 0
    assert look(loss, LOGITS, TARGET, torch.tensor(1e-4))[1] == 8
    assert look(loss, LOGITS, TARGET, small)[1] == 3
    assert look(loss, LOGITS, TARGET, small.requires_grad_())[3] == pytest.approx(5.0003)


def test_probabilities():
    """The likeliest class is the target; a row without any counts nothing."""
    soft = nn.functional.one_hot(LOGITS.argmax(1), 4).float() * 0.9 + 0.025
    soft[0] = 0.0
    valid, _, unsatisfied, *_ = look(ExactLoss(), LOGITS, soft).tolist()
    assert (valid, unsatisfied) == (7, 0)


# What it says.


class Feed:
    """Show the watch numbers, a look a step."""

    def __init__(self, **options: Any) -> None:
        self.loss = ExactLoss(**options)
        self.watch = CollapseWatch(self.loss, 50)
        self.step = 0

    def __call__(self, valid: float, dead: float, unsatisfied: float) -> list[str]:
        numbers = torch.tensor([valid, dead, unsatisfied, valid * 0.25, valid * 5.0])
        seen = collapse._Look(collapse._Copy(numbers), self.step, self.loss.margin, self.loss.normalize)
        self.watch._pending, self.step = seen, self.step + 1
        return said(lambda: self.watch.after_step(self.step))


@pytest.mark.parametrize(
    ("looks", "warns"),
    [
        ([(64, 64, 32), (64, 64, 32)], True),
        ([(64, 64, 32), (64, 60, 32), (64, 64, 32)], False),
        ([(64, 64, 32), (0, 0, 0), (64, 64, 32)], True),
        ([(64, 64, 3), (64, 64, 3), (64, 64, 3)], False),
        ([(100, 98, 50)] * 3, False),
        ([(100, 99, 5)] * 2, True),
        ([(16, 16, 8)] * 6, False),
        ([(16, 16, 8)] * 7, True),
        ([(1000, 1000, 500)], False),
    ],
    ids=["two", "interrupted", "empty-between", "satisfied", "98-percent", "99-percent", "few", "enough", "once"],
)
def test_it_takes_two_looks_in_a_row(looks, warns):
    feed = Feed()
    warnings_ = [feed(*each) for each in looks]
    assert [bool(each) for each in warnings_] == [False] * (len(looks) - 1) + [warns]


MESSAGES = {
    "normalized": (
        "sigma = 0.25 has collapsed: after optimizer step 1, 99.0% of a batch's samples had no gradient (below 1e-07), "
        "while 40.0% are not classified correctly: nothing more is learned from here on. A target is 20 sigma from its "
        "best competitor on average. Let sigma end higher, attach(…, sigma=(first, last)) with a last of the order of "
        "5, or let it fall more slowly."
    ),
    "margin": "(below 1e-07), while 40.0% lead by less than the margin 0.5: nothing more is learned from here on.",
    "raw": (
        "the scores have outgrown sigma = 0.25: after optimizer step 1, 99.0% of a batch's samples had no gradient "
        "(below 1e-07), while 40.0% are not classified correctly: nothing more is learned from here on. A target is 20 "
        "sigma from its best competitor on average. They are not normalised: write ExactLoss(normalize=True), or a "
        "smaller learning rate, or a sigma of the order of 5."
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message(name):
    feed = Feed(normalize=name != "raw", margin=0.5 if name == "margin" else None)
    assert feed(100, 99, 40) == []
    (warning,) = feed(100, 99, 40)
    assert MESSAGES[name] in warning
    assert feed(100, 99, 40) == []  # once


def test_it_is_said_at_the_callers_line():
    run = Run("sgd", 20, sigma=(1e-4, 1e-4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run.loss(run.model(X), Y).backward()
            run.optimizer.step()
    (warning,) = caught
    assert warning.filename == __file__


# Trainings.


def train(loss: ExactLoss, sigma: tuple[float, float] | None, epochs: int = 10, **options: Any) -> tuple[float, Any]:
    """Train 64-128-10 on scikit-learn's digits; return the share that it learned and what was said."""
    features, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    features = features.float() / 16
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [part for _ in range(epochs) for part in torch.randperm(1400, generator=generator).split(64)]
    attach(optimizer, loss, len(batches), sigma=sigma, **options)

    def go() -> None:
        for part in batches:
            optimizer.zero_grad()
            loss(model(features[part]), labels[part]).backward()
            optimizer.step()

    words = said(go)
    return (model(features).argmax(1) == labels).double().mean().item(), words


@pytest.mark.parametrize(
    ("loss", "sigma", "options"),
    [
        (ExactLoss(), None, {"normalize_gradient": False}),
        (ExactLoss(power=1, margin=0.5), (10, 1), {"epochs": 20}),
        (ExactLoss(power=1, margin=0.5), (3, 0.1), {"epochs": 20}),
        (ExactLoss(normalize=False), None, {}),
    ],
    ids=["default", "paper", "low-sigma", "raw"],
)
def test_a_good_training_is_left_in_peace(loss, sigma, options):
    """Also where every sample of a batch has met the margin and none has a gradient."""
    learned, words = train(loss, sigma, **options)
    assert learned > 0.9
    assert words == []


@pytest.mark.parametrize(
    ("loss", "sigma", "words"),
    [
        (ExactLoss(power=1, normalize=False), (0.01, 0.01), "the scores have outgrown sigma = 0.01: after optimizer"),
        (ExactLoss(power=1), (0.01, 0.01), "sigma = 0.01 has collapsed: after optimizer step"),
        (ExactLoss(power=1, margin=0.5), (1e-3, 1e-3), "sigma = 0.001 has collapsed: after optimizer step"),
        (ExactLoss(power=1, noise="gumbel"), (1e-3, 1e-3), "sigma = 0.001 has collapsed: after optimizer step"),
    ],
    ids=["raw", "normalized", "margin", "gumbel"],
)
def test_a_training_that_stands_still_is_named(loss, sigma, words):
    learned, said_ = train(loss, sigma, normalize_gradient=False)
    assert learned < 0.5
    (warning,) = said_
    assert words in warning


@pytest.mark.parametrize("own", [None, torch.tensor(1e-4)], ids=["the-losss", "the-calls"])
def test_a_sigma_that_is_not_the_schedules_is_watched_too(own):
    run = Run(lambda p: torch.optim.SGD(p, lr=0.0), 10**6, sigma=None)
    run.loss.sigma = 1.0 if own is not None else 1e-4

    def go() -> None:
        for _ in range(3):
            run.loss(run.model(X), Y, own).backward()
            run.optimizer.step()

    (warning,) = said(go)
    assert warning.startswith("sigma = 0.0001 has collapsed: after optimizer step 1,")


@pytest.mark.parametrize(
    ("rows", "target"),
    [(X[:0], Y[:0]), (X, torch.full_like(Y, -100)), (X, torch.where(torch.arange(64) < 1, Y, -100))],
    ids=["empty", "all-ignored", "one-label"],
)
def test_rows_that_do_not_count_say_nothing(rows, target):
    run = Run("sgd", 20)
    assert said(lambda: [run.step(rows, target) for _ in range(20)]) == []
