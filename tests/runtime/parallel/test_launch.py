"""Processes that torchrun starts share a model; those of another number are refused."""

import socket
import subprocess
import sys

import pytest

from runtime.parallel.launch import SECRET_BYTES, index_of

SECRET = bytes(range(SECRET_BYTES))
PROMPT = ("generate", "demo", "--prompt", "Once", "--max-tokens", "12", "--temperature", "0", "--dtype", "float32")


def torchrun(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "runtime.cli"]
    return subprocess.run([*command, *PROMPT, *options], capture_output=True, text=True, timeout=180)


@pytest.mark.full
@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_started_processes_join(option: str) -> None:
    alone = subprocess.run([sys.executable, "-m", "runtime.cli", *PROMPT], capture_output=True, text=True, timeout=120)
    joined = torchrun(option, "2")
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout == alone.stdout
    assert joined.stdout.strip()


@pytest.mark.full
def test_another_number_of_processes_is_refused() -> None:
    refused = torchrun()
    assert refused.returncode != 0
    assert "--pipeline-parallel-size" in refused.stderr


@pytest.mark.parametrize(("said", "index"), [(SECRET + b"\0\0\0\3", 3), (b"x" * 16 + b"\0\0\0\3", None), (b"", None)])
def test_who_does_not_know_the_secret_is_no_rank(said: bytes, index: int | None) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        assert index_of(mine, SECRET) == index
