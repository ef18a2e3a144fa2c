"""Hypothesis profiles, and the lines that tests leave for the end of a run."""

import os
import re

# One thread a worker, in what it starts too: two pools of two threads on two cores spin against each other, and the
# suite takes five times as long. Before torch is imported. Tests of the threads ask for them (torch.set_num_threads).
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

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


class _ByWhatIsShared(LoadScopeScheduling):
    """Give tests that read the same cached evaluation to one worker: it costs up to 40 s.

    Not `--dist loadgroup` with marks: xdist 3.8 tags a test's id by a private attribute that pytest 9.2 ignores.
    """

    def _split_scope(self, nodeid: str) -> str:
        if "test_random_rows.py" in nodeid:
            return "random rows"
        found = re.search(r"test_truth\.py::.*\[(float\d+-(?:cpu|reference)-C)(\d+)", nodeid)
        return f"truth {found[1]}{'100000' if int(found[2]) > 1000 else 'small'}" if found else nodeid


def pytest_xdist_make_scheduler(config, log):
    """Let xdist schedule by what tests share."""
    return _ByWhatIsShared(config, log)
