"""Memory and context of models before they are loaded, computed in a process of its own: it imports torch."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.engine.wire import describe_end, leave_signals_to_parent, receive, send, start_process


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model.

    Attributes:
        num_bytes: weights, KV cache, activations and process of an engine, as `runtime memory` estimates them; adapters
            on the device; on a CPU also `--kv-offload`.
        free_bytes: memory that is free now on its device.
        max_model_len: tokens of its longest sequence.
        device: `cpu` or `cuda`.
    """

    num_bytes: int
    free_bytes: int
    max_model_len: int
    device: str


Asked = Sequence[tuple[Path, RuntimeConfig]]
"""Models, and the configuration of each."""


def measure_apart(asked: Asked) -> list[ModelSize]:
    """Returns the sizes of models.

    Raises:
        CheckpointError: a folder cannot be read or served.
        ToolkitError: this machine or model does not support the configuration.
    """
    mine, theirs = socket.socketpair()
    with mine:
        process = start_process("runtime.model_sizes:main", theirs)
        try:
            send(mine, asked)
            found: list[ModelSize] | ToolkitError = receive(mine)
        except (EOFError, ConnectionError):
            problem = f"the process that measures models {describe_end(process)}"
            raise ToolkitError(problem, "Its messages are above; without any, memory was short") from None
        finally:
            process.kill()
            process.wait()
    if isinstance(found, ToolkitError):
        raise found
    return found


def measure(path: Path, config: RuntimeConfig) -> ModelSize:
    """Returns the size of a model. Imports torch. Raises the errors of `measure_apart`."""
    from compress.common.device import resolve_device
    from runtime.memory.advice import inspect
    from runtime.memory.capacity import ITEM_SIZES

    report = inspect(path, "", config)
    capacity, plan = report.capacity, report.plan
    pool, length = (0, capacity.context) if isinstance(plan, str) else (plan.pool_bytes, plan.max_model_len)
    needed = capacity.weight_bytes + report.expert_bytes + capacity.activation_bytes + capacity.process_bytes
    if config.serves_adapters:
        features = sum(sum(linear.shape) for linear in report.model.spec.linears())
        needed += config.max_loras * config.max_lora_rank * features * ITEM_SIZES[capacity.dtype]
    device = resolve_device(config.device).type
    needed += config.kv_offload_bytes if device == "cpu" else 0
    return ModelSize(needed + pool, capacity.memory_bytes, length, device)


def main(end: int) -> None:
    """Answers one question over a socket. Runs in a process of its own.

    Args:
        end: file descriptor of this end.
    """
    leave_signals_to_parent()
    with socket.socket(fileno=end) as connection:
        asked = cast(Asked, receive(connection))
        try:
            send(connection, [measure(path, config) for path, config in asked])
        except ToolkitError as error:
            send(connection, error)
