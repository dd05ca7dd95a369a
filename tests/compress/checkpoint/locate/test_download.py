"""Downloads from a hub on loopback, by real processes: what is asked for, what is refused, what continues."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_command import HEED_INTERRUPTS
from small_hub import TOKEN, Repository, SmallHub, commit_of, serving_hub

from compress.checkpoint.locate.hub import HubModel
from compress.checkpoint.safetensors import TensorFiles
from compress.common.cli import demo_model_path

WEIGHTS = "model.safetensors"
FIND = (
    "import sys\nfrom compress.common.errors import ToolkitError\nfrom compress.checkpoint.locate import find_model\n"
    "need = {'weights': 'config' not in sys.argv, 'values': 'headers' not in sys.argv, 'code': 'code' in sys.argv}\n"
    "try: print(find_model(sys.argv[1], **need))\n"
    "except ToolkitError as error: sys.exit(f'{error.problem}|{error.remedy}')\n"
    "assert 'torch' not in sys.modules"
)


def find(hub: SmallHub, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Finds a model in a process of its own, with a cache in `home`."""
    command = [sys.executable, "-c", FIND, *arguments]
    return subprocess.run(
        command, cwd=home, env=hub.environment(home, **more), capture_output=True, text=True, timeout=120
    )


def found(hub: SmallHub, home: Path, *arguments: str, **more: str) -> Path:
    answer = find(hub, home, *arguments, **more)
    assert answer.returncode == 0, answer.stderr
    return Path(answer.stdout.strip())


def refusal(hub: SmallHub, home: Path, *arguments: str, **more: str) -> list[str]:
    """Problem and remedy of a refusal in one line."""
    answer = find(hub, home, *arguments, **more)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    return answer.stderr.splitlines()[-1].split("|")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo model and much that is not read."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(demo_model_path(), folder)
    for name in ("pytorch_model.bin", "code.py", "picture.png", "consolidated.safetensors"):
        (folder / name).write_bytes(b"x" * 100)
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return folder


@pytest.fixture
def hub(other: Path) -> Iterator[SmallHub]:
    models = {
        "org/demo": Repository({"main": demo_model_path(), "v1": other}),
        "org/other": Repository({"main": other}),
    }
    with serving_hub(models) as hub:
        yield hub


def test_a_model_is_downloaded_once_and_announced(hub: SmallHub, tmp_path: Path) -> None:
    first = find(hub, tmp_path, "org/demo")
    folder = Path(first.stdout.strip())
    assert (folder / WEIGHTS).read_bytes() == (demo_model_path() / WEIGHTS).read_bytes()
    assert "org/demo" in first.stderr
    assert "14.19 MB" in first.stderr
    assert len(first.stderr.splitlines()) == 1  # without a terminal, nothing moves
    hub.requests.clear()
    second = find(hub, tmp_path, "org/demo")
    assert Path(second.stdout.strip()) == folder
    assert not second.stderr
    assert not hub.files()


def test_only_what_is_read_is_downloaded(hub: SmallHub, tmp_path: Path) -> None:
    found(hub, tmp_path, "org/other")
    assert set(hub.files()) == {file.name for file in demo_model_path().iterdir()}
    hub.requests.clear()
    found(hub, tmp_path, "org/other", "code")
    assert hub.files() == ["code.py"]


def test_weights_are_left_out_where_the_config_suffices(hub: SmallHub, tmp_path: Path) -> None:
    folder = found(hub, tmp_path, "org/demo", "config")
    assert (folder / "config.json").is_file()
    assert WEIGHTS not in hub.files()
    assert "HF_HUB_OFFLINE" in refusal(hub, tmp_path, "org/demo", HF_HUB_OFFLINE="1")[1]


def test_a_revision_has_a_folder_of_its_own(hub: SmallHub, tmp_path: Path) -> None:
    assert found(hub, tmp_path, "org/demo@v1").name == commit_of("v1")
    assert found(hub, tmp_path, f"org/demo@{commit_of('main')}").name == commit_of("main")


def test_a_cut_connection_continues_where_it_broke(hub: SmallHub, tmp_path: Path) -> None:
    hub.cuts[WEIGHTS] = 12_000_000  # past the first of the chunks that are written
    folder = found(hub, tmp_path, "org/demo")
    assert (folder / WEIGHTS).read_bytes() == (demo_model_path() / WEIGHTS).read_bytes()
    ranges = [asked for method, path, asked in hub.requests if path.endswith(WEIGHTS) and method == "GET"]
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=")
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 12_000_000


def test_a_killed_download_keeps_complete_files(hub: SmallHub, tmp_path: Path) -> None:
    hub.holds[WEIGHTS] = 5_000_000
    process = subprocess.Popen([sys.executable, "-c", FIND, "org/demo"], cwd=tmp_path, env=hub.environment(tmp_path))
    assert hub.held.wait(60)
    while len(hub.files()) < 7:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.released.set()
    hub.requests.clear()
    folder = found(hub, tmp_path, "org/demo")
    assert (folder / WEIGHTS).read_bytes() == (demo_model_path() / WEIGHTS).read_bytes()
    assert hub.files()[-1] == WEIGHTS


def test_ctrl_c_does_not_wait_for_the_file(hub: SmallHub, tmp_path: Path) -> None:
    hub.holds[WEIGHTS] = 5_000_000
    command = [sys.executable, "-c", FIND, "org/demo"]
    environment = hub.environment(tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="60")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, preexec_fn=HEED_INTERRUPTS
    )
    assert hub.held.wait(60)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT
    assert not hub.released.is_set()


