"""The Lightning callback in Lightning's own loop: the same bits as by hand, stop and resume, what cannot be meant."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
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


SAME = TensorDataset(X[:16].repeat(3, 1), Y[:16].repeat(3))  # three equal batches: Lightning starts an epoch over


def test_goes_on_bit_for_bit_from_within_an_epoch(tmp_path):
    every = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole, resumed = Classifier(), Classifier()
    trainer(tmp_path, callbacks=[AttachExact(), every]).fit(whole, DataLoader(SAME, batch_size=16))
    again = trainer(tmp_path, callbacks=[AttachExact()], enable_checkpointing=False)
    again.fit(resumed, DataLoader(SAME, batch_size=16), ckpt_path=tmp_path / "step=5.ckpt", weights_only=True)
    assert again.global_step == 12
    assert torch.equal(bits(whole), bits(resumed))
    assert float(resumed.losses[0].sigma) == 1.0


def save_after_two_epochs(folder, *callbacks) -> str:
    first = trainer(folder, callbacks=list(callbacks), max_epochs=2, enable_checkpointing=False)
    first.fit(Classifier(), loader())
    first.save_checkpoint(folder / "two.ckpt")
    return str(folder / "two.ckpt")


class Sigmas(pl.Callback):
    """Note the sigma of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(float(pl_module.losses[0].sigma))


def test_from_a_checkpoint_without_the_state_sigma_goes_on_at_the_trainers_step(tmp_path):
    path = save_after_two_epochs(tmp_path)
    module, sigmas = Classifier(), Sigmas()
    again = trainer(tmp_path, callbacks=[AttachExact(), sigmas], enable_checkpointing=False)
    with pytest.warns(
        UserWarning, match=r"after step 6 of 12 without a state .*: sigma goes on at 3\.16228 \(10 → 1\)"
    ):
        again.fit(module, loader(), ckpt_path=path, weights_only=True)
    assert sigmas.seen == pytest.approx([10 ** (1 - k / 12) for k in range(6, 12)])
    assert float(module.losses[0].sigma) == 1.0


def test_a_longer_training_goes_on(tmp_path):
    path = save_after_two_epochs(tmp_path, AttachExact())
    module, callback = Classifier(), AttachExact()
    again = trainer(tmp_path, callbacks=[callback], enable_checkpointing=False, max_epochs=6)
    again.fit(module, loader(), ckpt_path=path, weights_only=True)
    assert callback.attachment is not None
    assert callback.attachment.schedules["sigma"].last_epoch == 18
    assert float(module.losses[0].sigma) == 1.0


def test_a_second_fit_goes_on_and_reaches_the_end(tmp_path):
    module, callback = Classifier(), AttachExact()
    both = trainer(tmp_path, callbacks=[callback], enable_checkpointing=False)
    both.fit(module, loader())
    both.fit_loop.max_epochs = 8
    both.fit(module, loader())
    assert callback.attachment is not None
    assert callback.attachment.schedules["sigma"].last_epoch == both.global_step == 24
    assert float(module.losses[0].sigma) == 1.0


def test_another_trainer_begins_anew(tmp_path):
    module, callback, sigmas = Classifier(), AttachExact(), Sigmas()
    for _ in range(2):
        trainer(tmp_path, callbacks=[callback, sigmas], enable_checkpointing=False).fit(module, loader())
    assert sigmas.seen == pytest.approx(2 * [10 ** (1 - k / 12) for k in range(12)])


class Interrupted(Classifier):
    """Raise in the first batch of the third epoch, once."""

    errors = 0

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 6 and not self.errors:
            self.errors = 1
            raise RuntimeError("interrupted")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("same", [True, False], ids=["same-trainer", "new-trainer"])
def test_after_an_interrupt_it_fits_again(same, tmp_path):
    """The same trainer goes on where it was, a new one begins anew."""
    module, callback, sigmas = Interrupted(), AttachExact(), Sigmas()
    first = trainer(tmp_path, callbacks=[callback, sigmas], enable_checkpointing=False)
    with pytest.raises(RuntimeError, match="interrupted"):
        first.fit(module, loader())
    assert not module.losses[0]._forward_hooks
    sigmas.seen.clear()
    again = first if same else trainer(tmp_path, callbacks=[callback, sigmas], enable_checkpointing=False)
    again.fit(module, loader())
    assert sigmas.seen == pytest.approx([10 ** (1 - k / 12) for k in range(6 if same else 0, 12)])
    assert float(module.losses[0].sigma) == 1.0


def test_a_checkpoint_of_a_fit_that_failed_is_not_taken_by_the_next(tmp_path):
    path = save_after_two_epochs(tmp_path, AttachExact())
    module, callback, sigmas = Classifier(), AttachExact(), Sigmas()
    with pytest.raises(ValueError, match="clips what AttachExact"):
        trainer(tmp_path, callbacks=[callback], enable_checkpointing=False, gradient_clip_val=1.0).fit(
            module, loader(), ckpt_path=path, weights_only=True
        )
    trainer(tmp_path, callbacks=[callback, sigmas], enable_checkpointing=False).fit(Classifier(), loader())
    assert sigmas.seen[0] == 10.0


def test_a_loss_by_name_leaves_the_others_alone(tmp_path):
    module, callback = Classifier(losses=2), AttachExact("losses.0")
    trainer(tmp_path, callbacks=[callback], enable_checkpointing=False).fit(module, loader())
    assert callback.attachment is not None
    assert callback.attachment.loss is module.losses[0]
    assert [float(loss.sigma) for loss in module.losses] == [1.0, 1.0]
    assert callback.attachment.schedules["sigma"].last_epoch == 12
    other = AttachExact("losses.1", sigma=(5, 2))
    trainer(tmp_path, callbacks=[other], enable_checkpointing=False).fit(module, loader())
    assert [float(loss.sigma) for loss in module.losses] == [1.0, 2.0]


def test_a_loss_that_is_no_name():
    with pytest.raises(
        TypeError, match=r"loss must be the name .*, got ExactLoss: write AttachExact\(loss='loss_fn'\)"
    ):
        AttachExact(ExactLoss())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (lambda: Classifier(), {"gradient_clip_val": 1.0}, r"gradient_clip_val=1.0\) clips what AttachExact"),
        (lambda: Classifier(losses=0), {}, "Classifier holds no loss of type ExactLoss: write self.loss_fn ="),
        (
            lambda: Classifier(losses=2), {},
            r"2 losses of type ExactLoss, losses.0, losses.1, and one is attached: .*AttachExact\(loss='losses.0'\)",
        ),
        (
            lambda: Classifier(losses=2), {"callbacks": [AttachExact("loss_fn")]},
            "Classifier has no loss_fn, .*; its losses of type ExactLoss: losses.0, losses.1",
        ),
        (lambda: Classifier(), {"max_epochs": -1}, "must know when training ends: write Trainer"),
    ],
    ids=["clipping", "no-loss", "losses", "name", "endless"],
)  # fmt: skip
def test_what_cannot_be_meant(module, options, message, tmp_path):
    options = {"callbacks": [AttachExact()], "enable_checkpointing": False} | options
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options).fit(module(), loader())


def test_clipping_without_the_normaliser_is_the_users_business(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [AttachExact(normalize_gradient=False)]
        trainer(tmp_path, callbacks=callbacks, enable_checkpointing=False, gradient_clip_val=1.0, max_epochs=1).fit(
            Classifier(), loader()
        )
