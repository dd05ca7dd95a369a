import pytest
from tiny_configs import DELTA_NET, SIZES
from tiny_models import save_tiny_model

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.common.device import format_bytes
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import PANEL_ELEMENTS
from runtime.core.model_config import parse_config
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.memory.capacity import estimate
from runtime.memory.estimate import gpu_step_bytes
from runtime.memory.plan import explain, plan_memory
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

MODEL = parse_config({"model_type": "llama", **SIZES})
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2
"""Keys and values, two layers, two heads of 16, two bytes each."""


def plan(**options):
    return plan_memory(MODEL, 1000, 2, RuntimeConfig(**options))


def test_the_budget_decides_the_number_of_blocks():
    found = plan(kv_memory_bytes=TOKEN_BYTES * 16 * 20 + 5)
    assert (found.num_blocks, found.token_bytes, found.max_model_len) == (20, TOKEN_BYTES, 256)
    assert found.kv_bytes == TOKEN_BYTES * 16 * 20


def test_no_more_blocks_than_all_sequences_can_fill():
    assert plan(max_num_seqs=3).num_blocks == 3 * 256 // 16
    assert plan(max_num_seqs=3, max_model_len=33).num_blocks == 3 * 3


def test_a_wish_for_blocks_is_followed():
    found = plan(num_blocks=7)
    assert (found.num_blocks, found.max_model_len) == (7, 112)
    assert "what the KV pool holds; the model's context is 256" in "\n".join(explain(found))


def test_windows_need_no_more_blocks_for_longer_sequences():
    """A window of 64 and a chunk of 32 of 256 tokens are held: 6 blocks of 16, and one more where they lie askew."""
    model = parse_config({"model_type": "mistral", "sliding_window": 64, **SIZES})
    found = plan_memory(model, 1000, 2, RuntimeConfig(prefill_chunk=32, max_num_seqs=3))
    assert (found.num_blocks, found.blocks_per_sequence, found.max_model_len) == (3 * 7, 7, 256)
    assert "reach    the last 64 tokens: 7 blocks per sequence at most, whatever its length" in explain(found)
    small = plan_memory(model, 1000, 2, RuntimeConfig(prefill_chunk=32, num_blocks=6))
    assert small.max_model_len == 6 * 16, "without room for the window all blocks of a sequence are kept"
    assert plan(prefill_chunk=32, max_num_seqs=3).num_blocks == 3 * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, r"max_model_len=257 .*--max-model-len 256 "),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 100, "num_blocks": 6}, r" 100 .* 7 .*\(28\.0 KiB\).* 6\. .*--max-model-len"),
        ({"kv_memory_bytes": 100}, r" 0\. .*--max-model-len"),
        ({"kv_memory_bytes": 0}, r" 0\. .*--max-model-len"),
        ({"kv_offload_bytes": 100}, r"100 B.*4.0 KiB"),
        ({"kv_offload_bytes": 10**6, "prefix_caching": False}, r"976\.6 KiB .*prefix"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ToolkitError, match=message):
        plan(**options)


def test_explanation_has_the_numbers():
    text = "\n".join(explain(plan(num_blocks=20)))
    assert "weights  1000 B" in text
    assert "20 blocks of 16 tokens = 320 tokens at 256 B each" in text
    assert "host KV  0 B: off" in text
    assert "host KV  12.0 KiB: 3 blocks = 48 tokens" in explain(plan(num_blocks=20, kv_offload_bytes=13000))


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_bytes_as_text(count, text):
    assert format_bytes(count) == text


def test_a_pool_larger_than_memory_is_refused_before_it_is_touched(tmp_path):
    decoder = load_model(save_tiny_model(tmp_path / "model"))
    with pytest.raises(ToolkitError, match=r" \d+\.\d GiB .* GiB .*\bcpu "):
        build_runner(decoder, RuntimeConfig(num_blocks=10**12))
    with pytest.raises(ToolkitError, match=r" \d+\.\d GiB .* GiB .*\bcpu "):
        build_runner(decoder, RuntimeConfig(kv_offload_bytes=10**15))


GIB = 2**30
LARGE = parse_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
)
"""The shape of Llama 3 8B: 128 KiB of keys and values per token."""


