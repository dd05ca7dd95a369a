"""Options of `runtime serve` from a file and from the environment."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from compress.common.cli import with_groups
from compress.common.errors import ToolkitError
from runtime.cli.options import AddressOptions, ConfigOption, ModelArgument, warn_of_readers
from runtime.cli.serve import load_keys
from runtime.core.config import BatchOptions, KVCacheOptions, KVMemoryOptions, LimitOptions


def run(directory: Path, config: str | None, *arguments: str, **environment: str) -> dict[str, Any]:
    """Returns what a command with some options of `runtime serve` was given."""
    seen: dict[str, Any] = {}

    @with_groups
    def command(
        *,
        model: ModelArgument = None,
        config: ConfigOption = None,
        address: AddressOptions,
        kv: KVCacheOptions,
        memory: KVMemoryOptions,
        batch: BatchOptions,
        limits: LimitOptions,
        allowed_host: list[str] | None = typer.Option(None, "--allowed-host"),
    ) -> None:
        seen.update(model=model, address=address, kv=kv, memory=memory, batch=batch, limits=limits, hosts=allowed_host)

    app = typer.Typer()
    app.command()(command)
    file = directory / "serve.yaml"
    if config is not None:
        file.write_text(config)
        file.chmod(0o600)
        arguments = (*arguments, "--config", str(file))
    result = CliRunner().invoke(app, list(arguments), env={"RUNTIME_API_KEY": None, **environment})
    if isinstance(result.exception, ToolkitError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen


CONFIG = """\
model: some/folder
port: 9000
max-num-seqs: 7
max_requests: 11
kv-memory: 2GiB
kv-rotate: no
kv-cache: int8
queue-timeout: 2.5
api-key: 0123
allowed-host: [a.example, b.example]
"""


def test_file_sets_options_by_their_names(tmp_path: Path) -> None:
    seen = run(tmp_path, CONFIG, RUNTIME_API_KEY="of the environment")
    assert seen["model"] == Path("some/folder")
    assert (seen["address"].port, seen["address"].host) == (9000, "127.0.0.1")
    assert seen["address"].api_key == "0123"
    assert seen["batch"].max_num_seqs == 7
    assert (seen["limits"].max_requests, seen["limits"].queue_seconds) == (11, 2.5)
    assert seen["memory"].kv_memory_bytes == 2 * 2**30
    assert (seen["kv"].kv_rotate, seen["kv"].kv_cache) == (False, "int8")
    assert list(seen["hosts"]) == ["a.example", "b.example"]


def test_command_line_overrides_the_file(tmp_path: Path) -> None:
    options = ("other", "--max-num-seqs", "3", "--kv-rotate", "--allowed-host", "c.example", "--api-key", "typed")
    seen = run(tmp_path, CONFIG, *options)
    assert seen["model"] == Path("other")
    assert (seen["batch"].max_num_seqs, seen["kv"].kv_rotate, seen["address"].port) == (3, True, 9000)
    assert list(seen["hosts"]) == ["c.example"]
    assert seen["address"].api_key == "typed"


def test_both_names_of_a_switch(tmp_path: Path) -> None:
    for text, fair in (("fair: no", False), ("first-come: yes", False), ("first_come: false", True)):
        assert run(tmp_path, text)["limits"].fair is fair
        assert run(tmp_path, text, "--fair")["limits"].fair is True


def test_without_a_file(tmp_path: Path) -> None:
    assert run(tmp_path, None)["address"] == AddressOptions(api_key=None)
    assert run(tmp_path, "# nothing", RUNTIME_API_KEY="x")["address"] == AddressOptions(api_key="x")


@pytest.mark.parametrize(
    ("config", "place", "word"),
    [
        ("max-num-seq: 3", "serve.yaml:1", "Did you mean 'max-num-seqs'"),
        ("port: 1\nmax-num-seqs: many", "serve.yaml:2", "max-num-seqs"),
        ("port: 80.5", "serve.yaml:1", "port"),
        ("port: yes", "serve.yaml:1", "port"),
        ("max-num-seqs: 0", "serve.yaml:1", "max-num-seqs"),
        ("kv-memory: much", "serve.yaml:1", "4GiB"),
        ("kv-cache: int3", "serve.yaml:1", "int8"),
        ("kv-rotate: perhaps", "serve.yaml:1", "kv-rotate"),
        ("port: [1, 2]", "serve.yaml:1", "port"),
        ("port:\n  a: 1", "serve.yaml:2", "port"),
        ("allowed-host: [[a]]", "serve.yaml:1", "allowed-host"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "serve.yaml:2", "max-num-seqs"),
        ("fair: yes\nfirst-come: yes", "serve.yaml:2", "first-come"),
        ("first-come: perhaps", "serve.yaml:1", "first-come"),
        ("port: 1\nport: 2", "serve.yaml:2", "port"),
        ("config: other.yaml", "serve.yaml:1", "'config'"),
        ("- port", "serve.yaml", "OPTION"),
        ("port: {", "serve.yaml", "YAML"),
    ],
)
def test_wrong_files_are_refused_at_their_place(tmp_path: Path, config: str, place: str, word: str) -> None:
    with pytest.raises(ToolkitError, match=word) as caught:
        run(tmp_path, config)
    assert str(tmp_path / place) in caught.value.problem


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"none\.yaml"):
        run(tmp_path, None, "--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o604, True)])
def test_files_with_keys_that_others_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warns: bool
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: k-0815}")
    file.chmod(mode)
    warn_of_readers(file)
    printed = capsys.readouterr().err
    assert (f"chmod 600 {file}" in printed) is warns
    assert "k-0815" not in printed


def test_an_empty_key_of_the_environment_is_refused(tmp_path: Path) -> None:
    address = run(tmp_path, None, RUNTIME_API_KEY="")["address"]
    with pytest.raises(ToolkitError, match="RUNTIME_API_KEY"):
        load_keys(address)
