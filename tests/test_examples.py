"""The examples as their reader runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


def test_the_plain_loop_learns_and_goes_on_after_a_kill(tmp_path):
    """Killed after three epochs and run again, it prints the same last epochs."""
    whole = run("plain_loop.py").splitlines()
    assert float(re.search(r"accuracy ([\d.]+)%", whole[-1])[1]) > 88.0  # type: ignore[index]
    checkpoint = tmp_path / "digits.pt"
    command = [sys.executable, "-u", str(EXAMPLES / "plain_loop.py"), str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 4"):
                process.kill()
                break
    rest = run("plain_loop.py", str(checkpoint)).splitlines()
    assert rest == whole[-len(rest) :]
    assert 0 < len(rest) < len(whole)


@pytest.mark.parametrize("name", ["lightning_callback.py", "huggingface_trainer.py"])
def test_a_trainer_learns(name):
    found = re.search(r"sigma 1.00, held-out accuracy ([\d.]+)%", run(name))
    assert found is not None
    assert float(found[1]) > 85.0
