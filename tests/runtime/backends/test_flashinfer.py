"""Spans handed over to flashinfer, and when the registry takes it. Its kernels need a GPU: a stand-in reads the page
tables as the package documents them."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engines import answer_all, small_engine
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from torch import Tensor

from runtime.backends.flashinfer import attention as flashinfer
from runtime.backends.measured import Verdict, table_path, to_json
from runtime.backends.registry import choose_attention
from runtime.backends.triton import attention as triton_attention
from runtime.backends.triton import device as triton_device
from runtime.backends.triton.device import Gpu, gpu_speedups
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence
from runtime.model.loader import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PLANS: list[int] = []


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` in plain torch: pages `[pages, page_size, kv_heads, D]`, causal masks that
    end with the last key."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert (workspace.nbytes, layout) == (flashinfer.WORKSPACE_BYTES, "NHD")

    def plan(
        self, rows, bounds, page_ids, last, heads, kv_heads, head_dim, page_size, *, causal, window_left,
        logits_soft_cap, q_data_type,
    ) -> None:  # fmt: skip
        assert causal
        assert {each.dtype for each in (rows, bounds, page_ids, last)} == {torch.int32}
        self.shape, self.window, self.cap = (heads, kv_heads, head_dim), window_left, logits_soft_cap
        self.spans = [
            (rows[i : i + 2].tolist(), page_ids[bounds[i] : bounds[i + 1]], page_size, int(last[i]))
            for i in range(len(last))
        ]
        PLANS.append(window_left)

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        assert query.shape[1:] == self.shape[::2]
        return torch.cat([self.attend(query[start:stop], pages, *span) for (start, stop), *span in self.spans])

    def attend(self, query: Tensor, pages: tuple[Tensor, Tensor], ids: Tensor, page_size: int, last: int) -> Tensor:
        length = (len(ids) - 1) * page_size + last
        key, value = (
            part[ids.long()]
            .flatten(0, 1)[:length]
            .repeat_interleave(query.shape[1] // part.shape[2], 1)
            .transpose(0, 1)
            for part in pages
        )
        scores = query.transpose(0, 1) @ key.mT * query.shape[2] ** -0.5
        if self.cap:
            scores = self.cap * (scores / self.cap).tanh()
        place = torch.arange(length - len(query), length)[:, None] - torch.arange(length)
        hidden = (place < 0) | ((place > self.window) if self.window >= 0 else place < 0)
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1)


@pytest.fixture
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


REQUESTS = [(name, [(seed * 7 + i * 5) % 112 for i in range(length)], GREEDY)
            for name, seed, length in (("a", 1, 33), ("b", 2, 5), ("c", 1, 40), ("d", 3, 1))]  # fmt: skip


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_are_those_of_plain_torch(family: str, tmp_path: Path) -> None:
    """Steps with chunks of prompts and decodes, shared prefixes, a sliding window and a soft cap."""
    folder = save_tiny_model(tmp_path / "model", family, torch.float64, **VARIANTS.get(family, {}))
    decoder = load_model(folder, dtype="float64")
    options = {"prefill_chunk": 12, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    expected = answer_all(small_engine(decoder, **options), REQUESTS, gap=1)
    engine = small_engine(decoder, **options)
    kernels = engine.runner.kernels
    arguments = decoder, kernels.cache, kernels.windows, engine.runner.memory
    engine.runner.kernels = replace(kernels, attention=flashinfer.prepare_attention(*arguments), layers=None)
    PLANS.clear()
    assert answer_all(engine, REQUESTS, gap=1) == expected
    windows = {-1 if window is None else window - 1 for window in kernels.windows}
    assert set(PLANS) == windows  # one plan for each window and step
    assert len(PLANS) == len(windows) * engine.metrics.steps_total


def test_pages_of_spans() -> None:
    def entry(blocks: list[int], start: int, count: int) -> ScheduledSequence:
        tokens = [0] * (start + count)
        return ScheduledSequence(
            Sequence(Request("s", tuple(tokens), GREEDY, 0), tokens, block_ids=blocks), start, count
        )

    entries = [entry([7, 3, 9], 5, 1), entry([2, 4], 0, 8), entry([5, 6, 1], 4, 5)]
    spans = flashinfer.spans_of(entries, 4, torch.device("cpu"))
    assert spans.rows.tolist() == [0, 1, 9, 14]
    assert spans.pages.tolist() == [0, 2, 4, 7]
    assert spans.page_ids.tolist() == [7, 3, 2, 4, 5, 6, 1]
    assert spans.last_lengths.tolist() == [2, 4, 1]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tiny model and its memory plan as if it were on "Some GPU" with the package installed."""
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    decoder = load_model(save_tiny_model(tmp_path / "model", "llama", torch.bfloat16, **sizes), dtype="bfloat16")
    plans = {name: small_engine(decoder, kv_cache=name).runner.memory for name in ("16bit", "int4")}
    monkeypatch.setattr(flashinfer, "is_installed", lambda: True)
    monkeypatch.setattr(triton_device, "gpu_of", lambda device: Gpu("Some GPU", (9, 0), 132))
    monkeypatch.setattr(flashinfer, "TABLES", tmp_path)
    monkeypatch.setattr(triton_attention, "unsupported_reason", lambda device, dtype: "")
    gpu_speedups.cache_clear()
    yield SimpleNamespace(decoder=replace(decoder, device=torch.device("cuda")), plans=plans, tables=tmp_path)
    gpu_speedups.cache_clear()


def test_it_is_taken_where_it_is_asked_for_or_measured_faster(served: SimpleNamespace) -> None:
    memory = served.plans["16bit"]
    backend, _, reason = choose_attention(served.decoder, memory)
    assert backend.name == "triton"
    assert "flashinfer was not measured" in reason
    assert choose_attention(served.decoder, memory, "flashinfer")[0].name == "flashinfer"
    table_path(served.tables, "Some GPU").write_text(
        to_json("Some GPU", {flashinfer.MEASURED: {"32x64": {"512": 1.5}}})
    )
    gpu_speedups.cache_clear()
    backend, _, reason = choose_attention(served.decoder, memory)
    assert backend.name == "flashinfer"
    assert "1.50 times" in reason
    assert flashinfer.verdict(served.decoder, memory) == Verdict(True, reason.removeprefix("flashinfer "))


def test_other_pages_stay_where_they_are(served: SimpleNamespace) -> None:
    backend, _, reason = choose_attention(served.decoder, served.plans["int4"], "flashinfer")
    assert backend.name == "triton"
    assert reason == "flashinfer takes 16-bit pages"
