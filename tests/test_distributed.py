"""attach under DDP and FSDP2: several processes with a shard each train as one process with the joined batch."""

from pathlib import Path

import pytest
import torch
from plain import draw, draw_target
from ranks import leave
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from expacc import ExactLoss, attach

C, FEATURES, ROWS, STEPS = 4, 6, 24, 15
WEIGHT = torch.tensor([1.0, 3.0, 0.5, 2.0])


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, C))
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(draw(*p.shape, dtype=torch.float32, seed=k) / 2)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return rows with ignored targets among them, unevenly: rank 0 has more."""
    target = draw_target(ROWS, classes=C)
    target[: 1 + step % 3] = -100
    return draw(ROWS, FEATURES, dtype=torch.float32, seed=100 + step), target


def train(model: nn.Module, shard: slice, group) -> tuple[list[Tensor], float, float]:
    """Return the parameters after all steps, the last σ and the normaliser's mean."""
    loss = ExactLoss(weight=WEIGHT, margin=0.5, power=1, data_group=group, backend="reference")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    attachment = attach(optimizer, loss, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        features, target = batch(step)
        loss(model(features[shard]), target[shard]).backward()
        optimizer.step()
    assert attachment.normalizer is not None
    assert attachment.normalizer.mean is not None
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]  # type: ignore[operator]
    return [p.detach() for p in full], float(loss.sigma), attachment.normalizer.mean


def work(rank: int, ranks: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    model = network()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    size = ROWS // ranks
    result = train(model, slice(rank * size, (rank + 1) * size), "world" if kind == "ddp" else distributed.group.WORLD)
    torch.save(result, f"{folder}/{rank}.pt")
    leave()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one(kind: str, ranks: int, tmp_path: Path) -> None:
    multiprocessing.spawn(work, (ranks, kind, str(tmp_path)), nprocs=ranks)
    want = train(network(), slice(None), None)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    for parameters, sigma, mean in parts:
        torch.testing.assert_close(parameters, want[0], rtol=1e-4, atol=1e-5)
        assert sigma == want[1] == 1.0
        assert mean == pytest.approx(want[2], rel=1e-4)
    assert len({mean for *_, mean in parts}) == 1  # every rank divides by the same number
