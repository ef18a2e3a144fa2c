"""The Hugging Face Trainer's pair: it trains, goes on bit for bit, shares accumulated batches, refuses clipping."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from expacc import ExactLoss
from expacc.integrations.transformers import AttachExact, TrainerLoss

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48) % 4
ROWS = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries', about this machine and their own future


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, labels=None):
        return {"logits": self.net(x)}


def arguments(folder, **options) -> TrainingArguments:
    options = {"max_grad_norm": 0.0, "num_train_epochs": 4, "save_strategy": "no", "optim": "sgd"} | options
    options |= {"per_device_train_batch_size": options.get("per_device_train_batch_size", 16)}
    return TrainingArguments(
        output_dir=str(folder), learning_rate=0.2, use_cpu=True, report_to=[], disable_tqdm=True, seed=3, **options
    )


def fit(folder, resume=None, stop=None, loss=None, **options) -> tuple[Classifier, ExactLoss, AttachExact]:
    loss = loss or ExactLoss(power=1, margin=0.5)
    model, callback = Classifier(), AttachExact(loss)
    trainer = Trainer(
        model=model, args=arguments(folder, **options), train_dataset=ROWS,  # type: ignore[arg-type]
        compute_loss_func=TrainerLoss(loss), callbacks=[callback],
    )  # fmt: skip
    if stop is not None:
        callback.on_save = lambda args, state, control, **_: setattr(  # type: ignore[method-assign]
            control, "should_training_stop", state.global_step >= stop
        )
    trainer.train(resume_from_checkpoint=resume)
    return model, loss, callback


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_sigma_falls_to_its_end(tmp_path):
    model, loss, callback = fit(tmp_path)
    assert callback.attachment is not None
    assert callback.attachment.schedules["sigma"].last_epoch == callback.attachment.total_steps == 12
    assert float(loss.sigma) == 1.0
    assert not torch.equal(bits(model), bits(Classifier()))


@pytest.mark.parametrize("step", [2, 3, 8])
def test_goes_on_bit_for_bit_from_a_checkpoint(step, tmp_path):
    whole = fit(tmp_path / "whole")
    saving = {"save_strategy": "steps", "save_steps": step}
    fit(tmp_path / "parts", stop=step, **saving)
    resumed = fit(tmp_path / "parts", resume=str(tmp_path / "parts" / f"checkpoint-{step}"), **saving)
    assert torch.equal(bits(whole[0]), bits(resumed[0]))
    assert float(resumed[1].sigma) == 1.0
    assert whole[2].attachment is not None
    assert resumed[2].attachment is not None
    assert whole[2].attachment.state_dict() == resumed[2].attachment.state_dict()


def test_accumulated_batches_are_one_batch(tmp_path):
    """Without normalised logits, which see one batch at a time, four batches of 4 are one of 16."""
    ends = []
    for size, steps in ((16, 1), (4, 4)):
        loss = ExactLoss(normalize=False)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        ends.append(bits(fit(tmp_path / str(size), loss=loss, **options)[0]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_clipping_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max_grad_norm=1\) clips .*: write max_grad_norm=0.0"):
        fit(tmp_path, max_grad_norm=1.0)


def test_labels_of_tokens():
    loss = TrainerLoss(ExactLoss(normalize=False))
    logits, labels = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10).view(2, 5) % 3
    labels[0, 0] = -100
    want = ExactLoss(normalize=False)(logits.view(10, 3), labels.view(10))
    torch.testing.assert_close(loss({"logits": logits}, labels), want)
    torch.testing.assert_close(loss((logits,), labels, num_items_in_batch=18), want / 2)


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="TrainerLoss needs reduction='mean', got 'sum'"):
        TrainerLoss(ExactLoss(reduction="sum"))
