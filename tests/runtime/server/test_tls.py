"""`https`: the options of its files, and connections that a client verifies."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from servers import events, running

from compress.common.errors import ToolkitError
from runtime.cli.options import TlsOptions
from runtime.cli.serve import listen, url_of
from runtime.server.drain import create_server

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 3}


def make_certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    words += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words, *(options or ("-nodes",))], check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates `server`, `client`, and `locked` with the password `secret`."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "empty.pem").touch()
    make_certificate(folder, "server")
    make_certificate(folder, "client")
    make_certificate(folder, "locked", "-passout", "pass:secret")
    return folder


def serve(app: FastAPI, options: TlsOptions, client_seconds: float = 30.0) -> Any:
    return running(create_server(app, 5, client_seconds, **options.checked()))


@pytest.fixture(scope="module")
def address(folder: Path, new_alphabet_app: Any) -> Iterator[tuple[str, int]]:
    """Where a server with the certificate `server` listens, which drops clients that send nothing."""
    options = TlsOptions(folder / "server.pem", folder / "server-key.pem")
    with serve(new_alphabet_app(), options, client_seconds=0.3) as server:
        yield server.address


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "server.pem")


def test_verified_client_gets_answers_and_streams(address: tuple[str, int], folder: Path) -> None:
    with httpx.Client(base_url=f"https://localhost:{address[1]}", verify=trusting(folder)) as client:
        assert client.post("/v1/completions", json=COMPLETION).json()["usage"]["completion_tokens"] == 3
        parts = events(client.post("/v1/completions", json={**COMPLETION, "stream": True}).text)
        assert "".join(part["choices"][0]["text"] for part in parts) == "nop"
        large = client.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 10_000})
        assert large.status_code == 413
    with pytest.raises(httpx.ConnectError, match="self-signed"):
        httpx.get(f"https://localhost:{address[1]}/health")


def test_clients_that_send_no_head_are_dropped(address: tuple[str, int], folder: Path) -> None:
    with (
        socket.create_connection(address, timeout=20) as plain,
        trusting(folder).wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"GET /hea")
        with suppress(ConnectionResetError, ssl.SSLEOFError):  # not TimeoutError
            assert connection.recv(1) == b""


def test_clients_without_encryption_are_refused(address: tuple[str, int]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{address[0]}:{address[1]}/health", timeout=20)


def test_clients_need_a_certificate_where_it_is_asked_for(folder: Path, new_alphabet_app: Any) -> None:
    key = str(folder / "locked-key.pem")
    options = TlsOptions(folder / "locked.pem", Path(key), "secret", folder / "client.pem")
    with serve(new_alphabet_app(), options) as server:
        url = f"https://localhost:{server.address[1]}/health"
        files = {"certfile": str(folder / "client.pem"), "keyfile": str(folder / "client-key.pem")}
        context = ssl.create_default_context(cafile=folder / "locked.pem")
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=context)
        context.load_cert_chain(**files)
        assert httpx.get(url, verify=context, timeout=30).status_code == 200


def test_url_tells_of_it() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener, "https") == f"https://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("none", "server-key"), "--ssl-certfile .*none.pem"),
        (("server", "none"), "--ssl-keyfile .*none.pem"),
        (("server", "client-key"), "server.pem .*client-key.pem"),
        (("server", None), "server.pem"),
        (("empty", None), "empty.pem"),
        (("server-key", "server-key"), "server-key.pem"),
        (("locked", "locked-key"), "locked-key.pem"),
        (("locked", "locked-key", "wrong"), "locked-key.pem"),
        (("server", "server-key", None, "none"), "--ssl-ca-certs .*none.pem"),
        (("server", "server-key", None, "client-key"), "--ssl-ca-certs .*client-key.pem"),
        ((None, "server-key"), "--ssl-certfile"),
        ((None, None, "secret"), "--ssl-certfile"),
        ((None, None, None, "client"), "--ssl-certfile"),
    ],
)
def test_wrong_files_are_refused(folder: Path, names: tuple[str | None, ...], words: str) -> None:
    certificate, key, password, authorities = (*names, None, None)[:4]
    files = [folder / f"{name}.pem" if name else None for name in (certificate, key, authorities)]
    with pytest.raises(ToolkitError, match=words) as caught:
        TlsOptions(files[0], files[1], password, files[2]).checked()
    assert "secret" not in str(caught.value)
    assert "None" not in str(caught.value)


def test_key_that_others_can_read_is_warned_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key.pem"
    shutil.copy(folder / "server-key.pem", key)
    options = TlsOptions(folder / "server.pem", key)
    for mode, warned in ((0o600, False), (0o644, True)):
        key.chmod(mode)
        assert options.checked()["ssl_keyfile"] == key
        assert (f"chmod 600 {key}" in capsys.readouterr().err) is warned
    assert TlsOptions().checked() == {}
