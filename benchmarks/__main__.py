"""`python -m benchmarks NAME`: parse, hand over, turn a mistake into one line."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from expacc.studies import CommandError, require_extra

COMMANDS = {
    "loss": "time and memory of the loss, forward and backward, beside cross-entropy",
    "accuracy": "error of the integral against the number of nodes, over certified truth",
    "linear": "training accuracy and time of ExactClassifier beside scikit-learn's linear classifiers",
    "special": "largest error of log Φ, λ and x + λ in ULP, over the whole line",
    "render": "write the committed records into the marked blocks of README.md and docs/",
}
# What each command imports beyond the core, so that a missing package is named before anything runs.
NEEDS = {
    "loss": ("rich",),
    "accuracy": ("rich", "scipy", "matplotlib"),
    "linear": ("rich", "sklearn", "pandas"),
    "special": ("rich", "flint"),
    "render": (),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and return the exit status: 2 for a mistake of the caller, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="|".join(COMMANDS))
    name = next((word for word in (sys.argv[1:] if arguments is None else arguments) if word in COMMANDS), None)
    for each, text in COMMANDS.items():
        commands.add_parser(each, help=text, description=text)
    if name is not None:  # the others are not imported: `render` must work where SciPy is missing
        try:
            require_extra(f"benchmarks {name}", "test", *NEEDS[name])
        except CommandError as error:
            if {"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments):
                parser.parse_args(arguments)  # the help without the options of its own
            print(error, file=sys.stderr)
            return 2
        importlib.import_module(f"benchmarks.{name}").add_arguments(commands.choices[name])
    parsed = parser.parse_args(arguments)
    try:
        return importlib.import_module(f"benchmarks.{parsed.name}").run(parsed)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: no record written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
