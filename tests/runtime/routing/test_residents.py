"""Which models make room for another one."""

from runtime.routing.residents import Resident, choose_unloads


def residents(**each: tuple[int, float, bool]) -> dict[str, Resident]:
    return {name: Resident(*values) for name, values in each.items()}


def test_nothing_is_unloaded_where_there_is_room() -> None:
    assert choose_unloads(residents(a=(4, 1.0, True)), 6, limit=10) == []
    assert choose_unloads({}, 10, limit=10) == []


def test_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    loaded = residents(a=(3, 5.0, True), b=(3, 2.0, True), c=(3, 9.0, True))
    assert choose_unloads(loaded, 3, limit=10) == ["b"]
    assert choose_unloads(loaded, 6, limit=10) == ["b", "a"]
    assert choose_unloads(loaded, 10, limit=10) == ["b", "a", "c"]


def test_busy_models_stay() -> None:
    loaded = residents(a=(5, 1.0, False), b=(5, 2.0, True))
    assert choose_unloads(loaded, 5, limit=10) == ["b"]
    assert choose_unloads(loaded, 6, limit=10) is None
