"""The engine in a script: `LLM("packed/").generate(["Once upon"], SamplingParams(max_tokens=32))`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compress.common.errors import RequestError, ToolkitError
from runtime.core.collector import without_collections
from runtime.core.config import RuntimeConfig
from runtime.core.progress import Report, ignore
from runtime.core.request import Delta, Pooling, RequestOptions, SamplingParams
from runtime.engine.engine import NO_OPTIONS, Engine
from runtime.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion(Delta):
    """A complete answer to a prompt. `error` is set if `finish_reason` is `error`."""

    prompt_token_ids: list[int] = field(default_factory=list)


@without_collections()
def load_engine(path: str | Path, config: RuntimeConfig, report: Report = ignore) -> tuple[Engine, Tokenizer]:
    """Loads a checkpoint folder, packed or dense. Imports torch, so it takes a second or more.

    Args:
        report: is told how far it is.

    Raises:
        CheckpointError: the folder cannot be loaded.
        ToolkitError: this machine or model does not support the configuration.
    """
    from compress.checkpoint.gguf.folder import folder_of
    from compress.common.device import total_bytes
    from runtime.activations import choose_activations
    from runtime.model.loader import load_model
    from runtime.runner.runner import build_runner
    from runtime.speculative.build import build_speculator

    path = folder_of(path)
    tokenizer = Tokenizer.open(path)
    options: dict[str, Any] = {
        "device": config.device,
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "report": report,
    }
    chosen = choose_activations(path, config.activations, kernels=config.linear_backend, **options)
    experts = config.moe_expert_cache
    decoder = load_model(path, kernels=chosen.kernels, notes=chosen.notes, moe_expert_cache=experts, **options)
    config = config.with_step_sizes(total_bytes(decoder.device))
    runner = build_runner(decoder, config, report)
    speculator = build_speculator(path, decoder, runner, replace(config, linear_backend=chosen.kernels))
    engine = Engine(runner, tokenizer, config, speculator=speculator)
    engine.metrics.linears_total.update(decoder.linears)
    return engine, tokenizer


class LLM:
    """Offline generation with the engine of the server. Single-threaded.

    Args:
        path: checkpoint: a folder, a GGUF file, `demo` or a name of the hub.
        config: configuration of the engine; None is the default.

    Raises:
        CheckpointError: the folder cannot be loaded.
    """

    def __init__(self, path: str | Path, config: RuntimeConfig | None = None) -> None:
        from compress.checkpoint.gguf.folder import folder_of

        config = config or RuntimeConfig()
        folder = folder_of(path, code=config.trust_remote_code)
        self.engine, self.tokenizer = load_engine(folder, config)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers all prompts in one batch and returns the answers in order, the `n` answers to a prompt together.

        Args:
            prompts: texts or token ids.
            sampling: parameters for all prompts, or one for each.

        Raises:
            RequestError: a prompt is refused; then none is computed.
        """
        return self._answer(prompts, sampling or SamplingParams(), NO_OPTIONS)

    def embed(self, prompts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Returns for each prompt the mean of the final hidden states over its tokens, `[hidden_size]`.

        Raises:
            RequestError: a prompt is refused; then none is computed.
            ToolkitError: the model's numbers are not finite.
        """
        answers = self._answer(prompts, SamplingParams(max_tokens=0), RequestOptions(pooling=Pooling.MEAN))
        if wrong := next((answer for answer in answers if answer.embedding is None), None):
            raise ToolkitError(f"embedding failed: {wrong.error}", "Try linear_backend='reference' and dtype='float32'")
        return [answer.embedding for answer in answers if answer.embedding is not None]

    def _answer(
        self,
        prompts: Sequence[str | Sequence[int]],
        given: SamplingParams | Sequence[SamplingParams],
        options: RequestOptions,
    ) -> list[Completion]:
        if isinstance(prompts, str):
            raise RequestError("prompts is one string", "Pass a list of prompts")
        each = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts", "Pass one, or one for each"
            )
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        for token_ids, params in zip(ids, each, strict=True):
            self.engine.check_request(token_ids, params)
        names = [self.engine.add_request(i, params, None, options) for i, params in zip(ids, each, strict=True)]
        added = zip(names, ids, each, strict=True)
        completions = {
            (name, index): Completion(name, index=index, prompt_token_ids=i)
            for name, i, p in added
            for index in range(p.n)
        }
        while self.engine.has_work:
            for delta in self.engine.step():
                completions[delta.request_id, delta.index].append(delta)
        return list(completions.values())

    def chat(
        self, conversations: Sequence[Sequence[dict[str, str]]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Answers conversations, each a list of `{"role": ..., "content": ...}`, with the model's chat template.

        Raises:
            RequestError: the model has no chat template, or a conversation is refused.
        """
        return self.generate([self.tokenizer.encode_chat(messages) for messages in conversations], sampling)
