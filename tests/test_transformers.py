"""The Hugging Face Trainer's pair: it trains, goes on bit for bit, shares accumulated batches, refuses clipping."""

import json

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from expacc import Attachment, ExactLoss
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


def make(folder, callback, model=None, before=(), after=(), **options) -> Trainer:
    seen = [0]

    def better_and_better(_) -> dict[str, float]:
        seen[0] += 1
        return {"score": seen[0]}

    return Trainer(
        model=model or Classifier(), args=arguments(folder, **options), train_dataset=ROWS,  # type: ignore[arg-type]
        eval_dataset=ROWS, compute_loss_func=TrainerLoss(callback.loss),  # type: ignore[arg-type]
        callbacks=[*before, callback, *after], compute_metrics=better_and_better,
    )  # fmt: skip


def fit(folder, resume=None, stop=None, loss=None, **options) -> tuple[Classifier, ExactLoss, AttachExact]:
    loss = loss or ExactLoss(power=1, margin=0.5)
    model, callback = Classifier(), AttachExact(loss)
    trainer = make(folder, callback, model, **options)
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


class Save(TrainerCallback):
    """Ask for a checkpoint after steps 3 and 7, at one of the Trainer's events."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.save)

    def save(self, args, state, control, **_) -> None:
        control.should_save = control.should_save or state.global_step in (3, 7)


EVALUATE = {"eval_strategy": "steps", "eval_steps": 1}
SAVES = {
    "steps": ({"save_strategy": "steps", "save_steps": 5}, [5, 10, 12]),
    "epoch": ({"save_strategy": "epoch"}, [3, 6, 9, 12]),
    "best": ({"save_strategy": "best", "metric_for_best_model": "score", **EVALUATE, "eval_steps": 3}, [3, 6, 9, 12]),
    "best-at-end": ({"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True,
                     "metric_for_best_model": "score", **EVALUATE, "eval_steps": 3}, [3, 6, 9, 12]),
    "callback-before": ({"before": [Save("on_step_end")]}, [3, 7]),
    "callback-after": ({"after": [Save("on_step_end")]}, [3, 7]),
    "evaluation": ({"before": [Save("on_evaluate")], **EVALUATE}, [3, 7]),
    "log": ({"before": [Save("on_log")], "logging_steps": 1}, [3, 7]),
    "no": ({}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVES)
def test_every_checkpoint_has_the_state_and_only_a_checkpoint_asks_for_it(name, tmp_path, monkeypatch):
    asked = []
    state_dict = Attachment.state_dict
    monkeypatch.setattr(Attachment, "state_dict", lambda self: asked.append(1) or state_dict(self))
    options, steps = SAVES[name]
    fit(tmp_path, **options)
    states = {state["global_step"]: state["stateful_callbacks"] for state in read_states(tmp_path)}
    assert sorted(states) == steps
    assert [states[step]["expacc.AttachExact"]["attributes"]["steps"] for step in steps] == steps
    assert len(asked) == len(steps)  # on a GPU it waits for the device


def read_states(folder) -> list[dict]:
    return [json.loads(path.read_text()) for path in folder.glob("checkpoint-*/trainer_state.json")]


@pytest.mark.parametrize("restore", [False, True], ids=["plain", "restore-callbacks"])
def test_goes_on_bit_for_bit_from_the_best_checkpoint(restore, tmp_path):
    whole = fit(tmp_path, **SAVES["best"][0])
    resumed = fit(
        tmp_path / "again",
        resume=str(tmp_path / "checkpoint-6"),
        restore_callback_states_from_checkpoint=restore,
        **SAVES["best"][0],
    )
    assert torch.equal(bits(whole[0]), bits(resumed[0]))
    assert float(resumed[1].sigma) == 1.0


def test_from_a_checkpoint_without_the_state_sigma_goes_on_at_the_trainers_step(tmp_path):
    loss = ExactLoss(power=1, margin=0.5)
    Trainer(
        model=Classifier(), args=arguments(tmp_path, save_strategy="epoch"), train_dataset=ROWS,  # type: ignore[arg-type]
        compute_loss_func=TrainerLoss(loss),
    ).train()  # fmt: skip
    seen: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            seen.append(float(callback.loss.sigma))

    callback = AttachExact(ExactLoss(power=1, margin=0.5))
    trainer = make(tmp_path / "again", callback, after=[Watch()], save_strategy="epoch")
    with pytest.warns(
        UserWarning, match=r"after step 6 of 12 without a state .*: sigma goes on at 3\.16228 \(10 → 1\)"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert seen == pytest.approx([10 ** (1 - k / 12) for k in range(6, 12)])
    assert float(callback.loss.sigma) == 1.0
    steps = [
        s["stateful_callbacks"]["expacc.AttachExact"]["attributes"]["steps"] for s in read_states(tmp_path / "again")
    ]
    assert sorted(steps) == [9, 12]


def test_a_longer_training_goes_on(tmp_path):
    fit(tmp_path, num_train_epochs=2, save_strategy="epoch")
    _, loss, callback = fit(tmp_path / "again", resume=str(tmp_path / "checkpoint-6"), num_train_epochs=6)
    assert callback.attachment is not None
    assert callback.attachment.schedules["sigma"].last_epoch == 18
    assert float(loss.sigma) == 1.0


class Interrupt(TrainerCallback):
    """Raise in the fifth step, once."""

    def __init__(self, error: BaseException) -> None:
        self.errors = [error]

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5 and self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize("resume", [False, True], ids=["anew", "from-a-checkpoint"])
def test_after_an_interrupt_it_trains_again(resume, tmp_path):
    callback = AttachExact(ExactLoss(power=1, margin=0.5))
    trainer = make(
        tmp_path, callback, after=[Interrupt(KeyboardInterrupt())], save_strategy="epoch",
        restore_callback_states_from_checkpoint=False,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=resume)
    assert callback.attachment is not None
    assert callback.attachment.schedules["sigma"].last_epoch == 12
    assert float(callback.loss.sigma) == 1.0
    assert not callback.loss._forward_hooks
    if resume:
        assert torch.equal(bits(trainer.model), bits(fit(tmp_path / "whole")[0]))  # type: ignore[arg-type]


def test_a_batch_that_is_too_large_is_tried_again_smaller(tmp_path):
    callback = AttachExact(ExactLoss(power=1, margin=0.5))
    error = RuntimeError("CUDA out of memory. Tried to allocate")
    make(tmp_path, callback, after=[Interrupt(error)], auto_find_batch_size=True).train()
    assert callback.attachment is not None
    assert callback.attachment.schedules["sigma"].last_epoch == callback.attachment.total_steps > 12
    assert float(callback.loss.sigma) == 1.0


def test_accumulated_batches_are_one_batch(tmp_path):
    """Without normalised logits, which see one batch at a time, four batches of 4 are one of 16."""
    ends = []
    for size, steps in ((16, 1), (4, 4)):
        loss = ExactLoss(normalize=False)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        ends.append(bits(fit(tmp_path / str(size), loss=loss, **options)[0]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_clipping_is_refused(tmp_path):
    loss = ExactLoss(power=1, margin=0.5)
    with pytest.raises(ValueError, match=r"max_grad_norm=1\) clips .*: write max_grad_norm=0.0"):
        fit(tmp_path, loss=loss, max_grad_norm=1.0)
    assert not loss._forward_hooks


def test_labels_of_tokens():
    loss = TrainerLoss(ExactLoss(normalize=False))
    logits, labels = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10).view(2, 5) % 3
    labels[0, 0] = -100
    want = ExactLoss(normalize=False)(logits.view(10, 3), labels.view(10))
    torch.testing.assert_close(loss({"logits": logits}, labels), want)
    torch.testing.assert_close(loss((logits,), labels, num_items_in_batch=18), want / 2)


def test_a_smoothing_that_the_trainer_would_leave_out_is_refused(tmp_path):
    callback = AttachExact(ExactLoss(power=1))
    with pytest.raises(
        ValueError, match=r"label_smoothing_factor=0.1\) has no effect .*ExactLoss\(label_smoothing=0.1\)"
    ):
        callback.on_train_begin(arguments(tmp_path, label_smoothing_factor=0.1), TrainerState(), TrainerControl())


@pytest.mark.parametrize("steps", [1, 2], ids=["whole", "accumulated"])
def test_shifted_it_is_a_causal_language_models_own_loss(steps, tmp_path):
    """The loss that is cross-entropy (Gumbel noise, q = 0) trains GPT-2 as its own does, ignored labels included."""
    ids = torch.randint(0, 11, (16, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[::3, 4:] = -100
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    ends = []
    for loss in (None, TrainerLoss(ExactLoss(noise="gumbel", power=0, normalize=False), shift=True)):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        model = GPT2LMHeadModel(config)
        options = {"max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": steps}
        args = arguments(tmp_path, **options)
        Trainer(model=model, args=args, train_dataset=rows, compute_loss_func=loss).train()  # type: ignore[arg-type]
        ends.append(bits(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "sum"}, "TrainerLoss needs reduction='mean', got 'sum'"),
        (
            {"ignore_index": 0},
            "TrainerLoss needs ignore_index=-100, got 0: the Trainer divides by the number of labels",
        ),
    ],
    ids=["reduction", "ignore_index"],
)
def test_what_the_trainer_would_scale_wrongly_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainerLoss(ExactLoss(**options))
