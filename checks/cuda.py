"""Check the loss on a CUDA device: python -m checks.cuda [--out FILE]

Claim: on the GPU the loss gives the numbers it gives on the CPU, waits for nothing, lives in a CUDA graph, compiles.
Every check is one row of the record; the exit code is 1 if any failed.
"""

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expacc.attachment import Attachment, attach
from expacc.collapse import look
from expacc.functional import argmax_probabilities, exact_loss, log_expected_accuracy
from expacc.losses import ExactLoss
from expacc.studies.records import Record, begin_record

CHECKS: dict[str, Callable[[], float]] = {}
SETTINGS: dict[str, dict] = {
    "default": {},
    "paper": {"power": 1.0, "margin": 0.5},
    "log": {"power": 0.0, "normalize": False},
    "gumbel": {"noise": "gumbel", "power": 0.0, "normalize": False},
}


def check(function: Callable[[], float]) -> Callable[[], float]:
    """Register a check; it returns the number it measured, or raises."""
    CHECKS[(function.__doc__ or function.__name__).strip().rstrip(".")] = function
    return function


def rows(dtype: torch.dtype, classes: int = 10, count: int = 64) -> tuple[Tensor, Tensor]:
    """Return rows on the CPU: random, confident and hopeless ones, with an ignored target among them."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(classes, (count,), generator=generator)
    logits[torch.arange(count // 4), target[: count // 4]] += 12
    logits[torch.arange(count // 4, count // 2), target[count // 4 : count // 2]] -= 30
    target[-1] = -100
    return logits.to(dtype), target


def evaluate(device: str, dtype: torch.dtype, classes: int, settings: dict) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits' gradient of the reference, on the CPU."""
    logits, target = rows(dtype, classes)
    logits = logits.to(device).requires_grad_()
    loss = exact_loss(logits, target.to(device), backend="reference", **settings)
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach().cpu().double(), slope.cpu().double()


def require(holds: bool, message: str) -> None:
    """Fail the check."""
    if not holds:
        raise AssertionError(message)


@check
def agrees_float64() -> float:
    """CUDA equals CPU, float64, worst relative difference of loss and gradient."""
    return worst_difference(torch.float64, 1e-11)


@check
def agrees_float32() -> float:
    """CUDA equals CPU, float32, worst relative difference of loss and gradient."""
    return worst_difference(torch.float32, 3e-7)


@check
def agrees_bfloat16() -> float:
    """CUDA equals CPU, bfloat16, worst relative difference of loss and gradient."""
    return worst_difference(torch.bfloat16, 8e-3)  # one rounding to eight bits


def worst_difference(dtype: torch.dtype, bound: float) -> float:
    """Return the worst difference over settings and class counts, relative to the largest value."""
    worst = 0.0
    for settings in SETTINGS.values():
        for classes in (2, 10, 1000):
            for here, there in zip(
                evaluate("cuda", dtype, classes, settings), evaluate("cpu", dtype, classes, settings), strict=True
            ):
                worst = max(worst, ((here - there).abs().max() / there.abs().max()).item())
    require(worst <= bound, f"{worst} > {bound}")
    return worst


@check
def waits_for_nothing() -> float:
    """No synchronisation in forward or backward."""
    logits, target = (part.cuda() for part in rows(torch.float32))
    logits.requires_grad_()
    losses = [ExactLoss(**settings) for settings in SETTINGS.values()]
    losses += [ExactLoss(**settings).cuda() for settings in SETTINGS.values()]
    weight = torch.rand(10, device="cuda")
    per_sample = torch.rand(64, device="cuda") + 0.5
    losses += [ExactLoss(weight=weight).cuda(), ExactLoss(reduction="sum")]
    for loss in losses:
        loss(logits, target).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss in losses:
            loss(logits, target).backward()
            loss(logits, target, per_sample).backward()
        argmax_probabilities(logits).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return float(len(losses))


def count_looks(attachment: Attachment) -> list[float]:
    """Return a list that takes what the watch over sigma reads, look by look."""
    read, judge = [], attachment.watch.judge

    def noted(seen: Any, found: Any) -> None:
        read.append(found.valid)
        judge(seen, found)

    attachment.watch.judge = noted
    return read


