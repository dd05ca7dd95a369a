"""Ray Serve over the application of this server: `serve run runtime.deploy.ray:app model=demo`.

One ingress reads each request and sends it to a replica, whose answer it passes on as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from runtime.core.config import Limits, RuntimeConfig
from runtime.core.progress import ignore
from runtime.deploy.replicas import MOST_KEYS, ReplicaOptions, prefix_keys
from runtime.routing.prefixes import SentPrefixes
from runtime.served_engine import EngineSource, LoadingHere
from runtime.server.app import create_app
from runtime.server.errors import RETRY_LATER, ApiError
from runtime.server.keys import ApiKeys, load_accounts

SCOPE = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "client", "server")
MOST_REQUESTS = 100_000
"""Requests that Ray sends to a replica at once: the application has its own queue and limits."""
TRIES = 3
"""Replicas that may end before a request whose answer has not begun fails."""


class PrefixRouter(RequestRouter):
    """Chooses the replica that got the start of a prompt before; see `SentPrefixes`."""

    def initialize_state(self, **_: Any) -> None:
        """Starts without prefixes. Ray calls it."""
        self.prefixes = SentPrefixes(MOST_KEYS)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns replicas in order of preference, each a rank of its own."""
        by_name = {str(each.replica_id): each for each in candidate_replicas}
        known = self.replica_queue_len_cache
        loads = {name: known.get(each.replica_id) or 0 for name, each in by_name.items()}
        keys = pending_request.args[0] if pending_request is not None else ()
        return [[by_name[name]] for name in self.prefixes.choose(keys, loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Notes the replica of a prompt."""
        self.prefixes.note(pending_request.args[0], str(replica_id))


class Replica:
    """A server of the model without a socket.

    Args:
        model: folder of the checkpoint.
        name: model name in the API.
        config: settings of the engine.
        limits: settings of `LimitOptions`.
        api_key, api_keys: as the options of `runtime serve`.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        model: Path,
        name: str,
        config: RuntimeConfig,
        limits: dict[str, Any],
        api_key: str | None = None,
        api_keys: Path | None = None,
    ) -> None:
        served = await asyncio.to_thread(LoadingHere(EngineSource(model, config)).finish, ignore)
        keys = ApiKeys(partial(load_accounts, api_key, api_keys)) if api_key or api_keys else None
        allowed = Limits(**limits, max_model_len=served.facts.max_model_len)
        self.client = served.client
        self.app = create_app(served.client, served.tokenizer, name, allowed, keys=keys)
        self.running = self.app.router.lifespan_context(self.app)
        await self.running.__aenter__()

    async def answer(self, _: list[bytes], scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Yields the messages of an answer in the form of ASGI."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            return unread.pop() if unread else await asyncio.Future()

        task = asyncio.create_task(self.app({**scope, "asgi": {"version": "3.0"}}, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while message := await messages.get():
                yield message
            await task
        finally:
            task.cancel()

    def check_health(self) -> None:
        """Raises RuntimeError if the engine is unhealthy, after which Ray replaces this replica."""
        if not (health := self.client.check()).healthy:
            raise RuntimeError(health.reason)


class Ingress:
    """Sends requests to replicas. One whose replica ends before its answer begins goes to another."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self.replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body, scope = await request.body(), {name: request.scope.get(name) for name in SCOPE}
        for _ in range(TRIES):
            messages = self.replicas.answer.remote(prefix_keys(body), scope, body)
            try:
                start = await anext(messages)
            except RayActorError:
                continue
            response = StreamingResponse(pieces(messages), start["status"])
            response.raw_headers = start["headers"]
            return response
        return ApiError(503, "Its replicas ended. Try again.", code="replica_ended", headers=RETRY_LATER).response()


async def pieces(messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yields the body of an answer."""
    async for message in messages:
        yield message.get("body", b"")


def app(args: dict[str, Any]) -> serve.Application:
    """Builds the application of Ray Serve.

    Args:
        args: fields of `ReplicaOptions`, and `model`, `name`, `config`, `limits`, `api_key` and `api_keys` of
            `Replica`, all but `model` optional.
    """
    from compress.checkpoint.gguf.folder import folder_of

    options = ReplicaOptions(**{name: args[name] for name in ReplicaOptions.__dataclass_fields__ if name in args})
    given = {name: args[name] for name in ("api_key", "api_keys") if name in args}
    config = args.get("config", {})
    config = config if isinstance(config, RuntimeConfig) else RuntimeConfig(**config)
    router = {"request_router_config": RequestRouterConfig(request_router_class=PrefixRouter)}
    replicas = serve.deployment(Replica).options(
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=max(options.min_replicas, options.max_replicas),
            target_ongoing_requests=options.target_ongoing_requests,
        ),
        max_ongoing_requests=MOST_REQUESTS,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        **(router if options.prefix_routing else {}),
    )
    path = folder_of(args["model"])
    bound = replicas.bind(path, args.get("name", path.name), config, args.get("limits", {}), **given)
    ingress = serve.deployment(Ingress).options(max_ongoing_requests=MOST_REQUESTS, ray_actor_options={"num_cpus": 0})
    return ingress.bind(bound)
