"""HTTP as others expect it: HEAD, HTTP/1.0, ends of connections, unread bodies, bytes that are not a request."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from servers import post_head

BODY = b'{"model": "alphabet", "prompt": "Z", "max_tokens": 3}'
CHUNKED = post_head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
LOCAL = ["127.0.0.1", "localhost", "::1"]

pytestmark = pytest.mark.usefixtures("no_traceback")


@pytest.fixture
def connect(alphabet_url: str) -> Iterator[Callable[..., socket.socket]]:
    """Opens connections, and sends bytes over them."""
    url, connections = httpx.URL(alphabet_url), []

    def open_one(*sent: bytes) -> socket.socket:
        connection = socket.create_connection((url.host, url.port), timeout=20)
        connections.append(connection)
        for part in sent:
            connection.sendall(part)
        return connection

    yield open_one
    for connection in connections:
        connection.close()


def answer_on(connection: socket.socket) -> HTTPResponse:
    """The next answer on a connection, with its body in `text`."""
    with closing(HTTPResponse(connection)) as response:
        response.begin()
        response.text = response.read()
    return response


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_head_is_answered_wherever_get_is(api: httpx.Client) -> None:
    paths = [path for path, item in api.get("/openapi.json").json()["paths"].items() if "get" in item]
    paths = [path.replace("{name}", "alphabet") for path in paths]
    assert {"/health", "/v1/models", "/version"} <= set(paths)
    for path in (*paths, "/", "/page/main.js", "/openapi.json", "/v1/models/other"):
        got, head = api.get(path), api.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        if path != "/metrics":  # whose length changes
            assert int(head.headers["content-length"]) == len(got.content)
    assert api.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_checks_of_http_1_0(serve_alphabet: Any, method: str) -> None:
    """They may leave out the `Host`; a browser, which may be made to ask under another name, does not."""
    url = httpx.URL(serve_alphabet(allowed_hosts=LOCAL)[0])
    for host, status in ((b"", b"200"), (b"Host: localhost\r\n", b"200"), (b"Host: evil.example\r\n", b"403")):
        with socket.create_connection((url.host, url.port), timeout=20) as connection:
            connection.sendall(method.encode() + b" /health HTTP/1.0\r\n" + host + b"\r\n")
            received = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
        assert received.split()[1] == status
    with socket.create_connection((url.host, url.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n")
        assert answer_on(connection).status == 403


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, deflate", "GZIP", "nonsense"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/health"])
def test_compressed_bodies(api: httpx.Client, path: str, encoding: str) -> None:
    method = "GET" if path == "/health" else "POST"
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = api.request(method, path, content=BODY, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert response.headers["accept-encoding"] == "identity"


def test_a_body_without_compression_may_say_so(api: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "Identity"}
    assert api.post("/v1/completions", content=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("status", [403, 404, 405, 413, 415])
def test_an_answer_before_the_end_of_the_body_ends_the_connection(connect: Any, status: int) -> None:
    path = {404: "/nowhere", 405: "/health"}.get(status, "/v1/completions")
    more = {403: ["Origin: http://evil.example"], 415: ["Content-Encoding: gzip"]}.get(status, [])
    length = 20_000 if status == 413 else 2_000
    connection = connect(post_head(length, path, *more), b" " * 1_000)
    response = answer_on(connection)
    assert (response.status, response.headers["connection"]) == (status, "close")
    assert json.loads(response.text)["error"]["message"]
    connection.sendall(b" " * (length - 1_000))  # is taken, and so does not reset the connection
    assert is_closed(connection)


@pytest.mark.parametrize("head", [post_head(20_000), CHUNKED])
def test_a_body_over_the_limit_ends_the_connection(connect: Any, head: bytes) -> None:
    body = b" " * 20_000
    response = answer_on(connect(head, body if head != CHUNKED else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)))
    assert (response.status, response.headers["connection"]) == (413, "close")


def test_a_refusal_of_a_whole_body_keeps_the_connection(connect: Any) -> None:
    connection = connect(post_head(len(BODY), "/nowhere") + BODY)
    assert answer_on(connection).status == 404
    connection.sendall(post_head(len(BODY)) + BODY)
    response = answer_on(connection)
    assert (response.status, response.headers["connection"]) == (200, None)


def test_a_refused_body_is_not_asked_for(connect: Any) -> None:
    """A client that waits for status 100 gets the refusal instead; one that is served gets both."""
    wait = "Expect: 100-continue"
    response = answer_on(connect(post_head(20_000, "/v1/completions", wait)))
    assert (response.status, response.headers["connection"]) == (413, "close")
    connection = connect(post_head(len(BODY), "/v1/completions", wait))
    assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
    connection.sendall(BODY)
    assert answer_on(connection).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",  # the start of TLS
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without the Host that this version requires
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        CHUNKED + b"nonsense\r\n",
        CHUNKED.replace(b"/v1/completions", b"/nowhere") + b"1\r\n \r\n" + b"nonsense\r\n",
    ],
)
def test_bytes_that_are_no_http(connect: Any, api: httpx.Client, sent: bytes) -> None:
    connection = connect(sent)
    response = answer_on(connection)
    assert (response.status, response.headers["connection"]) in ((400, "close"), (404, "close"))
    assert json.loads(response.text)["error"]["message"]
    assert is_closed(connection)
    assert api.get("/health").status_code == 200


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 4",
        "content-length: 4\r\nTRANSFER-ENCODING: Chunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: \x0bchunked",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Content-Length: 4\r\nContent-Length: 5",
        "Content-Length: 4, 5",
        "Content-Length: +4",
        "Content-Length: 4 4",
        "Content-Length: 0x4",
        "1.0 Transfer-Encoding: chunked",
    ],
)
def test_a_body_whose_end_is_not_certain_ends_the_connection(connect: Any, framing: str) -> None:
    """Bytes after it, which are its body for one reader and a request for another, are not answered."""
    version, _, lines = framing.partition(" ") if framing.startswith("1.0 ") else ("1.1", "", framing)
    connection = connect(post_head(len(BODY)) + BODY)
    assert answer_on(connection).status == 200
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{lines}\r\n\r\n"
    connection.sendall(head.encode() + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 400 ") == 1
    assert b"connection: close" in answers.lower()
    assert json.loads(answers.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_clients_that_leave_within_a_body_or_a_stream(connect: Any, engine: Any, wait_until: Any) -> None:
    engine.close_gate_at = 2
    stream = BODY.replace(b"}", b', "stream": true}')
    for sent in (post_head(500), post_head(500) + b"{", CHUNKED, CHUNKED + b"5\r\n{"):
        connect(sent).close()
    connection = connect(post_head(len(stream)) + stream)
    connection.recv(1)
    connection.close()
    wait_until(lambda: not engine.active)


def test_the_version(api: httpx.Client) -> None:
    assert api.get("/version").json() == {"version": api.get("/openapi.json").json()["info"]["version"]}
