"""The paper's method in PyTorch Lightning, on scikit-learn's digits: a callback, and the loop stays Lightning's.

    pip install '.[lightning]' scikit-learn -c constraints.txt
    python examples/lightning_callback.py

The default, ``ExactLoss()`` in the module, needs no callback.
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expacc import ExactLoss
from expacc.integrations.lightning import AttachExact


class Digits(pl.LightningModule):
    """A small network whose loss is a submodule: the callback finds it there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.loss_fn = ExactLoss(power=1, margin=2.0)  # <- in the place of nn.CrossEntropyLoss()

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        return self.loss_fn(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> float:
    """Train, and return the held-out accuracy."""
    pl.seed_everything(0)
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=64, shuffle=True)
    module = Digits()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=8, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[AttachExact(sigma=(3, 1))],  # <- and this
    )  # fmt: skip
    trainer.fit(module, loader)
    accuracy = (module.net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"sigma {float(module.loss_fn.sigma):.2f}, held-out accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
