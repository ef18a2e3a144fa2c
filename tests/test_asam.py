"""attach on ASAM: two gradients a step, of which the second is normalised and counts."""

import pytest
import torch
from loops import Run, bits
from pytorch_optimizer import SAM


def sharpness_aware(parameters) -> SAM:
    return SAM(parameters, torch.optim.SGD, rho=0.5, adaptive=True, lr=0.1, momentum=0.9)


class Climb(Run):
    """SAM's loop: a gradient, up, a second gradient by the closure, and down."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            value = self.loss(self.model(x), y)
            value.backward()
            return value

        closure()
        self.optimizer.step(closure)


def test_advances_once_per_real_step():
    """Two gradients, one step: σ moves once, and the mean takes the norm of the second gradient only."""
    run, norms = Climb(sharpness_aware, 10), []
    parameters = list(run.model.parameters())
    run.optimizer.base_optimizer.register_step_pre_hook(  # made after the normaliser's, so it runs after it
        lambda *_: norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters])))
    )
    run.go(0, 4)
    assert run.attachment.schedules["sigma"].last_epoch == 4
    assert len(norms) == 4
    assert float(norms[0]) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("stop", [1, 6])
def test_goes_on_bit_for_bit(stop, tmp_path):
    whole, first, second = Climb(sharpness_aware, 12), Climb(sharpness_aware, 12), Climb(sharpness_aware, 12, seed=2)
    whole.go(0, 12)
    first.go(0, stop)
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    second.go(stop, 12)
    assert torch.equal(bits(second.model), bits(whole.model))
    assert second.end == whole.end
