"""Drafts of a head of multi-token prediction: right at every place of a text, and no token changes."""

from dataclasses import replace

import pytest
import torch
from engines import Tokens, answer_all, small_engine
from poisoned_memory import poison
from tiny_configs import SIZES, VARIANTS
from tiny_mtp import save_copying_model, save_mtp_model

from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import parse_config
from runtime.core.request import SamplingParams, Sequence
from runtime.engine.engine import Engine
from runtime.memory.plan import plan_memory
from runtime.model.loader import load_model
from runtime.model.mtp import MtpHead, load_head
from runtime.model.scoring import head_states, hidden_states
from runtime.speculative.mtp import HeadRunner

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9])
REQUESTS = [
    *((prompt, replace(sampling, n=n)) for prompt in PROMPTS[:2] for sampling in (GREEDY, SEEDED) for n in (1, 3)),
    (PROMPTS[2], replace(SEEDED, top_p=0.9, top_k=40, presence_penalty=0.5, max_tokens=17)),
    (PROMPTS[2], replace(GREEDY, repetition_penalty=1.3, logprobs=2, max_tokens=23)),
]
LIMITS = {"num_blocks": 400, "prefill_chunk": 6, "num_state_slots": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family: str):
        if family not in made:
            made[family] = save_mtp_model(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return folder


def serve(folder, speculate: str, check=None, requests=REQUESTS, **options) -> tuple[Tokens, Engine]:
    target = load_model(folder, dtype="float64")
    options = {"max_num_seqs": 8, **LIMITS, **options}
    engine = small_engine(target, folder, speculative_model=speculate, **options)
    if speculate:
        poison(engine.speculator.drafter.memory)
        if check is not None:
            engine.speculator.drafter = check(engine, load_head(folder, target))
    requests = ((str(number), *request) for number, request in enumerate(requests))
    return answer_all(engine, requests, gap=2), engine  # they arrive while others run


@torch.inference_mode()
def expected_draft(engine: Engine, head: MtpHead, sequence: Sequence, count: int) -> list[int]:
    """The most likely tokens of a head that reads the whole text at once, and then its own states."""
    target = engine.runner.decoder
    tokens = torch.tensor(sequence.token_ids)
    hidden = target.final_norm(hidden_states(target, tokens[None, :-1])[0])
    following, draft = tokens[1:], []
    for _ in range(count):
        states = head_states(head, following, hidden)
        draft.append(int(head.decoder.logits(states[-1:]).argmax()))
        following = torch.cat((following, torch.tensor(draft[-1:])))
        hidden = torch.cat((hidden, head.feedback(states[-1:])))
    return draft


class Checked:
    """A drafter whose greedy drafts are compared."""

    def __init__(self, engine: Engine, head: MtpHead) -> None:
        self.engine, self.head, self.inner = engine, head, engine.speculator.drafter
        self.found: list[tuple[list[int], list[int]]] = []

    def propose(self, requests) -> None:
        self.inner.propose(requests)
        for sequence, count in requests:
            sampling = sequence.request.sampling
            if sampling.temperature == 0 and sampling.repetition_penalty == 1 and count:
                wanted = expected_draft(self.engine, self.head, sequence, count)
                self.found.append(([*sequence.draft_token_ids], wanted))


@pytest.mark.parametrize(
    ("family", "num_blocks", "requests"),
    [
        ("qwen3_next", 400, REQUESTS[1:4]),
        pytest.param("qwen3_next", 30, REQUESTS, marks=pytest.mark.full),
        pytest.param("deepseek_v3", 30, REQUESTS, marks=pytest.mark.full),
        pytest.param("glm4_moe", 30, REQUESTS, marks=pytest.mark.full),
        pytest.param("glm_moe_dsa", 30, REQUESTS, marks=pytest.mark.full),
    ],
)
def test_drafts_are_those_of_the_whole_text(family, num_blocks, requests, folders) -> None:
    """Chunks, forks, rejected drafts and preemptions leave the same keys and states as one pass."""
    folder = folders(family)
    wanted, _ = serve(folder, "", requests=requests, num_blocks=num_blocks)
    tokens, engine = serve(folder, "mtp", Checked, requests, num_blocks=num_blocks, prefix_caching=False)
    assert tokens == wanted
    found = engine.speculator.drafter.found
    assert len(found) > 20
    assert all(drafted in (expected, []) for drafted, expected in found)
    assert sum(bool(drafted) for drafted, _ in found) > 0.9 * len(found)
    assert max(len(drafted) for drafted, _ in found) > 1
    if num_blocks == 30:
        assert engine.scheduler.stats.num_preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5_text", {}),
        ("qwen3_5_text", {"num_state_slots": 10}),
        ("qwen3_5_text", {"num_state_slots": 14, "num_blocks": 40, "kv_offload_bytes": 10**7}),
        ("deepseek_v3", {"kv_offload_bytes": 10**6, "num_blocks": 30}),
        ("glm4_moe_lite", {"spec_verify": "rejection"}),
        ("deepseek_v32", {"kv_offload_bytes": 10**6, "num_blocks": 30}),
        ("qwen3_5_moe_text", {"num_speculative_tokens": 1}),
        ("glm4_moe", {"kv_cache": "int8", "num_speculative_tokens": 8}),
    ],
)
def test_cached_prefixes_change_no_token(family, options, folders) -> None:
    folder = folders(family)
    wanted, _ = serve(folder, "", **{name: value for name, value in options.items() if name == "kv_cache"})
    tokens, engine = serve(folder, "mtp", Checked, **options)
    assert engine.scheduler.stats.num_prefix_hits > 0
    greedy = {str(number) for number, (_, sampling) in enumerate(REQUESTS) if sampling.temperature == 0}
    for (name, index), answer in tokens.items():
        assert answer == wanted[name, index] or ("spec_verify" in options and name not in greedy)
    found = engine.speculator.drafter.found
    if "kv_cache" not in options:
        assert sum(drafted == expected for drafted, expected in found) > 0.9 * len(found)


