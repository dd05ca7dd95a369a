"""The quick tier shows every value of every parameter, and a run in a box of time says what it did not reach."""

import time
from types import SimpleNamespace

import pytest
from covering import covering
from tiers import NOT_REACHED, SLOW_SECONDS, TimeBox


def test_few_combinations_show_every_value() -> None:
    params = covering([1, 2, 3], "ab", [True, False])
    assert len(params) == 12
    quick = [param.values for param in params if not param.marks]
    assert len(quick) == 3
    assert [set(values) for values in zip(*quick, strict=True)] == [{1, 2, 3}, {"a", "b"}, {True, False}]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("letter", "sign"), [("a", 1), ("b", 1)])
def test_stacked_parameters_are_reduced_alike(
    request: pytest.FixtureRequest, number: int, letter: str, sign: int
) -> None:
    cases = [item for item in request.session.items if item.originalname == request.node.originalname]
    quick = [item.callspec.params for item in cases if not item.get_closest_marker("full")]
    assert len(quick) <= 3
    if len(cases) == 6:  # neither tier was deselected
        assert {values["number"] for values in quick} == {1, 2, 3}
        assert {values["letter"] for values in quick} == {"a", "b"}


def test_cases_after_the_end_are_skipped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    box = TimeBox(end=time.time() - 1)
    case = SimpleNamespace(get_closest_marker=lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=NOT_REACHED):
        box.pytest_runtest_setup(case)
    TimeBox(end=time.time() + 60).pytest_runtest_setup(case)
    for name in ("tests/test_a.py::one[1]", "tests/test_a.py::two", "tests/test_b.py::three"):
        box.pytest_runtest_logreport(SimpleNamespace(skipped=True, longrepr=("", 1, NOT_REACHED), nodeid=name))
    box.pytest_runtest_logreport(SimpleNamespace(skipped=True, longrepr=("", 1, "no GPU"), nodeid="tests/test_c.py::x"))
    box.pytest_terminal_summary(SimpleNamespace(write_line=print))
    assert capsys.readouterr().out.split("\n") == [
        "not reached: 3 cases in 2 files",
        "  tests/test_a.py: 2",
        "  tests/test_b.py: 1",
        "",
    ]


def test_a_slow_case_begins_only_if_it_can_end_in_the_box() -> None:
    case = SimpleNamespace(get_closest_marker=lambda name: name if name == "slow" else None)
    TimeBox(end=time.time() + SLOW_SECONDS + 60).pytest_runtest_setup(case)
    with pytest.raises(pytest.skip.Exception, match=NOT_REACHED):
        TimeBox(end=time.time() + SLOW_SECONDS - 60).pytest_runtest_setup(case)
