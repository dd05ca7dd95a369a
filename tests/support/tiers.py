"""The quick and the full tier: examples of property tests, and the time box of a run."""

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

NOT_REACHED = "the time box is spent"
SLOW_SECONDS = 600
"""Rest of the box with which a case marked `slow` begins: more than the longest has taken."""


def register_profiles() -> None:
    """Registers the profile of each tier; examples of the quick one are the same in every run."""
    settings.register_profile("quick", deadline=None, derandomize=True)
    settings.register_profile("full", deadline=None)
    settings.load_profile("quick")


def examples(number: int, **options: Any) -> settings:
    """Settings of a property test that takes `number` examples in the full tier and a quarter in the quick one."""
    full = settings.get_current_profile_name() == "full"
    options.setdefault("suppress_health_check", [HealthCheck.too_slow])
    return settings(max_examples=number if full else max(5, number // 4), deadline=None, **options)


class TimeBox:
    """Skips cases that would not end by `end`, seconds since the epoch, and lists them."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.not_reached: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        needed = SLOW_SECONDS if item.get_closest_marker("slow") else 0
        if time.time() + needed > self.end:
            pytest.skip(NOT_REACHED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and NOT_REACHED in str(report.longrepr):
            self.not_reached[report.nodeid.partition("::")[0]] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if self.not_reached:
            write(f"not reached: {self.not_reached.total()} cases in {len(self.not_reached)} files")
        for file, count in sorted(self.not_reached.items()):
            write(f"  {file}: {count}")