def test_a_good_head_is_accepted(tmp_path) -> None:
    folder = save_copying_model(tmp_path / "model")
    wanted, _ = serve(folder, "", requests=REQUESTS[:4])
    tokens, engine = serve(folder, "mtp", requests=REQUESTS[:4])
    assert tokens == wanted
    metrics = engine.metrics
    # It does not see the first token, which counts in short texts; a random head agrees once in a hundred times.
    assert metrics.spec_decode_num_accepted_tokens_total > 0.4 * metrics.spec_decode_num_draft_tokens_total


def test_a_head_that_fails_drafts_nothing_more(tmp_path, monkeypatch) -> None:
    folder = save_copying_model(tmp_path / "model")
    run, calls = HeadRunner.run, []

    def fail_later(runner, batch, following, hidden):
        calls.append(len(calls))
        if len(calls) > 9:
            raise RuntimeError("injected")
        return run(runner, batch, following, hidden)

    monkeypatch.setattr(HeadRunner, "run", fail_later)
    wanted, _ = serve(folder, "", requests=REQUESTS[:2])
    tokens, engine = serve(folder, "mtp", requests=REQUESTS[:2], num_speculative_tokens=1)
    assert tokens == wanted
    assert len(calls) == 10
    assert engine.metrics.spec_decode_num_draft_tokens_total > 0
    assert engine.metrics.step_errors_total == 0


def test_a_window_is_refused(folders) -> None:
    with pytest.raises(ToolkitError) as caught:
        serve(folders("qwen3_next"), "mtp", attention_window=16)
    assert "--speculative-model" in caught.value.remedy


def test_the_pool_of_a_gpu_leaves_room_for_the_head() -> None:
    model = parse_config({"model_type": "deepseek_v3", **SIZES, **VARIANTS["deepseek_v3"]})
    free, config = 2**34, RuntimeConfig()
    configs = (replace(config, speculative_model=name) for name in ("ngram", "mtp"))
    alone, beside = (plan_memory(model, 0, 2, each, free).budget.nbytes for each in configs)
    head = model.spec.mtp.model(model.spec)
    weights = 2 * sum(
        linear.in_features * linear.out_features for linear in (*head.linears(), model.spec.mtp.projection)
    )
    # Two layers of the model and one of the head have the same keys and values.
    assert beside == (alone - weights) * 2 // 3