def gpu_plan(free: int, **options):
    return plan_memory(LARGE, 16 * GIB, 2, RuntimeConfig(**options), free)


def test_a_gpu_gives_keys_and_values_what_weights_and_steps_leave():
    found = gpu_plan(60 * GIB)
    budget = found.budget
    assert found.kv_bytes <= budget.nbytes < found.kv_bytes + 16 * found.token_bytes
    assert budget.nbytes + budget.step_bytes + budget.spare_bytes == 60 * GIB
    assert budget.spare_bytes == 60 * GIB // 50
    assert 50 * GIB < found.kv_bytes < 60 * GIB
    lines = explain(found)
    assert any("what steps leave of 60.0 GiB after the weights" in line for line in lines)
    assert any(line.startswith("steps    take up to ") and ", 1.2 GiB are kept free" in line for line in lines)


def test_a_large_gpu_allocates_no_blocks_that_nobody_could_fill():
    found = gpu_plan(130 * GIB, max_num_seqs=4)
    assert found.num_blocks == 4 * 8192 // 16


def test_steps_take_more_with_more_sequences_and_longer_steps():
    sizes = [
        gpu_plan(60 * GIB, max_num_seqs=sequences, max_num_batched_tokens=tokens).budget.step_bytes
        for sequences, tokens in ((8, 512), (64, 512), (64, 8192), (256, 8192))
    ]
    assert sizes == sorted(set(sizes))
    logits = 64 * LARGE.spec.vocab_size * 4
    assert sizes[1] > 512 * 3 * LARGE.intermediate_size * 2 + 3 * logits


def test_trees_draw_a_row_for_each_of_their_guesses_and_no_step_more_rows_than_tokens():
    def taken(speculate: str, **options: int) -> int:
        return gpu_plan(60 * GIB, speculative_model=speculate, **options).budget.step_bytes

    few = {"max_num_seqs": 8}
    assert taken("ngram-tree", **few) == taken("ngram", num_speculative_tokens=16, **few) > taken("ngram", **few)
    assert taken("ngram-tree") == taken("ngram", num_speculative_tokens=7), "512 tokens in a step, of 64 sequences"


