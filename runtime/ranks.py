"""Processes that share a model: started by the first rank, whose plans they follow."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import TCPStore

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.device import resolve_device, total_bytes
from compress.common.errors import ToolkitError
from compress.cpu.binding import available_threads, library, set_threads
from compress.models.cuts import Rank
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import DecoderConfig
from runtime.core.step import RunnerLostError
from runtime.engine.wire import describe_end, frame, leave_signals_to_parent, receive, send, start_process
from runtime.memory.plan import pool_bytes
from runtime.model.decoder import Decoder
from runtime.model.loader import cut_model, load_model, read_model
from runtime.parallel.group import HOST, Group, Others
from runtime.parallel.launch import Launch, find_launch
from runtime.parallel.stages import Stage, plan_stages
from runtime.parallel.steps import KeptAdapters, StepTold
from runtime.parallel.vocabulary import ProductWanted, SharedHead
from runtime.runner.runner import ModelRunner, build_runner
from runtime.speculative.ngram import MTP, TREES

WATCH_SECONDS = 0.1
"""Time between two looks at whether a rank has ended."""
GRACE_SECONDS = 3.0
"""Time for a step to notice that a rank has ended, before the process of the first one ends at once."""


@dataclass(frozen=True, slots=True)
class RankSource:
    """Source of the part of a rank.

    Attributes:
        index: its number.
        host, port: where the first rank keeps the addresses of all.
    """

    path: Path
    config: RuntimeConfig
    index: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank other than the first.

    Attributes:
        process: None where `torchrun` has started it.
    """

    index: int
    connection: socket.socket
    process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        return bool(select.select([self.connection], [], [], 0)[0])  # it sends nothing as long as it follows

    def explain(self) -> ToolkitError | None:
        """Returns why it has ended; None while it runs."""
        if not self.has_ended:
            return None
        with suppress(EOFError, OSError):
            said = receive(self.connection)
            if isinstance(said, ToolkitError):
                return said
        end = "closed its connection" if self.process is None else describe_end(self.process)
        return RunnerLostError(f"rank {self.index} {end}", "Its messages are above")


