"""The package as a newcomer meets it: what importing it loads, its public names, the README's words and snippets."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import expacc

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_loads_no_torch():
    assert python("import sys, expacc, expacc.cli; print('torch' in sys.modules)").strip() == "False"


@pytest.mark.parametrize("heavy", ["sklearn", "matplotlib", "optuna", "scipy", "pandas", "rich"])
def test_the_core_loads_no_extra(heavy):
    assert python(f"import sys; from expacc import ExactLoss; print({heavy!r} in sys.modules)").strip() == "False"


@pytest.mark.parametrize("name", expacc.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(expacc, name).__doc__
    assert name in dir(expacc)


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(AttributeError, match=r"has no attribute 'ExpectedLoss'; near to it: .*ExactLoss"):
        expacc.ExpectedLoss  # noqa: B018


def test_the_readme_snippet_trains():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    accuracy = float(re.fullmatch(r"tensor\((.*)\)", python(snippet).strip())[1])  # type: ignore[index]
    assert accuracy > 0.9


def test_ten_lines_are_about_ten():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in snippet.splitlines() if line.strip() and "import" not in line]) <= 10


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_every_link_of_the_readme_leads_somewhere(link):
    assert (CHECKOUT / link).exists()


def test_constraints_satisfy_the_metadata():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    wanted = [
        *project["dependencies"],
        *(want for extra in project["optional-dependencies"].values() for want in extra),
    ]
    named = {re.split(r"[\[><=]", want)[0] for want in wanted} - {"expacc"}
    assert named <= set(pinned)


@pytest.mark.parametrize("compiler", ["torch._dynamo", "torch._inductor"])
def test_the_core_does_not_load_the_compiler(compiler):
    """A second of every start: one decorator of torch.compiler is enough to import it."""
    assert python(f"import sys; from expacc import ExactLoss; print({compiler!r} in sys.modules)").strip() == "False"


def test_records_were_made_by_commits():
    """A record of code that nobody has cannot be made again."""
    for path in sorted((CHECKOUT / "results").glob("*.json")):
        assert re.fullmatch("[0-9a-f]{40}", json.loads(path.read_text(encoding="utf-8"))["commit"]), path.name


def test_importing_every_module_hides_no_public_name():
    """A module named like a function would take its place in the package once it is imported."""
    code = (
        "import expacc, importlib, pkgutil, types\n"
        "names = [m.name for m in pkgutil.walk_packages(expacc.__path__, 'expacc.')]\n"
        "skip = ('__main__', '.integrations.', '_native')\n"
        "for name in names:\n"
        "    if not any(part in name for part in skip): importlib.import_module(name)\n"
        "print([n for n in expacc.__all__ if isinstance(getattr(expacc, n), types.ModuleType)])"
    )
    assert python(code).strip() == "[]"