def test_gated_models_need_a_token(hub: SmallHub, tmp_path: Path) -> None:
    hub.models["org/gated"] = Repository({"main": demo_model_path()}, is_gated=True)
    problem, remedy = refusal(hub, tmp_path, "org/gated")
    assert "org/gated" in problem
    assert "hf auth login" in remedy
    assert f"{hub.url}/org/gated" in remedy
    assert found(hub, tmp_path, "org/gated", HF_TOKEN=TOKEN).is_dir()


def test_names_that_the_hub_does_not_know(hub: SmallHub, tmp_path: Path) -> None:
    problem, remedy = refusal(hub, tmp_path, "org/none")
    assert "org/none" in problem
    assert hub.url in remedy
    assert "hf auth login" in remedy
    problem, remedy = refusal(hub, tmp_path, "org/demo@v7")
    assert "v7" in problem
    assert f"{hub.url}/org/demo" in remedy
    assert "org/a--b" in refusal(hub, tmp_path, "org/a--b")[0]


def test_what_is_in_the_cache_needs_no_network(hub: SmallHub, tmp_path: Path) -> None:
    folder = found(hub, tmp_path, "org/demo")
    hub.requests.clear()
    assert found(hub, tmp_path, "org/demo", HF_HUB_OFFLINE="1") == folder
    assert not hub.requests
    assert "HF_HUB_OFFLINE" in refusal(hub, tmp_path, "org/other", HF_HUB_OFFLINE="1")[1]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert found(hub, tmp_path, "org/demo", **nowhere) == folder
    problem, remedy = refusal(hub, tmp_path, "org/other", **nowhere)
    assert "127.0.0.1:9" in problem
    assert "again" in remedy


def test_pickles_are_refused_with_the_command_that_converts_them(hub: SmallHub, tmp_path: Path) -> None:
    folder = tmp_path / "pickles"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    hub.models["org/pickles"] = Repository({"main": folder})
    problem, remedy = refusal(hub, tmp_path, "org/pickles")
    assert "pytorch_model.bin" in problem
    assert "python -c" in remedy
    assert not hub.files()


def test_a_full_disk_is_refused_before_the_download(hub: SmallHub, tmp_path: Path) -> None:
    shim = tmp_path / "sitecustomize.py"
    shim.write_text("import shutil\nshutil.disk_usage = lambda path: shutil._ntuple_diskusage(9, 8, 1_000_000)\n")
    paths = hub.environment(tmp_path)["PYTHONPATH"]
    problem, remedy = refusal(hub, tmp_path, "org/demo", PYTHONPATH=f"{tmp_path}:{paths}")
    assert "14.19 MB" in problem
    assert "1.00 MB" in problem
    assert "HF_HOME" in remedy
    assert not hub.files()


def test_gguf_files_are_listed_and_downloaded_by_name(hub: SmallHub, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    for name, size in {"m-Q4_0.gguf": 400, "sub/m-00001-of-00002.gguf": 100, "sub/m-00002-of-00002.gguf": 50}.items():
        (folder / name).write_bytes(b"x" * size)
    hub.models["org/files"] = Repository({"main": folder})
    for name in ("org/files", "org/files:none.gguf"):
        _, remedy = refusal(hub, tmp_path, name)
        assert "org/files:m-Q4_0.gguf (400 bytes)" in remedy
        assert "org/files:sub/m-00001-of-00002.gguf (150 bytes)" in remedy
        assert "00002-of" not in remedy
    assert found(hub, tmp_path, "org/files:m-Q4_0.gguf").stat().st_size == 400
    hub.requests.clear()
    first = found(hub, tmp_path, "org/files:sub/m-00001-of-00002.gguf")
    assert sorted(file.name for file in first.parent.iterdir()) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert len(hub.files()) == 2


def test_shards_are_those_of_the_index(hub: SmallHub, tmp_path: Path, other: Path) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(other, folder)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    hub.models["org/shards"] = Repository({"main": folder})
    assert (found(hub, tmp_path, "org/shards") / "model-00001-of-00001.safetensors").is_file()
    assert "consolidated.safetensors" not in hub.files()


def test_headers_of_shards_are_read_once(hub: SmallHub, tmp_path: Path, other: Path) -> None:
    folder, shard = tmp_path / "shards", "model-00001-of-00001.safetensors"
    shutil.copytree(other, folder)
    (folder / WEIGHTS).rename(folder / shard)
    whole = TensorFiles.open(demo_model_path())
    index = {"weight_map": dict.fromkeys(whole.names(), shard)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    hub.models["org/shards"] = Repository({"main": folder})
    headers = found(hub, tmp_path, "org/shards", "headers")
    files = TensorFiles.open(headers)
    assert {name: files.shape(name) for name in files.names()} == {name: whole.shape(name) for name in whole.names()}
    assert files.tensor("model.norm.weight").is_meta
    assert HubModel.of_cached(headers) == HubModel("org/shards", commit_of("main"))
    hub.requests.clear()
    assert found(hub, tmp_path, "org/shards", "headers") == headers
    assert shard not in hub.files()
    weights = found(hub, tmp_path, "org/shards")
    assert (weights / shard).read_bytes() == (folder / shard).read_bytes()
    assert found(hub, tmp_path, "org/shards", "headers") == weights


def test_a_damaged_header_is_refused(hub: SmallHub, tmp_path: Path, other: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(other, folder)
    (folder / WEIGHTS).write_bytes(b"\xff" * 200)
    hub.models["org/damaged"] = Repository({"main": folder})
    problem, _ = refusal(hub, tmp_path, "org/damaged", "headers")
    assert WEIGHTS in problem
