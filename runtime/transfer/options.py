"""Options of engines that compute prompts for others, or generate from such prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compress.common.cli import option
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig

BOTH, PREFILL, DECODE = "both", "prefill", "decode"

ARRIVAL_BYTES = 512 * 2**20
"""Host memory for pages that arrive, unless `--kv-offload` is given."""


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Prefill and decode in separate engines."""

    prefill_engines: int = option(
        default=0,
        min=0,
        metavar="ENGINES",
        help="Additional engines that only compute prompts. They send keys, values and recurrent states through shared "
        "memory to the engines of --data-parallel-size, which only generate.",
    )
    role: str = option(
        default=BOTH,
        choices=(BOTH, PREFILL, DECODE),
        help="What this server does where prefill and decode run in separate servers of one machine: prefill computes "
        "prompts for the servers that connect to its --transfer-socket, decode has prompts computed there.",
    )
    transfer_socket: list[Path] | None = option(
        default=None,
        metavar="PATH",
        help="Unix socket of --role prefill, which only this user can open. May be repeated with --role decode.",
    )
    transfer_connector: str = option(
        default="shared-memory",
        metavar="CONNECTOR",
        help="How pages move to an engine that generates: shared-memory, or nixl where NIXL is installed.",
    )
    local_prefill: int = option(
        default=64,
        min=0,
        metavar="TOKENS",
        help="Maximum prompt tokens outside of the prefix cache that an engine which generates computes itself.",
    )

    def checked(self, config: RuntimeConfig, has_process: bool) -> TransferOptions:
        """Returns these options.

        Raises:
            ToolkitError: they contradict each other, or the engine cannot send its pages.
        """
        if self.prefill_engines and self.role != BOTH:
            raise ToolkitError(
                f"--prefill-engines {self.prefill_engines} does not go with --role {self.role}",
                "Leave out --role: this server runs both kinds of engines",
            )
        count = len(self.transfer_socket or ())
        if (self.role != BOTH) != bool(count) or (self.role == PREFILL and count > 1):
            raise ToolkitError(
                f"--role {self.role} with {count} of --transfer-socket",
                "Give --role prefill one, --role decode one or more, and no other server any",
            )
        if self.role == BOTH and not self.prefill_engines:
            return self
        if not has_process:
            raise ToolkitError("--no-api-process does not go with engines apart", "Leave out --no-api-process")
        if config.num_ranks > 1:
            problem = f"the pages of {config.num_ranks} processes that share a model cannot be sent to other engines"
            raise ToolkitError(problem, "Use whole models (--tensor-parallel-size 1), or --data-parallel-size alone")
        if config.kv_residual_length:
            raise_residual(config.kv_residual_length)
        return self

    def parts(self, count: int, folder: Path) -> list[TransferPart]:
        """Returns the part of each of `count` engines, and then of those that compute prompts.

        Args:
            folder: for their sockets.
        """
        generating = self.local_prefill, self.transfer_connector
        if self.role != BOTH:
            return [TransferPart(self.role, tuple(self.transfer_socket or ()), *generating)] * count
        sockets = tuple(folder / f"prefill-{index}" for index in range(self.prefill_engines))
        part = TransferPart(DECODE if sockets else BOTH, sockets, *generating)
        return [part] * count + [TransferPart(PREFILL, (socket,)) for socket in sockets]


@dataclass(frozen=True, slots=True)
class TransferPart:
    """Exchange of one engine with others.

    Attributes:
        sockets: its own Unix socket, or those of the engines that compute its prompts.
        local_tokens, connector: of an engine that generates, see `TransferOptions`.
    """

    role: str = BOTH
    sockets: Sequence[Path] = ()
    local_tokens: int = 0
    connector: str = "shared-memory"

    def adapt(self, config: RuntimeConfig) -> RuntimeConfig:
        """Returns a configuration with host memory for pages that arrive."""
        if self.role != DECODE or config.kv_offload_bytes:
            return config
        return replace(config, kv_offload_bytes=ARRIVAL_BYTES)


ALONE = TransferPart()


def raise_residual(num_tokens: int) -> None:
    """Raises ToolkitError: the last tokens of a sequence are stored outside of its pages."""
    problem = f"the last {num_tokens} tokens in 16 bits lie outside of the pages that engines send"
    raise ToolkitError(problem, "Use --kv-residual-length 0, or one engine for prefill and decode")
