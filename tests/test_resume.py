"""A training that stops and goes on: the same bits under the same settings, the new plan and a word under others."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from loops import OPTIMIZERS, Run, batch

from expacc import ExactLoss, attach

HERE = Path(__file__).parent


def said(make) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stop", [1, 7, 19])
def test_goes_on_bit_for_bit_from_a_checkpoint(name, stop, tmp_path):
    whole, first, second = Run(name, 20), Run(name, 20), Run(name, 20, seed=2)
    whole.go(0, 20)
    first.go(0, stop)
    first.save(tmp_path / "checkpoint.pt")
    assert said(lambda: second.load(tmp_path / "checkpoint.pt")) == []
    second.go(stop, 20)
    assert second.end == whole.end


def test_goes_on_bit_for_bit_in_another_process(tmp_path):
    whole, first = Run("adam", 20), Run("adam", 20)
    whole.go(0, 20)
    first.go(0, 7)
    first.save(tmp_path / "checkpoint.pt")
    code = (
        "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); from loops import Run; "
        "run = Run('adam', 20, seed=2); run.load(Path(sys.argv[1])); run.go(7, 20); print(json.dumps(run.end))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoint.pt"), str(HERE)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(whole.end))


def test_the_state_survives_json():
    """As the Hugging Face Trainer keeps it."""
    run, again = Run("sgd", 20), Run("sgd", 20, seed=2)
    run.go(0, 3)
    state = run.attachment.state_dict()
    again.attachment.load_state_dict(json.loads(json.dumps(state)))
    assert again.attachment.state_dict() == state
    assert again.loss.sigma == run.loss.sigma


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_bit_for_bit_under_a_scaler(name, tmp_path):
    """With a step that overflows and is skipped on the way; of a fused optimizer's only the device knows: it counts."""
    ends, steps = [], 12 if "fused" in name else 11
    for stops in (False, True):
        run, scaler = Run(name, steps), torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(12):
            if stops and step == 7:
                run.save(tmp_path / "checkpoint.pt")
                state = scaler.state_dict()
                run, scaler = Run(name, steps, seed=2), torch.amp.GradScaler("cpu")
                run.load(tmp_path / "checkpoint.pt")
                scaler.load_state_dict(state)
            run.optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale(run.loss(run.model(x), y) * (float("inf") if step == 4 else 1.0)).backward()
            scaler.step(run.optimizer)
            scaler.update()
        ends.append((run.end, scaler.get_scale()))
    assert ends[0] == ends[1]
    assert float(run.loss.sigma) == 1.0


@pytest.mark.parametrize(
    ("saved", "now", "message", "sigmas"),
    [
        (
            {"total_steps": 10}, {"total_steps": 20},
            "sigma was saved at step 5 of 10 (exponential 10 → 1); it goes on as step 5 of 20 (exponential 10 → 1), ",
            [10 * 0.1**0.25, 10 * 0.1**0.3],
        ),
        (
            {"total_steps": 10}, {"total_steps": 20, "schedule": "linear"},
            "of 20 (linear 10 → 1), sigma=7.75. To go on as before, attach with the saved settings.", [7.75, 7.3],
        ),
        (
            {"total_steps": 10}, {"total_steps": 10, "sigma": (4, 2), "schedule": "linear"},
            "of 10 (exponential 10 → 1); it goes on as step 5 of 10 (linear 4 → 2), sigma=3", [3.0, 2.8],
        ),
        (
            {"total_steps": 10}, {"total_steps": 3},
            "step 5 of 10 (exponential 10 → 1); it goes on as step 5 of 3 (exponential 10 → 1), sigma=1", [1.0, 1.0],
        ),
    ],
    ids=["longer", "another-curve", "other-ends", "shorter"],
)  # fmt: skip
def test_under_another_plan_the_new_one_holds_and_is_named(saved, now, message, sigmas):
    run, again = Run("sgd", **saved), Run("sgd", seed=2, **now)
    run.go(0, 5)
    (warning,) = said(lambda: again.attachment.load_state_dict(run.attachment.state_dict()))
    assert message in warning
    seen = [float(again.loss.sigma)]
    past = said(lambda: again.go(5, 6))
    seen.append(float(again.loss.sigma))
    assert seen == pytest.approx(sigmas, rel=1e-12)
    if now["total_steps"] == 3:
        (warning,) = past
        assert "has made step 6 and total_steps is 3: sigma stays 1 from here on" in warning
    else:
        assert past == []


def test_past_the_end_of_the_plan_in_force_it_warns_once():
    """Not at the saved plan's end, and with this one's numbers."""
    run = Run("sgd", 10, power=(0.5, 1.0), schedule="linear")
    again = Run("sgd", 20, power=(0.5, 0.2), schedule="linear")
    run.go(0, 8)
    assert len(said(lambda: again.attachment.load_state_dict(run.attachment.state_dict()))) == 2
    (warning,) = said(lambda: again.go(8, 25))
    assert warning.startswith(
        "the optimizer has made step 21 and total_steps is 20: sigma stays 1 and power stays 0.2 from here on. Write"
    )


def test_with_nothing_to_move_there_is_no_end():
    run = Run("sgd", 2, sigma=None)
    assert said(lambda: run.go(0, 5)) == []


def _attach(**options):
    return attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), ExactLoss(), 5, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"normalize_gradient": False}, ValueError, "saved with normalize_gradient=True: attach with the same"),
        ({"sigma": None}, KeyError, "state of schedules has 'sigma'; it needs nothing"),
        ({"power": (1, 0.5)}, KeyError, "state of schedules has 'sigma'; it needs 'sigma', 'power'"),
    ],
    ids=["normaliser", "fewer", "more"],
)
def test_a_state_of_other_parts_is_refused(options, error, message):
    state, other = _attach().state_dict(), _attach(**options)
    before = other.state_dict()
    with pytest.raises(error, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.clear(), "state of Attachment has nothing; it needs 'steps', 'schedules', 'normalizer'"),
        (lambda s: s["schedules"]["sigma"].pop("kind"), r"state of schedules\['sigma'\] has 'start', 'end', .* 'kind'"),
    ],
    ids=["empty", "kind"],
)
def test_a_damaged_state_is_refused(damage, message):
    attachment = _attach()
    state = attachment.state_dict()
    damage(state)
    with pytest.raises(KeyError, match=message):
        attachment.load_state_dict(state)
