"""The Lightning callback in Lightning's own loop: the same bits as by hand, stop and resume, what cannot be meant."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expacc import ExactLoss, attach
from expacc.integrations.lightning import AttachExact

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48) % 4
# Lightning's and torch's own, about this small machine and their own future
pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(pl.LightningModule):
    def __init__(self, losses: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.losses = nn.ModuleList(ExactLoss(power=1, margin=0.5) for _ in range(losses))

    def training_step(self, batch, index):
        return self.losses[0](self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.2, momentum=0.9)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=16)


def trainer(folder, **options) -> pl.Trainer:
    options = {"max_epochs": 4, "enable_progress_bar": False, "enable_model_summary": False, "logger": False} | options
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **options)


def bits(module: Classifier) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.net.parameters()])


def test_equals_a_loop_by_hand(tmp_path):
    module, twin = Classifier(), Classifier()
    callback = AttachExact()
    trainer(tmp_path, callbacks=[callback], enable_checkpointing=False).fit(module, loader())
    optimizer = twin.configure_optimizers()
    attach(optimizer, twin.losses[0], total_steps=12)
    for _ in range(4):
        for batch in loader():
            optimizer.zero_grad()
            twin.training_step(batch, 0).backward()
            optimizer.step()
    assert torch.equal(bits(module), bits(twin))
    assert float(module.losses[0].sigma) == 1.0
    assert callback.attachment is not None


def test_accumulated_batches_are_one_step(tmp_path):
    module, callback = Classifier(), AttachExact()
    trainer(tmp_path, callbacks=[callback], enable_checkpointing=False, accumulate_grad_batches=3).fit(module, loader())
    assert callback.attachment is not None
    assert callback.attachment.total_steps == callback.attachment.schedules["sigma"].last_epoch == 4


@pytest.mark.parametrize("stop", [1, 3])
def test_goes_on_bit_for_bit_from_a_checkpoint(stop, tmp_path):
    whole = Classifier()
    trainer(tmp_path, callbacks=[AttachExact()], enable_checkpointing=False).fit(whole, loader())

    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == stop - 1:
                trainer.save_checkpoint(tmp_path / "stop.ckpt")
                trainer.should_stop = True

    trainer(tmp_path, callbacks=[AttachExact(), Stop()], enable_checkpointing=False).fit(Classifier(), loader())
    resumed = Classifier()
    again = trainer(tmp_path, callbacks=[AttachExact()], enable_checkpointing=False)
    again.fit(resumed, loader(), ckpt_path=tmp_path / "stop.ckpt", weights_only=True)
    assert torch.equal(bits(whole), bits(resumed))
    assert float(resumed.losses[0].sigma) == 1.0


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (lambda: Classifier(), {"gradient_clip_val": 1.0}, r"gradient_clip_val=1.0\) clips what AttachExact"),
        (lambda: Classifier(losses=2), {}, "Classifier holds 2 losses of type ExactLoss and one is needed: write"),
        (lambda: Classifier(), {"max_epochs": -1}, "must know when training ends: write Trainer"),
    ],
    ids=["clipping", "losses", "endless"],
)  # fmt: skip
def test_what_cannot_be_meant(module, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, callbacks=[AttachExact()], enable_checkpointing=False, **options).fit(module(), loader())


def test_clipping_without_the_normaliser_is_the_users_business(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [AttachExact(normalize_gradient=False)]
        trainer(tmp_path, callbacks=callbacks, enable_checkpointing=False, gradient_clip_val=1.0, max_epochs=1).fit(
            Classifier(), loader()
        )
