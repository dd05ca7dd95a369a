"""Memory that two processes share: rows that one writes are those that the other one reads, whoever ends first."""

import os
import socket

import pytest
import torch

from runtime.transfer.connector import CONNECTORS, RowShape

SHAPES = {
    "codes": RowShape(3, (2, 5), torch.uint8),
    "scales": RowShape(3, (7,), torch.float16),
    "states": RowShape(2, (3,), torch.float64),
    "none": RowShape(0, (4,), torch.float32),
}


def content(name: str, row: int) -> torch.Tensor:
    shape = SHAPES[name]
    return (torch.arange(torch.Size(shape.shape).numel()) + 10 * row).view(shape.shape).to(shape.dtype)


def write_and_die(control: socket.socket) -> None:
    """Runs in a child process."""
    remote = CONNECTORS["shared-memory"].accept(control, SHAPES)
    for name, shape in SHAPES.items():
        for row in range(shape.num_rows):
            remote.write(name, row, content(name, row))
    remote.flush()
    control.send(b"!")
    os.kill(os.getpid(), 9)


def test_rows_of_a_process_that_was_killed_are_read() -> None:
    offered = CONNECTORS["shared-memory"].offer(SHAPES)
    mine, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        write_and_die(theirs)
    offered.send(mine)
    assert mine.recv(1) == b"!"
    os.waitpid(child, 0)
    for name, shape in SHAPES.items():
        assert offered.tensors[name].shape == (shape.num_rows, *shape.shape)
        for row in range(shape.num_rows):
            assert torch.equal(offered.tensors[name][row], content(name, row)), name


def test_a_connection_that_ends_first() -> None:
    mine, theirs = socket.socketpair()
    mine.close()
    with pytest.raises(EOFError):
        CONNECTORS["shared-memory"].accept(theirs, SHAPES)


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    offered = CONNECTORS["shared-memory"].offer(SHAPES)
    mine, theirs = socket.socketpair()
    offered.send(mine)
    remote = CONNECTORS["shared-memory"].accept(theirs, SHAPES)
    mine.close()
    theirs.close()
    del offered, remote
    assert len(os.listdir("/proc/self/fd")) == before