def test_a_draft_model_gets_the_other_half():
    alone, beside = gpu_plan(40 * GIB, speculative_model="ngram"), gpu_plan(40 * GIB, speculative_model="self:2bit")
    assert abs(beside.budget.nbytes - alone.budget.nbytes // 2) < 2
    assert "the other half is the draft model's" in "\n".join(explain(beside))
    assert gpu_plan(40 * GIB, speculative_model="ngrammatical/packed").budget.nbytes == beside.budget.nbytes, (
        "a folder's name"
    )
    assert gpu_plan(40 * GIB, speculative_model="ngram-tree").budget.nbytes > beside.budget.nbytes


def test_a_wish_for_kv_memory_is_followed_on_a_gpu():
    found = gpu_plan(60 * GIB, kv_memory_bytes=4 * GIB)
    assert found.num_blocks == 4 * GIB // (16 * found.token_bytes)
    assert found.budget.step_bytes == gpu_plan(60 * GIB).budget.step_bytes


def test_a_gpu_without_room_is_refused_with_the_numbers():
    with pytest.raises(ToolkitError, match=r"^1\.0 GiB .* [\d.]+ GiB\. .*--kv-memory"):
        gpu_plan(GIB)


def test_a_cpu_takes_its_default_and_says_nothing_of_steps():
    found = plan()
    assert found.budget.nbytes == 512 * 2**20
    assert "steps" not in "\n".join(explain(found))


def test_exact_tokens_are_part_of_the_memory() -> None:
    options = {"kv_cache": "int8", "kv_residual_length": 16, "kv_sinks": 4, "max_num_seqs": 8}
    found = plan(kv_memory_bytes=2**20, **options)
    assert found.exact.nbytes == 8 * (16 + 17 + 4) * TOKEN_BYTES
    assert found.kv_bytes <= 2**20
    assert not any("exact" in line for line in explain(plan(kv_cache="int8")))
    assert any(line.startswith("exact ") for line in explain(found))
    with pytest.raises(ToolkitError, match=r"37 exact.*8 sequences"):
        plan(kv_memory_bytes=found.exact.nbytes, **options)


HYBRID = parse_config({"model_type": "qwen3_5_text", **SIZES, **DELTA_NET})
STATE_BYTES = 3 * (2 * (2 * 2 * 12 + 4 * 16) * 2 + 4 * 12 * 16 * 4)
"""Three layers: two inputs of the convolution in two bytes each, and a matrix for each head in float32."""


def hybrid_plan(**options):
    return plan_memory(HYBRID, 1000, 2, RuntimeConfig(**options))


def test_states_take_their_share_of_the_memory():
    found = hybrid_plan(kv_memory_bytes=20 * STATE_BYTES)
    assert (found.states.num_slots, found.states.slot_bytes) == (10, STATE_BYTES)
    assert found.kv_bytes <= 10 * STATE_BYTES < found.kv_bytes + found.block_size * found.token_bytes
    assert found.pool_bytes == found.kv_bytes + found.states.nbytes
    assert any(line.startswith("states ") and " 10 " in line for line in explain(found))
    wished = hybrid_plan(kv_memory_bytes=20 * STATE_BYTES, state_memory_bytes=5 * STATE_BYTES)
    assert wished.states.num_slots == 5
    assert wished.num_blocks > found.num_blocks


def test_no_more_states_than_a_schedule_can_fill():
    found = hybrid_plan(max_num_seqs=3, speculative_model="ngram", num_speculative_tokens=2)
    assert found.states.num_slots == 3 * (1 + 2) + found.num_blocks


def test_memory_for_no_state_is_refused():
    with pytest.raises(ToolkitError, match="--state-memory"):
        hybrid_plan(kv_memory_bytes=2 * STATE_BYTES - 1)
    assert not plan(kv_memory_bytes=2**20).states.num_slots


def test_what_fits_beside_weights_counts_states():
    """The pool that uses all of the room holds as many slots, and sequences that cannot have one do not run."""
    capacity = estimate(HYBRID, RuntimeConfig(), "bfloat16", 1000, 2**30)
    assert capacity.room * 0.99 < capacity.kv_bytes + capacity.tokens * capacity.token_bytes / capacity.num_layers
    served = hybrid_plan(kv_memory_bytes=capacity.kv_bytes, max_num_seqs=10**6)
    assert abs(served.states.num_slots - capacity.states.num_slots) <= 1
    assert capacity.concurrency(16) == capacity.states.num_slots // 2


def test_memory_is_told_of_all_blocks_before_a_step_writes_to_them(tmp_path, monkeypatch):
    """Also of those that a prompt holds for its later chunks, and that answers grow into."""
    model = load_model(save_tiny_model(tmp_path / "model", "llama", **SIZES))
    config = RuntimeConfig(prefill_chunk=32, num_blocks=64)
    runner, told, held = build_runner(model, config), [], []
    engine, submit = Engine(runner, None, config), runner.submit
    monkeypatch.setattr(runner.pages.memory, "reach", told.append)

    def note(plan):
        held.append(max(block for entry in plan.entries for block in entry.sequence.block_ids))
        return submit(plan)

    monkeypatch.setattr(runner, "submit", note)
    for prompt in ([1] * 100, [2] * 20):
        engine.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(told) == len(held) > 40
    assert all(number == last + 1 for number, last in zip(told, held, strict=True))


def test_a_step_of_a_gpu_holds_dequantized_weights_and_copied_keys_only_where_there_are_packed_ones() -> None:
    def step(scheme: str, is_packed: bool) -> int:
        return gpu_step_bytes(LARGE, RuntimeConfig(), 2, 8192, KVCacheScheme.named(scheme), is_packed)

    plain = step("16bit", False)
    assert 0 < step("16bit", True) - plain <= 2 * PANEL_ELEMENTS
    heads, key, value = LARGE.kv_shapes[0]
    copies = 8192 * heads * (key + value) * (2 + 4)
    assert 0 <= step("int4", False) - plain <= copies
    packed, dense = (plan_memory(LARGE, size * GIB, 2, RuntimeConfig(), 40 * GIB) for size in (4, 16))
    assert packed.budget.nbytes < dense.budget.nbytes
