"""data_group: two processes with a shard each are one process with the joined batch, by value and DDP's gradients."""

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plain import draw, draw_target
from ranks import leave
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from expacc import ExactLoss, exact_loss
from expacc.kernels.dispatch import watch_paths

C, FEATURES, ROWS, RANKS = 4, 3, 9, 2
WEIGHT = torch.tensor([1.0, 3.0, 0.5, 2.0])
# Where the second shard starts, and what the loss is given. ROWS: the second shard is empty.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (5, {}),
    "gumbel": (5, {"noise": "gumbel"}),
    "unequal": (2, {"power": 1}),
    "empty": (ROWS, {}),
    "empty-first": (0, {"weight": WEIGHT}),
    "weight": (4, {"weight": WEIGHT}),
    "ignored": (4, {"ignore_index": 1}),
    "ignored-weight-margin": (3, {"ignore_index": 2, "weight": WEIGHT, "margin": 0.5}),
    "one-shard-ignored": (4, {}),
    "all-ignored": (5, {}),
    "not-normalized": (2, {"normalize": False, "weight": WEIGHT}),
    "capped": (3, {"normalize": "cap", "sigma": 0.5}),
    "smoothing": (4, {"label_smoothing": 0.1, "weight": WEIGHT, "noise": "gumbel"}),
    "probabilities": (2, {"noise": "gumbel"}),
    "sum": (2, {"reduction": "sum"}),
    "world": (5, {"data_group": "world"}),
    "world-weight": (2, {"data_group": "world", "weight": WEIGHT}),
}


class Outcome(NamedTuple):
    value: float
    grad: list[Tensor]
    paths: list[str]


def batch(name: str) -> tuple[Tensor, Tensor]:
    features, target = draw(ROWS, FEATURES, dtype=torch.float32), draw_target(ROWS, classes=C)
    if name == "one-shard-ignored":
        target[:4] = -100
    if name == "all-ignored":
        target[:] = -100
    return features, torch.softmax(draw(ROWS, C, seed=3), 1).float() if name == "probabilities" else target


def model() -> nn.Module:
    linear = nn.Linear(FEATURES, C)
    with torch.no_grad():
        linear.weight.copy_(draw(C, FEATURES, dtype=torch.float32, seed=7))
        linear.bias.copy_(draw(C, dtype=torch.float32, seed=8))
    return linear


def evaluate(network: nn.Module, loss: ExactLoss, features: Tensor, target: Tensor) -> Outcome:
    with watch_paths() as paths:
        value = loss(network(features), target)
    value.backward()
    return Outcome(value.item(), [p.grad.clone() for p in network.parameters() if p.grad is not None], paths)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    early = {name: ExactLoss(**options) for name, (_, options) in CASES.items() if "data_group" in options}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    outcomes = {}
    for name, (cut, options) in CASES.items():
        shard = slice(None, cut) if rank == 0 else slice(cut, None)
        features, target = batch(name)
        loss = early[name] if name in early else ExactLoss(data_group=distributed.group.WORLD, **options)
        outcomes[name] = tuple(evaluate(DistributedDataParallel(model()), loss, features[shard], target[shard]))
    torch.save(outcomes, f"{folder}/{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    parts = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return [{name: Outcome(*outcome) for name, outcome in part.items()} for part in parts]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_the_joined_batch(ranks: list[dict[str, Outcome]], name: str) -> None:
    options = CASES[name][1] | {"backend": "reference", "data_group": None}
    want = evaluate(model(), ExactLoss(**options), *batch(name))
    got = [part[name] for part in ranks]
    assert [part.paths for part in got] == [["reference"]] * RANKS
    # A mean is averaged over the ranks, as DDP does with its gradients; a sum stays each rank's own.
    share = RANKS if name == "sum" else 1
    assert sum(part.value for part in got) / RANKS * share == pytest.approx(want.value, rel=1e-5, abs=1e-7)
    torch.testing.assert_close([g * share for g in got[0].grad], want.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[1].grad, got[0].grad, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["unequal", "weight"])
def test_without_the_group_it_would_be_another_number(name: str) -> None:
    cut, options = CASES[name]
    features, target = batch(name)
    want = evaluate(model(), ExactLoss(backend="reference", **options), features, target)
    shards = [evaluate(model(), ExactLoss(backend="reference", **options), features[s], target[s])
              for s in (slice(None, cut), slice(cut, None))]  # fmt: skip
    assert abs(sum(part.value for part in shards) / RANKS - want.value) > 1e-3


@pytest.mark.parametrize(
    "make", [ExactLoss, lambda **options: lambda *args: exact_loss(*args, **options)], ids=["module", "function"]
)
def test_the_world_that_is_not_there(make) -> None:
    loss = make(data_group="world")
    with pytest.raises(
        RuntimeError, match=r"data_group='world' needs .* call torch.distributed.init_process_group\(\)"
    ):
        loss(*batch("default"))


def test_a_group_by_another_name() -> None:
    with pytest.raises(ValueError, match="data_group must be a process group, 'world' or None, got 'all'"):
        ExactLoss(data_group="all")


def test_the_world_travels_and_is_shown() -> None:
    """A process group can be neither pickled nor copied; its name can."""
    loss = pickle.loads(pickle.dumps(ExactLoss(data_group="world")))
    assert "data_group='world'" in repr(loss)
