"""The paper's method in an ordinary loop, on scikit-learn's digits, with a checkpoint it goes on from.

    python examples/plain_loop.py [checkpoint.pt]

The default, ``ExactLoss()`` alone, needs none of this: no schedule, no normaliser, no tuning. The lines marked are all
that the published recipe adds to a loop.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from expacc import ExactLoss, attach

EPOCHS, BATCH = 8, 64


def main(checkpoint: Path | None) -> float:
    """Train, and return the held-out accuracy."""
    torch.manual_seed(0)
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    train, test = slice(0, 1400), slice(1400, None)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = -(-1400 // BATCH)
    loss_fn = ExactLoss(power=1, margin=2.0)  # <- in the place of nn.CrossEntropyLoss()
    attachment = attach(optimizer, loss_fn, total_steps=steps * EPOCHS, sigma=(3, 1))  # <- one line more
    parts, first = (model, optimizer, loss_fn, attachment), 0
    if checkpoint and checkpoint.exists():
        first, *states = torch.load(checkpoint, weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    for epoch in range(first, EPOCHS):
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            optimizer.zero_grad()
            loss_fn(model(x[train][rows]), y[train][rows]).backward()
            optimizer.step()
        accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        print(f"epoch {epoch + 1}: sigma {float(loss_fn.sigma):.2f}, held-out accuracy {accuracy:.1%}")
        if checkpoint:
            fresh = checkpoint.with_suffix(".tmp")  # written whole, then renamed
            torch.save([epoch + 1, *(part.state_dict() for part in parts)], fresh)
            fresh.replace(checkpoint)
    return accuracy


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
