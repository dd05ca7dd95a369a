"""Backend of Dynamo: `python -m runtime.deploy.dynamo --model packed` serves tokens to Dynamo's frontend."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.token_ids import normalize_request_token_ids

from compress.checkpoint.gguf.folder import folder_of
from compress.common.errors import RequestError
from runtime.core.config import RuntimeConfig
from runtime.core.progress import ignore
from runtime.core.request import Delta, FinishReason, SamplingParams
from runtime.deploy.kv_events import KVEventOptions
from runtime.served_engine import EngineSource, LoadingHere, ServedEngine

SAMPLING = ("temperature", "top_p", "min_p", "seed", "n", "presence_penalty", "frequency_penalty", "repetition_penalty")
STOPPING = ("min_tokens", "ignore_eos", "max_tokens")


def sampling_of(request: dict[str, Any], context_length: int) -> SamplingParams:
    """Returns the parameters of a request. Dynamo's frontend cuts answers at stop strings itself.

    Raises:
        RequestError: a value is out of range, or decoding is guided.
    """
    options, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    if options.get("guided_decoding"):
        raise RequestError("guided decoding is not supported under Dynamo", "Use runtime serve, which has it")
    given = {name: options.get(name) for name in SAMPLING} | {name: stops.get(name) for name in STOPPING}
    given["max_tokens"] = given["max_tokens"] or context_length - len(request["token_ids"])
    given["top_k"] = max(0, options.get("top_k") or 0)
    ends = [*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())]
    given["logprobs"] = (request.get("output_options") or {}).get("logprobs")
    known = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**known, stop_token_ids=tuple(ends))


def chunk_of(delta: Delta, is_stopped: bool) -> dict[str, Any]:
    """Returns an increment in Dynamo's form. Raises RuntimeError if its answer failed."""
    if delta.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT):
        raise RuntimeError(delta.error or delta.finish_reason)
    chunk: dict[str, Any] = {"token_ids": delta.token_ids, "index": delta.index}
    if delta.logprobs:
        chunk["log_probs"] = [each.logprob for each in delta.logprobs]
    if delta.finish_reason is not None or is_stopped:
        is_cancelled = is_stopped or delta.finish_reason is FinishReason.ABORT
        chunk["finish_reason"] = "cancelled" if is_cancelled else str(delta.finish_reason)
        counts = {"prompt_tokens": delta.num_prompt_tokens, "completion_tokens": delta.num_output_tokens}
        chunk["completion_usage"] = counts | {"total_tokens": sum(counts.values())}
    return chunk


class DynamoEngine(LLMEngine):
    """One engine for Dynamo's worker.

    Args:
        source: the checkpoint and its settings.
        name: model name in the API.
    """

    def __init__(self, source: EngineSource, name: str) -> None:
        self.source, self.name = source, name
        self.served: ServedEngine | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        """Returns the engine, not loaded, and the place of its worker."""
        parser = argparse.ArgumentParser(prog="python -m runtime.deploy.dynamo", description=__doc__)
        parser.add_argument("--model", default="demo", help="checkpoint, as for runtime serve")
        parser.add_argument("--served-model-name")
        parser.add_argument("--config", type=json.loads, default={}, help="JSON: fields of RuntimeConfig")
        parser.add_argument("--kv-events", default="", help="ZeroMQ address for events of the KV cache")
        for name, default in {"namespace": "dynamo", "component": "backend", "endpoint": "generate"}.items():
            parser.add_argument(f"--{name}", default=default)
        parser.add_argument("--discovery-backend", default="etcd")
        parser.add_argument("--request-plane", default="tcp")
        given = vars(parser.parse_args(argv))
        path, settings = folder_of(given.pop("model")), RuntimeConfig(**given.pop("config"))
        name, address = given.pop("served_model_name") or path.name, given.pop("kv_events")
        events = KVEventOptions(kv_events=address) if address else None
        worker = WorkerConfig(model_name=str(path), served_model_name=name, use_kv_events=bool(address), **given)
        return cls(EngineSource(path, settings, kv_events=events), name), worker

    async def start(self, worker_id: int) -> EngineConfig:
        """Loads and starts the engine."""
        self.served = await asyncio.to_thread(LoadingHere(self.source).finish, ignore)
        self.served.client.start()
        config = self.source.config
        registration = LlmRegistration(
            context_length=self.served.facts.max_model_len,
            kv_cache_block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
        )
        return EngineConfig(model=str(self.source.path), served_model_name=self.name, llm=registration)

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Returns where the events of the KV cache are read."""
        events = self.source.kv_events
        return [] if events is None else [ZmqSource(events.kv_events.replace("*", "127.0.0.1"))]

    async def health_check_payload(self) -> dict[str, Any]:
        """Returns a request of one token."""
        return dict(build_health_check_payload(bos_token_id=0))

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yields the tokens of a request as they come; the last ones of an answer with the reason of its end.

        Raises:
            RequestError: the engine refuses the request.
            RuntimeError: the engine failed, or is not started.
        """
        if self.served is None:
            raise RuntimeError("the engine is not started")
        normalize_request_token_ids(request)
        sampling = sampling_of(request, self.served.facts.max_model_len)
        async with aclosing(self.served.client.generate(request["token_ids"], sampling)) as steps:
            async for deltas in steps:
                for delta in deltas:
                    yield chunk_of(delta, context.is_stopped())
                if context.is_stopped():
                    return

    async def cleanup(self) -> None:
        """Stops the engine, if it was started."""
        if self.served is not None:
            served, self.served = self.served, None
            await asyncio.to_thread(served.client.stop)


def main() -> None:
    """Runs the worker."""
    run(DynamoEngine)


if __name__ == "__main__":
    main()
