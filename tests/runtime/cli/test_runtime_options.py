"""Options shared by the commands, and the listening socket."""

import socket
from pathlib import Path

import pytest
import typer

from compress.common.cli import BUNDLED, bundled_path, demo_model_path, read_size
from compress.common.errors import ToolkitError
from runtime.cli.options import name_of, resolve_model
from runtime.cli.serve import listen, url_of


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("512MiB", 512 * 2**20), ("1.5 GB", 1_500_000_000), ("4gib", 4 * 2**30)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "4 apples", "MiB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"{text!r} .*4GiB"):
        read_size(text)


def test_model_defaults_to_packed_then_to_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, name = resolve_model(None)
    assert path == demo_model_path()
    assert "bundled demo model" in name
    Path("packed").mkdir()
    path, name = resolve_model(None)
    assert path == Path("packed")
    assert "packed/" in name


def test_bundled_models_have_names_that_folders_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in BUNDLED:
        path, _ = resolve_model(Path(name))
        assert path == bundled_path(name)
        assert name_of(path) == name
    Path("demo").mkdir()
    assert resolve_model(Path("demo"))[0] == Path("demo")


def test_port_zero_is_any_free_port() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_url_of_all_addresses_is_one_that_works() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_taken_port_is_refused_with_a_free_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ToolkitError, match=rf"\b{port} .*127\.0\.0\.1 ") as caught:
            listen("127.0.0.1", port)
    free = int(caught.value.remedy.rpartition("--port ")[2])
    listen("127.0.0.1", free).close()
