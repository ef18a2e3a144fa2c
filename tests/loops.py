"""A small training, its parts in one place: what a loop around `attach` does, step by step, saved and loaded."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from expacc import ExactLoss, attach

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 4
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def network(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(step * 16, step * 16 + 16) % len(X)
    return X[rows], Y[rows]


class Run:
    """Model, loss, optimizer and attachment. Another seed: what is not in the checkpoint shows."""

    def __init__(self, make: Any, total_steps: int, seed: int = 1, **options: Any) -> None:
        self.model = network(seed)
        self.loss = ExactLoss(power=1 if seed == 1 else 0.3, margin=0.5)
        self.optimizer = OPTIMIZERS.get(make, make)(self.model.parameters())
        self.attachment = attach(self.optimizer, self.loss, total_steps, **options)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.loss, self.optimizer, self.attachment

    def save(self, path: Path) -> None:
        torch.save([part.state_dict() for part in self.parts], path)

    def load(self, path: Path) -> None:
        for part, state in zip(self.parts, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step(*batch(step))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()

    @property
    def end(self) -> tuple[Any, ...]:
        """Plain values that two runs with the same end share."""
        return bits(self.model).tolist(), float(self.loss.sigma), float(self.loss.power), self.attachment.state_dict()
