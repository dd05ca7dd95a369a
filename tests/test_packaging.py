"""Packages as they are installed: platforms of wheels, their files, the table of extras and the record of changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

from compress.cpu.build import find_compiler

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
COMPILERS = {"x86_64": find_compiler(), "aarch64": shutil.which("aarch64-linux-gnu-gcc")}
"""Compilers by the processor that they compile for."""
NUMBERS = {"x86_64": 62, "aarch64": 183}


@pytest.fixture
def hatch_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("hatchling", reason="needs hatchling, which the extra 'test' installs")
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    return hatch_build


def header(number: int) -> bytes:
    """The start of a 64-bit library for the processor of that number."""
    return b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + number.to_bytes(2, "little")


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "versions", "platform"),
    [
        (62, "2.2.5 2.34 2.9 2.17", "manylinux_2_34_x86_64"),
        (62, "2.2.5", "manylinux_2_2_x86_64"),
        (183, "2.17 2.27", "manylinux_2_27_aarch64"),
        (183, "2.34 3.0", "manylinux_3_0_aarch64"),
        (62, "PRIVATE 2.28", "manylinux_2_28_x86_64"),
    ],
)
def test_a_wheel_is_for_the_newest_version_that_its_library_needs(
    hatch_build: ModuleType, number: int, versions: str, platform: str
) -> None:
    needed = b"".join(b"\0GLIBC_" + version.encode() + b"\0" for version in versions.split())
    assert hatch_build.platform_of(header(number) + needed) == platform


@pytest.mark.full
@pytest.mark.parametrize("library", [header(62), header(243) + b"\0GLIBC_2.34\0", b"\xcf\xfa\xed\xfe GLIBC_2.34"])
def test_other_libraries_are_for_the_platform_they_are_built_on(hatch_build: ModuleType, library: bytes) -> None:
    """No version of the GNU C library, an unknown processor, no ELF."""
    found = hatch_build.platform_of(library)
    assert "manylinux" not in found
    assert re.fullmatch(r"\w+", found)


def build(folder: Path, target: str, *programs: Path) -> Path:
    """Builds a source distribution or a wheel of the sources in a folder, with programs before others on PATH."""
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", "built"]
    variables = {**os.environ, "PATH": path}
    result = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    [built] = (folder / "built").iterdir()
    return built


def sources(folder: Path) -> Path:
    """Copies what a source distribution is made of, without compiled files, and unpacks the distribution."""
    copy = folder / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "libnative.*", ".*-")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    with tarfile.open(build(copy, "sdist")) as archive:
        archive.extractall(folder)
    [unpacked] = folder.glob("compress_runtime-*")
    return unpacked


def quick_compiler(folder: Path, compiler: str) -> Path:
    """A folder with a `cc` that leaves optimizations out."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "cc"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O1\n')
    script.chmod(0o755)
    return script.parent


def version_by_readelf(library: Path) -> tuple[int, int]:
    """The newest version of the C library that binutils find among those needed."""
    command = ["readelf", "--version-info", "--wide", str(library)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return max((int(major), int(minor)) for major, minor in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", found.stdout))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3000)  # the C kernels are compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tags of Linux")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf: apt install binutils")
@pytest.mark.parametrize("processor", COMPILERS)
def test_sources_make_a_wheel(tmp_path: Path, processor: str) -> None:
    """The library is compiled for the processor that the tag names, and all files of the packages are there."""
    pytest.importorskip("hatchling", reason="needs hatchling, which the extra 'test' installs")
    compiler = COMPILERS[processor]
    if compiler is None or (processor == "x86_64" and os.uname().machine != "x86_64"):
        pytest.skip(f"no compiler for {processor}")
    wheel = build(sources(tmp_path), "wheel", quick_compiler(tmp_path, compiler))
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extract("compress/cpu/libnative.so", tmp_path)
    library = tmp_path / "compress" / "cpu" / "libnative.so"
    assert int.from_bytes(library.read_bytes()[18:20], "little") == NUMBERS[processor]
    major, minor = version_by_readelf(library)
    assert wheel.name.endswith(f"-py3-none-manylinux_{major}_{minor}_{processor}.whl")
    check_by_auditwheel(wheel)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert {"recipes/int4-awq.yaml", "calibration/data/stories.txt", "compress/demo_model/model.safetensors"} <= names
    files = {file.relative_to(ROOT).as_posix() for name in PACKAGES for file in (ROOT / name).rglob("*")}
    ignored = re.compile(r"__pycache__|libnative|/\.")
    assert not {name for name in files if not ignored.search(name) and (ROOT / name).is_file()} - names


def check_by_auditwheel(wheel: Path) -> None:
    """Compares the tag with the one that auditwheel finds, where that is installed."""
    auditwheel = shutil.which("auditwheel", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if auditwheel is None:
        return
    found = subprocess.run([auditwheel, "show", str(wheel)], capture_output=True, text=True, check=True)
    platform = wheel.stem.split("-")[-1]
    assert f'platform tag: "{platform}"' in " ".join(found.stdout.split())


def test_readme_has_all_extras_and_no_others() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = {extra: set(re.findall(r"[\w-]+", packages)) for extra, packages in rows}
    extras = PROJECT["project"]["optional-dependencies"]
    assert listed.keys() == extras.keys()
    for extra in extras.keys() - {"test"}:
        assert listed[extra] == {re.match(r"[\w-]+", needed)[0] for needed in extras[extra]}


def test_the_version_has_a_section_of_changes() -> None:
    headings = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["project"]["version"] in headings
