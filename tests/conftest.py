"""Hypothesis profiles, and the lines that tests leave for the end of a run."""

import os

from hypothesis import settings

settings.register_profile("local", deadline=None, max_examples=30)
settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_terminal_summary(terminalreporter):
    """Print what tests recorded under "expacc": seeds and worst cases, also of runs that pass, also from workers."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    lines = [text for r in reports for key, text in r.user_properties if key == "expacc"]
    if lines:
        terminalreporter.section("random rows")
        terminalreporter.write_line("\n".join(lines))
