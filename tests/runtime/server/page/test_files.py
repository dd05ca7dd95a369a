"""The page over plain HTTP: complete, without anything from elsewhere, open without a key."""

import hashlib
import json
import re
from importlib.resources import files

import httpx
import pytest

from runtime.server.page import MEDIA_TYPES

NAMES = sorted(MEDIA_TYPES)
OWN_NAMES = [name for name in NAMES if not name.startswith("vendor/")]
VENDOR = files("runtime.server") / "page" / "vendor"
VERSIONS = json.loads((VENDOR / "versions.json").read_text())
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def test_every_file_of_the_folder_is_served() -> None:
    folder = files("runtime.server") / "page"
    assert sorted(item.name for item in folder.iterdir() if item.is_file()) == OWN_NAMES
    assert {f"vendor/{library['file']}" for library in VERSIONS} == {*NAMES} - {*OWN_NAMES}


@pytest.mark.parametrize("library", VERSIONS, ids=lambda library: library["file"])
def test_library_is_the_published_one_with_its_licence(library: dict[str, str]) -> None:
    content = (VENDOR / library["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == library["sha256"]
    assert library["version"].encode() in content[:1000]
    assert "Copyright" in (VENDOR / library["licence_file"]).read_text()


def test_folder_of_libraries_has_nothing_else() -> None:
    listed = {name for library in VERSIONS for name in (library["file"], library["licence_file"])}
    assert {item.name for item in VENDOR.iterdir()} == {*listed, "versions.json"}


@pytest.mark.parametrize("name", ["", *(f"page/{name}" for name in NAMES)])
def test_file_is_served_with_its_type_and_policy(api: httpx.Client, name: str) -> None:
    response = api.get(f"/{name}")
    assert response.status_code == 200
    assert response.headers["content-type"] == MEDIA_TYPES[name.removeprefix("page/") or "index.html"]
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "require-trusted-types-for 'script'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_page_has_no_other_files(api: httpx.Client) -> None:
    for name in ("nothing.js", "vendor", "vendor/versions.json", "../page.py", "..%2fpage.py", "%2e%2e/page.py", ""):
        response = api.get(f"/page/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["message"]


def test_nothing_comes_from_elsewhere(api: httpx.Client) -> None:
    for name in OWN_NAMES:
        text = api.get(f"/page/{name}").text.replace(SVG_NAMESPACE, "")
        assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+|@import|url\(", text), name


def test_page_uses_only_what_is_served(api: httpx.Client) -> None:
    page = api.get("/").text
    used = {*re.findall(r'(?:src|href)="([^"]+)"', page)}
    assert used <= {f"page/{name}" for name in NAMES}
    for name in OWN_NAMES:
        imported = re.findall(r'from "\./([^"]+)"', api.get(f"/page/{name}").text)
        assert set(imported) <= set(NAMES)


def test_texts_never_become_markup(api: httpx.Client) -> None:
    for name in OWN_NAMES:
        text = api.get(f"/page/{name}").text
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not found, name
    assert not re.findall(r'\son\w+="|\sstyle="|<style|<script(?! type="module" src=)', api.get("/").text)


def test_page_needs_no_key_but_the_api_does(guarded_api: httpx.Client) -> None:
    assert guarded_api.get("/").status_code == 200
    assert guarded_api.get("/page/main.js").status_code == 200
    for path in ("/v1/models", "/metrics", "/page/nothing.js", "/page"):
        assert guarded_api.get(path).status_code == 401
