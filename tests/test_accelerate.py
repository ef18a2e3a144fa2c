"""attach on an optimizer that accelerate has prepared: the inner one's steps count, accumulation included."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from expacc import ExactLoss, attach

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 4
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's, about its own future


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def test_equals_a_plain_loop_and_accumulated_steps_do_not_count():
    ends = []
    for accelerated in (False, True):
        model, loss = network(), ExactLoss(power=1, margin=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2) if accelerated else None
        if accelerator:
            model, optimizer = accelerator.prepare(model, optimizer)
        attachment = attach(optimizer, loss, total_steps=6)
        for k in range(12):
            if accelerator:
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model(X + k), Y))
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                (loss(model(X + k), Y) / 2).backward()
                if k % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        assert attachment.schedules["sigma"].last_epoch == 6
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)
