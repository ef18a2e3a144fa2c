"""The paper's method in the Hugging Face Trainer, on scikit-learn's digits: a loss function and a callback.

    pip install '.[transformers]' scikit-learn -c constraints.txt
    python examples/huggingface_trainer.py

The default is ``compute_loss_func=TrainerLoss(ExactLoss())`` alone: no callback, and clipping may stay on.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments

from expacc import ExactLoss
from expacc.integrations.transformers import AttachExact, TrainerLoss


class Digits(nn.Module):
    """A small network with a Hugging Face model's manners."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x, labels=None):
        """Return the logits under the name that the Trainer looks for."""
        return {"logits": self.net(x)}


def main() -> float:
    """Train, and return the held-out accuracy."""
    torch.manual_seed(0)
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    rows = [{"x": a, "labels": b} for a, b in zip(x[:1400], y[:1400], strict=True)]
    loss, model = ExactLoss(power=1, margin=2.0), Digits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=8, per_device_train_batch_size=64, learning_rate=3e-3, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
            max_grad_norm=0.0,  # <- its default of 1 clips what the callback normalises
        )  # fmt: skip
        Trainer(
            model=model, args=arguments, train_dataset=rows,
            compute_loss_func=TrainerLoss(loss), callbacks=[AttachExact(loss, sigma=(3, 1))],  # <- these two
        ).train()  # fmt: skip
    accuracy = (model.net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"sigma {float(loss.sigma):.2f}, held-out accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