@check
def attached_waits_for_nothing() -> float:
    """A step with σ falling, watched, and the gradient normalised waits for nothing, also fused, also with a scaler."""
    logits, target = (part.cuda() for part in rows(torch.float32))
    inputs = logits.clone()
    steps = 0
    for fused, scaled in ((False, False), (True, False), (True, True)):
        model = torch.nn.Linear(10, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        loss, scaler = ExactLoss(power=1, margin=0.5).cuda(), torch.amp.GradScaler("cuda", enabled=scaled)
        attachment = attach(optimizer, loss, total_steps=50)  # few enough for the watch to look at every step
        looks = count_looks(attachment)
        for k in range(8):
            if k == 2:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            scaler.scale(loss(model(inputs), target)).backward()
            scaler.step(optimizer)
            torch.cuda.set_sync_debug_mode("default")  # update() asks the device whether there was an inf
            scaler.update()
            torch.cuda.set_sync_debug_mode("error" if k >= 2 else "default")
            steps += 1
        torch.cuda.set_sync_debug_mode("default")
        require(len(looks) >= 2, f"the watch over sigma has looked {len(looks)} times in 8 steps")
        mean = attachment.normalizer.mean if attachment.normalizer else None
        require(mean is not None and 0 < mean < 10, f"the mean of the norm is {mean}")
        require(attachment.schedules["sigma"].last_epoch == 8, "a step did not count")
    return float(steps)


@check
def scaled_is_unscaled() -> float:
    """A fused optimizer under a GradScaler trains as without one, worst relative difference of the weights."""
    logits, target = (part.cuda() for part in rows(torch.float32))
    ends = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(10, 10).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        loss, scaler = ExactLoss(power=1, margin=0.5).cuda(), torch.amp.GradScaler("cuda", enabled=enabled)
        attach(optimizer, loss, total_steps=20)
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(loss(model(logits), target)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(model.weight.detach())
    worst = ((ends[0] - ends[1]).abs().max() / ends[0].abs().max()).item()
    require(worst <= 1e-4, f"{worst} > 1e-4")
    return worst


@check
def same_bits_twice() -> float:
    """The same bits twice."""
    first = evaluate("cuda", torch.float32, 1000, {})
    second = evaluate("cuda", torch.float32, 1000, {})
    require(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two runs differ")
    return 0.0


@check
def finds_a_collapse() -> float:
    """The watch over sigma reports a collapse from the GPU, and the numbers are the CPU's."""
    logits, target = rows(torch.float32)
    loss = ExactLoss(power=1, sigma=1e-3)
    there = look(loss, logits, target)
    here = look(loss.cuda(), logits.cuda(), target.cuda()).cpu()
    require(torch.allclose(here, there, rtol=1e-6), f"{here.tolist()} and {there.tolist()}")
    model = torch.nn.Linear(10, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(optimizer, loss, total_steps=50, sigma=(1e-4, 1e-4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            loss(model(logits.cuda()), target.cuda()).backward()
            optimizer.step()
            torch.cuda.synchronize()
    words = [str(each.message) for each in caught]
    require(len(words) == 1 and "has collapsed" in words[0], f"the watch said {words}")
    return float(here[1])


@check
def lives_in_a_graph() -> float:
    """A captured graph sees sigma move; a loss left on the CPU refuses the capture."""
    logits, target = (part.cuda() for part in rows(torch.float32))
    loss = ExactLoss().cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss(logits, target)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(logits, target)
    worst = 0.0
    for sigma in (1.0, 3.0, 0.2):
        loss.sigma = sigma
        graph.replay()
        worst = max(worst, abs(value.item() - loss(logits, target).item()))
    require(worst <= 1e-6, f"the graph differs by {worst}")
    refused = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ExactLoss()(logits, target)
    except RuntimeError as error:
        refused = str(error)
    require("loss.to('cuda')" in refused, f"capturing a loss on the CPU: {refused!r}")
    return worst


@check
def compiles() -> float:
    """torch.compile(fullgraph=True), forward and backward."""
    logits, target = (part.cuda() for part in rows(torch.float32))
    logits.requires_grad_()
    loss = ExactLoss().cuda()
    value = torch.compile(loss, fullgraph=True)(logits, target)
    (slope,) = torch.autograd.grad(value, logits)
    (expected,) = torch.autograd.grad(loss(logits, target), logits)
    difference = (slope - expected).abs().max().item()
    require(difference <= 1e-6, f"gradient differs by {difference}")
    return difference


@check
def autocasts() -> float:
    """Under autocast bfloat16 logits give a float32 loss, as cross_entropy's."""
    logits, target = (part.cuda() for part in rows(torch.bfloat16))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = ExactLoss()(logits, target).dtype
        theirs = torch.nn.functional.cross_entropy(logits, target).dtype
    require(ours == theirs, f"{ours} and {theirs}")
    return 0.0


@check
def memory_is_linear() -> float:
    """Peak memory of forward and backward, (256, 1000), float32, as a multiple of the logits."""
    logits = torch.randn(256, 1000, device="cuda", requires_grad=True)
    target = torch.randint(1000, (256,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_expected_accuracy(logits, target).sum().backward()
    return (torch.cuda.max_memory_allocated() - before) / (logits.numel() * 4)


def main() -> int:
    """Run every check and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the record here")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("no CUDA device is available here", file=sys.stderr)
        return 2
    record: Record = begin_record("On a GPU the loss gives the CPU's numbers and waits for nothing.", "checks.cuda")
    failed = 0
    for name, function in CHECKS.items():
        try:
            value, passed = function(), True
        except Exception:
            traceback.print_exc()
            value, passed, failed = None, False, failed + 1
        print(f"{'passed' if passed else 'FAILED'}  {name}: {value}", flush=True)
        record.add(method="reference", metric=name, value=value, passed=passed)
    if out:
        record.write(out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
