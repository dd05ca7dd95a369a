"""The page over plain HTTP: complete, without anything from elsewhere, open without a key."""

import re
from importlib.resources import files

import httpx
import pytest

from runtime.server.page import MEDIA_TYPES

NAMES = sorted(MEDIA_TYPES)
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def test_every_file_of_the_folder_is_served() -> None:
    assert sorted(item.name for item in (files("runtime.server") / "page").iterdir()) == NAMES


@pytest.mark.parametrize("name", ["", *(f"page/{name}" for name in NAMES)])
def test_file_is_served_with_its_type_and_policy(api: httpx.Client, name: str) -> None:
    response = api.get(f"/{name}")
    assert response.status_code == 200
    assert response.headers["content-type"] == MEDIA_TYPES[name.removeprefix("page/") or "index.html"]
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_page_has_no_other_files(api: httpx.Client) -> None:
    for name in ("nothing.js", "../page.py", "..%2fpage.py", "%2e%2e/page.py", ""):
        response = api.get(f"/page/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["message"]


def test_nothing_comes_from_elsewhere(api: httpx.Client) -> None:
    for name in NAMES:
        text = api.get(f"/page/{name}").text.replace(SVG_NAMESPACE, "")
        assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+|@import|url\(", text), name


def test_page_uses_only_what_is_served(api: httpx.Client) -> None:
    page = api.get("/").text
    used = {*re.findall(r'(?:src|href)="([^"]+)"', page)}
    assert used <= {f"page/{name}" for name in NAMES}
    for name in NAMES:
        imported = re.findall(r'from "\./([^"]+)"', api.get(f"/page/{name}").text)
        assert set(imported) <= set(NAMES)


def test_texts_never_become_markup(api: httpx.Client) -> None:
    for name in NAMES:
        text = api.get(f"/page/{name}").text
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not found, name
    assert not re.findall(r'\son\w+="|\sstyle="|<style|<script(?! type="module" src=)', api.get("/").text)


def test_page_needs_no_key_but_the_api_does(guarded_api: httpx.Client) -> None:
    assert guarded_api.get("/").status_code == 200
    assert guarded_api.get("/page/main.js").status_code == 200
    for path in ("/v1/models", "/metrics", "/page/nothing.js", "/page"):
        assert guarded_api.get(path).status_code == 401
