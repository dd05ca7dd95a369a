"""Connects an engine to those that it exchanges pages with."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from compress.common.errors import ToolkitError
from runtime.engine.engine_loop import EngineLoop
from runtime.runner.runner import ModelRunner
from runtime.transfer.connector import CONNECTORS
from runtime.transfer.memory import find_parts, host_shapes, place_host
from runtime.transfer.messages import Hello
from runtime.transfer.options import PREFILL, TransferPart, raise_residual
from runtime.transfer.prefill_peer import PrefillPeer
from runtime.transfer.receiver import PageReceiver
from runtime.transfer.sender import PageSender

TAIL_BYTES = 2**16
"""Bytes at the end of a file of weights that tell models of equal sizes apart."""


def describe_model(path: Path, runner: ModelRunner) -> str:
    """Returns a text that is equal for engines whose pages are equal."""
    digest = blake2b(digest_size=8)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("config.json"))
    for each in files:
        with each.open("rb") as file:
            file.seek(max(0, each.stat().st_size - TAIL_BYTES))
            digest.update(f"{each.name} {each.stat().st_size}".encode() + file.read())
    decoder, memory = runner.decoder, runner.memory
    return (
        f"model {digest.hexdigest()} in {decoder.dtype} on {decoder.device.type}, KV cache {memory.kv_cache}, "
        f"states {memory.states.dtype}, pages of {memory.block_size} tokens"
    )


def join(loop: EngineLoop, runner: ModelRunner, path: Path, part: TransferPart) -> None:
    """Connects an engine that has computed nothing yet.

    Args:
        path: of its model.

    Raises:
        ToolkitError: its pages do not hold all of a sequence, or its socket or connector is not usable.
    """
    if not runner.shares_blocks:
        raise_residual(runner.memory.kv_cache.residual_length)
    if not loop.engine.scheduler.pool.prefix_caching:
        raise ToolkitError("pages are sent by the hashes of the prefix cache, which is off", "Turn prefix caching on")
    model, parts = describe_model(path, runner), find_parts(runner.memories, runner.states)
    if part.role == PREFILL:
        loop.transfer = PageSender(loop, parts, model, part.sockets[0])
        return
    connector = CONNECTORS.find(part.connector)
    if reason := connector.unsupported_reason():
        raise ToolkitError(f"--transfer-connector {part.connector}: {reason}", "Use --transfer-connector shared-memory")
    offered = place_host(parts, connector)
    hello = Hello(model, part.connector, host_shapes(parts))
    loop.transfer = receiver = PageReceiver(loop, part.local_tokens)
    receiver.peers = [PrefillPeer(socket, hello, offered, receiver) for socket in part.sockets]