class Followers(Others):
    """All ranks but the first. They end when this object, or this process, does."""

    def __init__(self, followers: Sequence[Follower]) -> None:
        self._all, self._is_over = followers, False

    def wait(self) -> None:
        """Waits until all have imported what they need. Raises ToolkitError if one has ended."""
        for follower in self._all:
            try:
                receive(follower.connection)
            except EOFError as error:
                raise self.explain() from error

    def connect(self, connect: Callable[[], Group]) -> Group:
        """Connects this process with the others, in a thread: it would wait for one that has ended until operations
        time out.

        Raises:
            ToolkitError: one has ended.
        """
        found = Future[Group]()

        def run() -> None:
            try:
                found.set_result(connect())
            except Exception as error:  # whatever it is, it is raised below
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not found.done():
            wait([found], WATCH_SECONDS)
            if (reason := next(filter(None, map(Follower.explain, self._all)), None)) is not None:
                raise reason
        return found.result()

    def tell(self, message: Any) -> None:
        content = frame(message)
        for follower in self._all:
            try:
                follower.connection.sendall(content)
            except OSError as error:
                raise self.explain() from error

    def explain(self) -> ToolkitError:
        """Waits until one of them has ended, for a moment; says why."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            for follower in self._all:
                if (reason := follower.explain()) is not None:
                    return reason
            time.sleep(0.01)
        return RunnerLostError("a rank gives no answer", "Its messages are above")

    def watch(self) -> None:
        """Starts threads that end this process, with status 1, soon after one of the others has ended."""
        for follower in self._all:
            threading.Thread(target=self._watch, args=(follower,), daemon=True).start()

    def _watch(self, follower: Follower) -> None:
        while not self._is_over and not follower.has_ended:
            time.sleep(WATCH_SECONDS)
        time.sleep(GRACE_SECONDS)  # a step that waits for it fails by itself, and says more
        if not self._is_over:
            print(f"{follower.explain()} This process ends too.", file=sys.stderr, flush=True)
            os._exit(1)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        self._is_over = True
        for follower in self._all:
            follower.connection.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in (follower.process for follower in self._all):
            if process is None:
                continue
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_rank(source: RankSource) -> Follower:
    """Starts the process of a rank."""
    mine, theirs = socket.socketpair()
    follower = Follower(source.index, mine, start_process("runtime.ranks:main", theirs))
    with suppress(ConnectionError):  # `explain` says how it ended
        send(mine, source)
    return follower


def joined(launch: Launch, sources: Sequence[RankSource]) -> list[Follower]:
    """Waits for the ranks that `torchrun` has started. Raises ToolkitError if they are of another number."""
    connections = launch.accept(1 + len(sources))
    for source, connection in zip(sources, connections, strict=True):
        send(connection, source)
    return [Follower(source.index, connection) for source, connection in zip(sources, connections, strict=True)]


def join_launch(launch: Launch) -> None:
    """Follows the first of the processes that `torchrun` has started."""
    connection = launch.connect()
    leave_signals_to_parent()
    serve_rank(connection, launch)


@contextmanager
def ranks_started(path: Path, config: RuntimeConfig) -> Iterator[Group]:
    """Starts the other ranks of a model, and ends them if the block fails.

    Raises:
        ToolkitError: ranks cannot share this model, or do what is asked for; or one of them has ended.
    """
    place, launch = check_ranks(path, config)[0], find_launch()
    device = device_of(config.device, 0)
    host = HOST if launch is None else launch.host
    store = TCPStore(host, 0, config.num_ranks, is_master=True, wait_for_workers=False)
    sources = [RankSource(path, config, index, host, store.port) for index in range(1, config.num_ranks)]
    followers = Followers([start_rank(source) for source in sources] if launch is None else joined(launch, sources))
    try:
        share_threads(config.num_ranks if launch is None else launch.num_local)
        followers.wait()
        if config.ends_with_ranks:
            followers.watch()
        shared = config.sequence_parallel_min_tokens
        yield followers.connect(partial(Group, place.rank, store, device, followers, place.stage, host, shared))
    except BaseException:
        followers.close()
        raise


@dataclass(frozen=True, slots=True)
class Place:
    """Parts of a model that a rank holds: of every matrix, in the layers of its stage; in all if that is None."""

    rank: Rank
    stage: Stage | None


def check_ranks(path: Path, config: RuntimeConfig) -> list[Place]:
    """Decides what each rank holds.

    Raises:
        ToolkitError: models that ranks cannot share, and options that do not go with them.
    """
    drafter = config.speculative_model
    if drafter in (TREES, MTP) or drafter.startswith("self:"):
        raise ToolkitError(
            f"--speculative-model {drafter} does not go with {config.num_ranks} ranks",
            "Use --speculative-model ngram or a draft model",
        )
    if config.moe_expert_cache is not None:
        raise ToolkitError(
            "experts in host memory do not go with --tensor-parallel-size", "Leave out --moe-expert-cache"
        )
    checkpoint = PackedCheckpoint.open(path)
    model = read_model(checkpoint, config.trust_remote_code)
    if config.enable_expert_parallel:
        check_experts(model, config)
    if config.sequence_parallel_min_tokens:
        check_shared_tokens(config)
    count = config.tensor_parallel_size
    ranks = [Rank(index, count, config.enable_expert_parallel) for index in range(count)]
    for rank in ranks if len(ranks) > 1 else ():
        cut_model(model, checkpoint, rank)
    stages: Sequence[Stage | None] = (None,)
    if config.pipeline_parallel_size > 1:
        stages = plan_stages(model, checkpoint, config.pipeline_parallel_size, pool_bytes(config))
    return [Place(rank, stage) for stage in stages for rank in ranks]


def check_experts(model: DecoderConfig, config: RuntimeConfig) -> None:
    """Raises ToolkitError where there are no experts, or no ranks that could share them."""
    has_experts = any(block.mixture is not None for block in model.spec.blocks)
    if not has_experts or config.tensor_parallel_size == 1:
        problem = "one rank shares no experts" if has_experts else "this model has no experts to share"
        raise ToolkitError(problem, "Leave out --enable-expert-parallel, or use --tensor-parallel-size with a mixture")


def check_shared_tokens(config: RuntimeConfig) -> None:
    """Raises ToolkitError where no ranks could share tokens, and for adapters, which know the rows of whole steps."""
    if config.tensor_parallel_size > 1 and not config.serves_adapters:
        return
    problem = "adapters do not go with" if config.serves_adapters else "one rank shares no tokens by"
    raise ToolkitError(f"{problem} --sequence-parallel-min-tokens", "Leave it out, or use --tensor-parallel-size alone")


def share_threads(num_ranks: int) -> None:
    """Lets this process compute with its share of the cores."""
    count = max(1, available_threads() // num_ranks)
    torch.set_num_threads(count)
    if library() is not None:
        set_threads(count)


def device_of(name: str, index: int) -> torch.device:
    """Returns the device of a rank: a GPU for each."""
    device = resolve_device(name)
    if device.type != "cuda":
        return device
    if index >= torch.cuda.device_count():
        raise ToolkitError(
            f"rank {index} has no GPU: there are {torch.cuda.device_count()}", "Use a smaller --tensor-parallel-size"
        )
    return torch.device("cuda", index)


def main(end: int) -> None:
    """Runs a rank in a process of its own.

    Args:
        end: file descriptor of this end.
    """
    leave_signals_to_parent()
    serve_rank(socket.socket(fileno=end))


def serve_rank(connection: socket.socket, launch: Launch | None = None) -> None:
    """Loads and follows as a rank until the other end of a socket is closed."""
    source: RankSource = receive(connection)
    try:
        runner = join(source, connection, launch)
    except ToolkitError as error:
        send(connection, error)
        sys.exit(1)
    adapters = KeptAdapters(source.config.max_cpu_loras)
    with suppress(EOFError):
        while True:
            follow(receive(connection), runner, adapters)


def join(source: RankSource, connection: socket.socket, launch: Launch | None) -> ModelRunner:
    """Loads the part of a rank. Says to the first rank when it can be connected to."""
    config = source.config
    place = check_ranks(source.path, config)[source.index]
    share_threads(config.num_ranks if launch is None else launch.num_local)
    device = device_of(config.device, source.index if launch is None else launch.local_index)
    send(connection, None)
    store = TCPStore(source.host, source.port, config.num_ranks, is_master=False)
    host = HOST if launch is None else connection.getsockname()[0]
    group = Group(place.rank, store, device, Others(), place.stage, host, config.sequence_parallel_min_tokens)
    decoder = load_model(
        source.path, device=str(device), dtype=config.dtype, kernels=config.linear_backend, group=group
    )
    config = replace(config.with_step_sizes(total_bytes(device)), speculative_model="")
    return build_runner(decoder, config, group=group)


def follow(message: Any, runner: ModelRunner, adapters: KeptAdapters) -> None:
    """Computes what the first rank computes."""
    decoder = cast(Decoder, runner.decoder)
    match message:
        case StepTold():
            runner.submit(message.plan(adapters))
        case ProductWanted() if isinstance(decoder.head, SharedHead):
            with torch.inference_mode():
                decoder.head.follow(message, decoder.config.spec.hidden_size, decoder.dtype)
