"""A page of another site, open in a browser on the machine of this server, must not be able to use it."""

from typing import Any

import httpx
import pytest

BODY = {"model": "alphabet", "prompt": "Z", "max_tokens": 3}
LOCAL = ("127.0.0.1", "localhost", "::1")


@pytest.fixture
def local(serve_alphabet: Any) -> Any:
    """A server as `runtime serve` starts it on a loopback address."""
    url, engine = serve_alphabet(allowed_hosts=[*LOCAL, "chat.example"])
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client
    assert not engine.active


def refused(response: httpx.Response) -> bool:
    if response.status_code != 403:
        return False
    assert response.json()["error"]["code"] == "foreign_site"
    return True


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "localhost."])
def test_dns_rebinding(local: httpx.Client, host: str) -> None:
    """Another name with this server's address is same-origin for a browser: the name itself must be refused."""
    for path in ("/v1/models", "/health", "/openapi.json", "/nowhere"):
        assert refused(local.get(path, headers={"Host": host}))
    assert refused(local.post("/v1/completions", json=BODY, headers={"Host": host, "Origin": f"http://{host}"}))


@pytest.mark.parametrize("host", [*("127.0.0.1", "localhost", "[::1]", "LOCALHOST"), "chat.example"])
def test_own_names(local: httpx.Client, host: str) -> None:
    for name in (host, f"{host}:8000"):
        headers = {"Host": name, "Origin": f"http://{name}"}
        assert local.post("/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "https://evil.example:8000", "null", "http://[", "file://"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json"])
def test_requests_of_other_pages(local: httpx.Client, origin: str, kind: str) -> None:
    assert refused(local.post("/v1/completions", json=BODY, headers={"Origin": origin, "Content-Type": kind}))
    assert refused(local.get("/v1/models", headers={"Origin": origin}))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_bodies_that_a_page_may_send_without_asking_are_no_requests(local: httpx.Client, kind: str | None) -> None:
    """Also without `Origin`: a browser sends these types, or none, to any site without a preflight."""
    content = b'{"model": "alphabet", "prompt": "Z", "max_tokens": 3}'
    response = local.post("/v1/completions", content=content, headers={"Content-Type": kind} if kind else {})
    assert response.status_code == 400


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize("origin", ["http://chat.example", "https://CHAT.example:3000", "http://[::1]:3000"])
def test_pages_of_allowed_hosts_are_invited(local: httpx.Client, origin: str) -> None:
    """A browser asks before it sends JSON to another origin, and hands the answer over only where that is allowed."""
    asked = local.options("/v1/completions", headers={"Origin": origin, **PREFLIGHT})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == origin
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answers = [
        local.post("/v1/completions", json=BODY, headers={"Origin": origin}),
        local.post("/v1/completions", json={**BODY, "stream": True}, headers={"Origin": origin}),
        local.post("/v1/completions", json={**BODY, "prompt": 1}, headers={"Origin": origin}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {origin}


def test_an_invitation_needs_no_key_but_an_answer_does(serve_alphabet: Any) -> None:
    url, _ = serve_alphabet(allowed_hosts=LOCAL, api_key="open sesame")
    page = {"Origin": "http://localhost:3000"}
    with httpx.Client(base_url=url, timeout=20, headers=page) as client:
        assert client.options("/v1/models", headers=PREFLIGHT).status_code == 200
        refused = client.get("/v1/models")
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == page["Origin"]


@pytest.mark.parametrize(
    "origin", ["http://chatXexample", "http://chat.example.evil", "http://evil.example/chat.example"]
)
def test_names_that_look_like_allowed_ones(local: httpx.Client, origin: str) -> None:
    asked = local.options("/v1/completions", headers={"Origin": origin, **PREFLIGHT})
    assert "access-control-allow-origin" not in asked.headers


def test_nobody_else_is_invited(local: httpx.Client, api: httpx.Client) -> None:
    """No CORS headers: a browser hands no answer to another site's page, and its preflights fail."""
    for client in (local, api):
        headers = client.get("/v1/models").headers
        assert not [name for name in headers if name.startswith("access-control")]
        asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        response = client.options("/v1/completions", headers=asks)
        assert response.status_code in (403, 405)
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_server_for_everybody_still_refuses_foreign_pages(api: httpx.Client) -> None:
    assert api.get("/v1/models", headers={"Host": "any.example"}).status_code == 200
    assert api.get("/v1/models", headers={"Host": "any.example", "Origin": "http://any.example"}).status_code == 200
    assert refused(api.get("/v1/models", headers={"Host": "any.example", "Origin": "http://evil.example"}))


def test_every_answer_has_an_id(api: httpx.Client, guarded_api: httpx.Client) -> None:
    whole = api.post("/v1/completions", json=BODY)
    assert whole.json()["id"] == f"cmpl-{whole.headers['x-request-id']}"
    streamed = api.post("/v1/completions", json={**BODY, "stream": True})
    assert f'"id":"cmpl-{streamed.headers["x-request-id"]}"' in streamed.text
    others = [
        api.get("/health"),
        api.get("/nowhere"),
        api.post("/v1/completions", json=[]),
        guarded_api.get("/v1/models"),
    ]
    ids = [response.headers["x-request-id"] for response in [whole, streamed, *others]]
    assert len(set(ids)) == len(ids)
