"""Archives of compiled kernels: what Triton's own cache finds in them elsewhere, and how large they may become."""

import io
import json
import random
import tarfile
from pathlib import Path

import pytest

from compress.common.errors import ToolkitError
from runtime.backends.triton.kernel_cache import pack_kernels, unpack_kernels


def put_kernel(folder: Path, key: str, cubin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel as Triton stores one, with a stage before its machine code, next to an unfinished file."""
    cache = manager(folder, key, monkeypatch)
    contents = {"add.cubin": cubin, "add.json": '{"shared": 0}', "add.ttir": 10_000 * "module "}
    cache.put_group("add.json", {name: cache.put(content, name) for name, content in contents.items()})
    (folder / key / "tmp.pid_1").mkdir()
    (folder / key / "tmp.pid_1" / "add.cubin").write_bytes(b"half")


def manager(folder: Path, key: str, monkeypatch: pytest.MonkeyPatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))
    from triton.runtime.cache import FileCacheManager

    return FileCacheManager(key)


def test_kernels_are_found_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here, archive = tmp_path / "there", tmp_path / "here", tmp_path / "kernels.tar.xz"
    put_kernel(there, "one", b"machine code", monkeypatch)
    manager(there, "launcher", monkeypatch).put(b"library", "launcher.so")
    assert pack_kernels(there, archive) == (2, 0)
    there.rename(tmp_path / "gone")
    assert unpack_kernels(archive, here) == 2
    group = manager(here, "one", monkeypatch).get_group("add.json")
    assert {name: Path(path).parent for name, path in group.items()} == dict.fromkeys(
        ("add.cubin", "add.json"), here / "one"
    )
    assert Path(group["add.cubin"]).read_bytes() == b"machine code"
    assert Path(manager(here, "launcher", monkeypatch).get_file("launcher.so")).read_bytes() == b"library"
    assert not list(here.rglob("tmp.pid*"))


@pytest.mark.full
def test_an_archive_stays_below_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, bound = random.Random(0), 3 * 2**20
    for number in range(8):
        put_kernel(tmp_path / "cache", str(number), chance.randbytes(2**19), monkeypatch)
    packed, left = pack_kernels(tmp_path / "cache", tmp_path / "kernels.tar.xz", bound)
    assert 0 < packed < 8
    assert packed + left == 8
    assert (tmp_path / "kernels.tar.xz").stat().st_size <= bound
    assert unpack_kernels(tmp_path / "kernels.tar.xz", tmp_path / "other") == packed


def test_what_is_there_is_kept_and_no_archive_is_said_to_be_none(tmp_path: Path, monkeypatch) -> None:
    put_kernel(tmp_path / "cache", "one", b"new", monkeypatch)
    put_kernel(tmp_path / "here", "one", b"old", monkeypatch)
    pack_kernels(tmp_path / "cache", tmp_path / "kernels.tar.xz")
    unpack_kernels(tmp_path / "kernels.tar.xz", tmp_path / "here")
    assert (tmp_path / "here/one/add.cubin").read_bytes() == b"old"
    assert pack_kernels(tmp_path / "nothing", tmp_path / "empty.tar.xz") == (0, 0)
    assert unpack_kernels(tmp_path / "empty.tar.xz", tmp_path / "here") == 0
    (tmp_path / "kernels.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ToolkitError):
        unpack_kernels(tmp_path / "kernels.tar.xz", tmp_path / "here")


FACTS = {"Triton": "3.6.0", "GPU architecture": "sm_90"}


def test_kernels_for_other_machines_are_refused_with_the_difference(tmp_path: Path, monkeypatch) -> None:
    archive = tmp_path / "kernels.tar.xz"
    put_kernel(tmp_path / "cache", "one", b"machine code", monkeypatch)
    put_kernel(tmp_path / "cache", "two", b"of another model", monkeypatch)
    assert pack_kernels(tmp_path / "cache", archive, facts=FACTS, only={"one"}) == (1, 0)
    for there in (FACTS, FACTS | {"more": "than needed"}, None):
        assert unpack_kernels(archive, tmp_path / "here", there) == 1
    for there in (FACTS | {"Triton": "3.9.0"}, {"Triton": "3.6.0"}):
        with pytest.raises(ToolkitError, match=r"3\.9\.0|sm_90"):
            unpack_kernels(archive, tmp_path / "other", there)
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../one.cubin", tarfile.REGTYPE),
        ("one/../../two.cubin", tarfile.REGTYPE),
        ("/tmp/one.cubin", tarfile.REGTYPE),
        ("one/run.sh", tarfile.REGTYPE),
        ("one/deep/add.cubin", tarfile.REGTYPE),
        ("one/add.cubin", tarfile.SYMTYPE),
        ("one/add.cubin", tarfile.LNKTYPE),
    ],
)
def test_files_that_are_no_kernels_are_refused(name: str, kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "kernels.tar.xz", "w:xz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(ToolkitError):
        unpack_kernels(tmp_path / "kernels.tar.xz", tmp_path / "folder" / "here")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "kernels.tar.xz"]


def test_a_list_of_files_names_none_outside_of_its_folder(tmp_path: Path) -> None:
    content = json.dumps({"child_paths": {"/etc/passwd": "/etc/passwd"}}).encode()
    with tarfile.open(tmp_path / "kernels.tar.xz", "w:xz") as tar:
        member = tarfile.TarInfo("one/__grp__add.json")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    unpack_kernels(tmp_path / "kernels.tar.xz", tmp_path / "here")
    children = json.loads((tmp_path / "here/one/__grp__add.json").read_text())["child_paths"]
    assert children == {"passwd": str(tmp_path / "here/one/passwd")}
