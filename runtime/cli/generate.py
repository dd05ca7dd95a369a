"""`runtime generate`: generates text for one prompt."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from compress.common.cli import with_groups
from compress.common.errors import RequestError, ToolkitError
from compress.common.files import MAX_FILE_BYTES, utf8_text
from runtime.cli.options import GrammarOptions, ModelArgument, SeedOption, name_of, resolve_model, runtime_config
from runtime.core.config import ComputeOptions, ContextOptions, KVCacheOptions, SpeculativeOptions
from runtime.core.dry import DryParams
from runtime.core.request import PenaltyParams, TruncationParams
from runtime.core.token_filters import FilterParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime.core.request import Delta
    from runtime.engine.engine import Engine


@with_groups
def generate(
    *,
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue. Default: standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the model's chat template, with the prompt as user message.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 is greedy.")
    ] = 1.0,
    truncation: TruncationParams,
    penalties: PenaltyParams,
    repetitions: DryParams,
    filters: FilterParams,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop before this text; may be repeated.")] = None,
    form: GrammarOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    compute: ComputeOptions,
    kv: KVCacheOptions,
    context: ContextOptions,
    drafts: SpeculativeOptions,
) -> None:
    """Generate text for a prompt with a packed or dense checkpoint.

    Text goes to standard output, everything else to standard error.
    """
    from runtime.core.request import SamplingParams

    path, name = resolve_model(model, compute.trust_remote_code)
    sampling = SamplingParams(
        max_tokens,
        temperature,
        **asdict(truncation),
        **asdict(penalties),
        **asdict(repetitions),
        **asdict(filters),
        seed=seed,
        stop=tuple(stop or ()),
        grammar=form.grammar(),
    )
    text = read_prompt() if prompt is None else prompt
    if not text:
        raise RequestError("the prompt is empty", "Use --prompt TEXT or pipe text in")
    print(f"model: {name}", file=sys.stderr)
    from runtime.llm import load_engine

    engine, tokenizer = load_engine(path, runtime_config(compute, kv, context, drafts))
    token_ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    engine.add_request(token_ids, sampling)
    write(steps(engine), as_json, name_of(path))


def read_prompt() -> str:
    """Reads standard input. Raises DataError if it is not text, RequestError if it does not end within
    `MAX_FILE_BYTES`."""
    if sys.stdin.isatty():
        print("Type the prompt and end it with Ctrl-D:", file=sys.stderr)
    with utf8_text("standard input"):
        text = sys.stdin.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise RequestError(f"the prompt has more than {MAX_FILE_BYTES:,} characters", "Pipe a shorter text in")
    return text.removesuffix("\n")


def steps(engine: Engine, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[Delta]:
    """Yields the deltas of the single request until it ends or is stopped. Raises ToolkitError if the engine fails."""
    while engine.has_work and not is_stopped():
        for delta in engine.step():
            if delta.error:
                remedy = "Try --linear-backend reference --dtype float32"
                raise ToolkitError(f"the answer failed: {delta.error}", remedy)
            yield delta


def write(deltas: Iterator[Delta], as_json: bool, model_name: str) -> None:
    """Streams the text, or prints one JSON object. The rate is measured from the first token."""
    texts: list[str] = []
    times: list[float] = []
    num_first = 0
    for delta in deltas:
        times.append(time.perf_counter())
        texts.append(delta.text)
        num_first = num_first or delta.num_output_tokens
        if not as_json:
            print(delta.text, end="", flush=True)
    rate = (delta.num_output_tokens - num_first) / (times[-1] - times[0]) if len(times) > 1 else None
    if not as_json:
        print()
        figures = f"{delta.num_prompt_tokens} prompt tokens, {delta.num_output_tokens} generated"
        print(f"{figures}, {rate:.1f} tokens/s" if rate else figures, file=sys.stderr)
        return
    result = {
        "model": model_name,
        "text": "".join(texts),
        "finish_reason": delta.finish_reason,
        "prompt_tokens": delta.num_prompt_tokens,
        "completion_tokens": delta.num_output_tokens,
        "tokens_per_second": rate,
    }
    print(json.dumps(result))
