"""The engine in a script: `LLM("packed/").generate(["Once upon"], SamplingParams(max_tokens=32))`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import RequestError, ToolkitError
from runtime.core.collector import without_collections
from runtime.core.config import RuntimeConfig
from runtime.core.progress import Report, ignore
from runtime.core.request import Delta, Pooling, RequestOptions, SamplingParams
from runtime.engine.engine import Engine
from runtime.parallel.launch import find_launch
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.parallel.group import Group


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

    path = folder_of(path)
    opened = Tokenizer.open_in_thread(path)
    from compress.checkpoint.reader import PackedCheckpoint
    from compress.common.device import open_in_thread, total_bytes

    open_in_thread(config.device)
    from runtime.activations import choose_activations
    from runtime.adapters.store import check_adaptable, open_adapters
    from runtime.model.loader import load_model, read_model
    from runtime.runner.runner import build_runner
    from runtime.speculative.build import build_speculator

    tokenizer = opened.result()
    options: dict[str, Any] = {
        "device": config.device,
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "report": report,
    }
    chosen = choose_activations(path, config.activations, kernels=config.linear_backend, **options)
    started: AbstractContextManager[Group | None] = nullcontext()
    if config.asks_for_ranks or find_launch() is not None:
        from runtime.ranks import ranks_started

        # Ranks must know all tokens of a step, and compile kernels at first use.
        config = replace(config, overlap=False, warm_up=False)
        started = ranks_started(path, replace(config, linear_backend=chosen.kernels))
    with started as group:
        options |= {"moe_expert_cache": config.moe_expert_cache, "group": group}
        decoder = load_model(path, kernels=chosen.kernels, notes=chosen.notes, **options)
        if config.serves_adapters:
            check_adaptable(decoder, config)
        config = config.with_step_sizes(total_bytes(decoder.device))
        runner = build_runner(decoder, config, report, group)
    speculator = build_speculator(path, decoder, runner, replace(config, linear_backend=chosen.kernels))
    on_device = runner.adapters
    adapters = None
    if on_device is not None:
        # Ranks have parts of it.
        spec = read_model(PackedCheckpoint.open(path), config.trust_remote_code).spec
        adapters = open_adapters(spec, decoder.dtype, on_device.modules, config)
    engine = Engine(runner, tokenizer, config, speculator=speculator, adapters=adapters)
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
        lora: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Answers all prompts in one batch and returns the answers in order, the `n` answers to a prompt together.

        Args:
            prompts: texts or token ids.
            sampling: parameters for all prompts, or one for each.
            lora: name of the adapter for all prompts, or one for each; "" is the model itself. See `load_adapter`.

        Raises:
            RequestError: a prompt is refused; then none is computed.
        """
        each = [lora] * len(prompts) if isinstance(lora, str) else lora
        return self._answer(prompts, sampling or SamplingParams(), [RequestOptions(adapter=name) for name in each])

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads the LoRA adapter of a folder; needs `enable_lora` or `lora_modules` in the configuration.

        Raises:
            ToolkitError: the folder holds none, it does not fit the model, or the name is taken.
        """
        if self.engine.adapters is None:
            raise ToolkitError("this engine serves no adapters", "Use RuntimeConfig(enable_lora=True)")
        self.engine.adapters.load(name, Path(path))

    def embed(self, prompts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Returns for each prompt the mean of the final hidden states over its tokens, `[hidden_size]`.

        Raises:
            RequestError: a prompt is refused; then none is computed.
            ToolkitError: the model's numbers are not finite.
        """
        options = [RequestOptions(pooling=Pooling.MEAN)] * len(prompts)
        answers = self._answer(prompts, SamplingParams(max_tokens=0), options)
        if wrong := next((answer for answer in answers if answer.embedding is None), None):
            raise ToolkitError(f"embedding failed: {wrong.error}", "Try linear_backend='reference' and dtype='float32'")
        return [answer.embedding for answer in answers if answer.embedding is not None]

    def _answer(
        self,
        prompts: Sequence[str | Sequence[int]],
        given: SamplingParams | Sequence[SamplingParams],
        options: Sequence[RequestOptions],
    ) -> list[Completion]:
        if isinstance(prompts, str):
            raise RequestError("prompts is one string", "Pass a list of prompts")
        each = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        for what, given_number in (("sampling parameters", len(each)), ("adapters", len(options))):
            if given_number != len(prompts):
                raise RequestError(f"{given_number} {what} for {len(prompts)} prompts", "Pass one, or one for each")
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        for token_ids, params, own in zip(ids, each, options, strict=True):
            self.engine.check_request(token_ids, params)
            self.engine.open_adapter(own.adapter)
        parts = zip(ids, each, options, strict=True)
        names = [self.engine.add_request(i, params, None, own) for i, params, own in parts]
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
