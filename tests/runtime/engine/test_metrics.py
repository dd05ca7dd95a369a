"""Metrics by vLLM's names, as routers, load generators and dashboards read them."""

import time
from itertools import count

import pytest
from fake_runner import FakeRunner
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.engine.metrics import PREFIX, VLLM_NAMES, VLLM_PREFIX, Metrics

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
READ_BY = {
    "llm-d and the Gateway API Inference Extension": GAUGES | {"lora_requests_info", "cache_config_info"},
    "AIBrix": GAUGES | {f"{name}_seconds_bucket" for name in ("time_to_first_token", "inter_token_latency")},
    "vLLM's Grafana board": GAUGES
    | {
        "e2e_request_latency_seconds_bucket",
        "generation_tokens_total",
        "inter_token_latency_seconds_bucket",
        "prompt_tokens_total",
        "request_decode_time_seconds_sum",
        "request_generation_tokens_bucket",
        "request_prefill_time_seconds_sum",
        "request_prompt_tokens_bucket",
        "request_queue_time_seconds_sum",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
    },
    "Ray's board of LLMs": {
        "num_preemptions_total",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "request_inference_time_seconds_sum",
        "request_time_per_output_token_seconds_bucket",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
    },
}


def engine_after_two_requests() -> Engine:
    clock = count()
    engine = Engine(FakeRunner(), None, RuntimeConfig(block_size=4), clock=lambda: float(next(clock)))
    for _ in range(2):
        engine.add_request(list(range(9)), SamplingParams(max_tokens=3))
        while engine.has_work:
            engine.step()
    return engine


def families(engine: Engine) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(engine.render_metrics("small/model"))}


@pytest.fixture(scope="module")
def read() -> dict[str, Metric]:
    return families(engine_after_two_requests())


def samples(read: dict[str, Metric]) -> dict[str, Sample]:
    found = {sample.name: sample for family in read.values() for sample in family.samples}
    return {name.removeprefix(VLLM_PREFIX): each for name, each in found.items() if name.startswith(VLLM_PREFIX)}


@pytest.mark.parametrize("reader", READ_BY)
def test_each_reader_finds_the_names_it_looks_for(read: dict[str, Metric], reader: str) -> None:
    assert samples(read).keys() >= READ_BY[reader]


def test_both_names_have_the_same_type_values_and_labels_with_the_model_added(read: dict[str, Metric]) -> None:
    assert {family.name for family in Metrics().collect()} >= {PREFIX + name for name in VLLM_NAMES}
    for name, in_vllm in VLLM_NAMES.items():
        ours, theirs = read[PREFIX + name], read[VLLM_PREFIX + in_vllm]
        assert (ours.type, ours.documentation) == (theirs.type, theirs.documentation)
        model = {"model_name": "small/model", "engine": "0"}
        for mine, other in zip(ours.samples, theirs.samples, strict=True):
            assert (mine.name.removeprefix(PREFIX + name), {**model, **mine.labels}, mine.value) == (
                other.name.removeprefix(VLLM_PREFIX + in_vllm),
                other.labels,
                other.value,
            )


def test_values_follow_the_requests(read: dict[str, Metric]) -> None:
    values = {name: sample.value for name, sample in samples(read).items()}
    assert values["request_prompt_tokens_sum"] == values["prompt_tokens_total"] == 18
    assert values["request_generation_tokens_sum"] == values["generation_tokens_total"] == 6
    times = [values[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
    assert sum(times) == pytest.approx(values["e2e_request_latency_seconds_sum"])
    assert sum(times[1:]) == pytest.approx(values["request_inference_time_seconds_sum"])
    assert values["request_time_per_output_token_seconds_count"] == 2


def test_the_size_of_the_cache_and_the_age_of_the_list_of_adapters_are_readable() -> None:
    engine = engine_after_two_requests()
    found = samples(families(engine))
    labels = found["cache_config_info"].labels
    pool = engine.scheduler.pool
    assert (int(labels["block_size"]), int(labels["num_gpu_blocks"])) == (pool.block_size, pool.num_blocks)
    assert abs(found["lora_requests_info"].value - time.time()) < 60
    assert found["lora_requests_info"].labels["running_lora_adapters"] == ""
