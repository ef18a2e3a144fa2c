"""The command line: which commands there are, what they take, and how they end. What they do is in their modules.

    exit code  0 done    1 failed    2 wrong use    130 Ctrl-C

A command is a row of ``COMMANDS``; its module, and torch with it, is imported when it is run, so help is instant.
argparse, because the command has to start where only the core is installed, to say which extra is missing there; tyro
would be nicer to declare with and costs the core three packages, the start 60 ms.
"""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from expacc.studies import CommandError, require_extra


@dataclass(frozen=True)
class Command:
    """Hold one command: ``module.run(**options)`` does it.

    Args:
        summary: one line of help.
        module: a module with the function ``run``.
        options: by flag, what argparse's ``add_argument`` takes.
        extra: the package's extra that brings ``needs``.
        needs: modules that the command needs beyond the core.
    """

    summary: str
    module: str
    options: Mapping[str, dict[str, Any]]
    extra: str = ""
    needs: tuple[str, ...] = ()


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, not {text!r}")
    return int(text)


def _choose(what: str, *names: str) -> dict[str, Any]:
    return {
        "metavar": "NAME", "nargs": "+", "choices": names, "default": names,
        "help": f"{what}, of {', '.join(names)}; default: all",
    }  # fmt: skip


OUT_OPTIONS: dict[str, dict[str, Any]] = {
    "--out": {
        "metavar": "DIR", "type": Path, "default": Path("out"),
        "help": "folder for the record (JSON) and the figures (PNG, SVG), made if need be; default: out",
    },
    "--json": {"action": "store_true", "help": "print the record instead of the table"},
}  # fmt: skip
STUDY_OPTIONS: dict[str, dict[str, Any]] = {
    **OUT_OPTIONS,
    "--seed": {"metavar": "N", "type": _seed, "default": 0, "help": "seed of everything random; default: 0"},
}
DEFAULTS_OPTIONS: dict[str, dict[str, Any]] = {
    **OUT_OPTIONS,
    "--problems": _choose(
        "problems", "digits-mlp", "digits-cnn", "adult", "cylinder-bands", "dry-bean", "mice-protein", "mnist",
        "cifar-100",
    ),
    "--optimizers": _choose("optimizers", "SGD", "Adam", "AdamW"),
    "--data": {"metavar": "DIR", "type": Path, "help": "folder with the official image files, in mnist and cifar-100"},
    "--device": {"metavar": "NAME", "default": "auto", "help": "cpu or cuda; default: cuda where there is one"},
}  # fmt: skip
GROUPS = {"study": "repeat one of the paper's studies, beside the published numbers"}
COMMANDS = {
    "study toy": Command(
        "the paper's two toy examples: where EXACT, cross-entropy and hinge put the threshold",
        "expacc.studies.toy", STUDY_OPTIONS, "studies", ("matplotlib", "rich"),
    ),
    "study defaults": Command(
        "the study behind ExactLoss's default: twenty-six losses on eight problems; what is done is not done again",
        "expacc.studies.defaults", DEFAULTS_OPTIONS, "studies", ("matplotlib", "rich", "pandas", "sklearn"),
    ),
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # an abbreviation that works today would be a promise

    def error(self, message: str) -> NoReturn:  # one line; argparse puts the usage, several lines, before it
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from expacc.studies.records import find_version  # not for everybody's start: it reads the installed packages

        print(f"expacc {find_version()}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all groups and commands; what it parses has the command's words as ``name``.

    >>> build_parser().parse_args(["study", "toy", "--seed", "7"]).seed
    7
    """
    root = _Parser(prog="expacc", description="Train classifiers for accuracy itself.")
    root.add_argument("--version", action=_Version, nargs=0, help="print the version")
    groups = {"": root.add_subparsers(metavar="command", dest="command", required=True)}
    for name, summary in GROUPS.items():
        group = groups[""].add_parser(name, help=summary, description=summary)
        groups[name] = group.add_subparsers(metavar=name, dest=name, required=True)
    for words, command in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        parser = groups[group].add_parser(name, help=command.summary, description=command.summary)
        parser.set_defaults(name=words)
        parser.add_argument("--debug", action="store_true", help="show where an error came from")
        for flag, options in command.options.items():
            parser.add_argument(flag, **options)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors and ``--help`` leave through ``SystemExit``.

    Args:
        argv: the words after ``expacc``; those of the process by default.
    """
    options = vars(build_parser().parse_args(argv))
    name, debug = options["name"], options["debug"]
    command = COMMANDS[name]
    wanted = {flag.lstrip("-").replace("-", "_") for flag in command.options}
    try:
        require_extra("this command", command.extra, *command.needs)
        importlib.import_module(command.module).run(**{key: options[key] for key in options if key in wanted})
        if sys.stdout is not None:  # closed by the caller (>&-)
            sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print(f"expacc {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # "| head" has read enough
        _drop_stdout()
        return 0
    except Exception as error:
        if debug:
            raise
        print(f"expacc {name}: {_explain(error)}", file=sys.stderr)
        _drop_stdout()
        return 2 if isinstance(error, CommandError) else 1


def _explain(error: Exception) -> str:
    if isinstance(error, CommandError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first} (--debug shows where)"


def _drop_stdout() -> None:
    """Send what is still buffered nowhere: Python would flush it at exit, fail again, and exit with 120."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stdout, or not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
