"""Policies over costs that are easy to reckon with: times worked out by hand, and what must hold for all of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from compress.common.errors import ToolkitError
from runtime.bench.figures import Objective, parse_objectives
from runtime.bench.load import Lengths
from runtime.core.config import RuntimeConfig
from runtime.simulate.costs import MeasuredCosts, read_costs
from runtime.simulate.jobs import Job, Workload, make_jobs
from runtime.simulate.policies.attention_apart import best_split, group_seconds
from runtime.simulate.policy import POLICIES, Setup
from runtime.simulate.routing import ROUTERS
from runtime.simulate.run import Outcome, best_rate, compare, left_out, simulate

LIMITS = parse_objectives("ttft=200ms,tpot=20ms")
MILLISECOND = 1e-3


def simple_costs(**changes: object) -> MeasuredCosts:
    """A step takes 1 ms, and 1 ms more for each 100 tokens."""
    nothing = dict.fromkeys(("answer", "decode_context", "prompt_pair", "prompt", "request", "kv_bytes"), 0.0)
    curve = {"tokens": (1, 10_001), "seconds": (0.001, 0.101)}
    return replace(read_costs("demo"), **{**nothing, **curve, **changes})


def run(
    policy: str,
    jobs: Sequence[Job],
    devices: int = 1,
    *,
    rate: float = 1.0,
    costs: MeasuredCosts | None = None,
    limits: Sequence[Objective] = LIMITS,
    **given: object,
) -> Outcome:
    config = RuntimeConfig(max_itl_ms=0, prefix_caching=any(job.pieces for job in jobs), max_num_seqs=16)
    setup = replace(Setup(costs or simple_costs(), config, devices), **given)
    return simulate(POLICIES[policy], setup, jobs, rate, limits)


def latencies(outcome: Outcome, metric: str) -> float:
    found = outcome.figures.latency_ms[metric]
    assert found is not None
    return found.p50 * MILLISECOND


def longest_gap(jobs: Sequence[Job], policy: str) -> float:
    """Returns the seconds of the longest gap of any answer: all requests keep that limit and not a lower one."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        met = run(policy, jobs, rate=200.0, limits=(Objective("itl", middle),)).good_share == 1
        low, high = (low, middle) if met else (middle, high)
    return high


ONE = [Job("0", 0.0, 201, 4)]


@pytest.mark.parametrize(
    ("policy", "devices", "ttft", "gap"),
    [
        ("chunked", 1, 0.003, 0.001),
        ("whole", 1, 0.003, 0.001),
        ("reserved", 1, 0.003, 0.001),
        ("layered", 1, 0.003, 0.001),
        ("split", 1, 0.003, 0.001),
        ("apart", 2, 0.003, 0.001),
    ],
)
def test_one_request_takes_its_prompt_and_then_a_step_a_token(
    policy: str, devices: int, ttft: float, gap: float
) -> None:
    outcome = run(policy, ONE, devices)
    assert latencies(outcome, "ttft") == pytest.approx(ttft)
    assert latencies(outcome, "tpot") == pytest.approx(gap)
    assert outcome.figures.output_tokens == 4
    assert outcome.utilization == pytest.approx(1 / devices)


def test_time_outside_the_engine_delays_first_tokens_only() -> None:
    outcome = run("chunked", ONE, costs=simple_costs(request=0.5))
    assert (latencies(outcome, "ttft"), latencies(outcome, "tpot")) == pytest.approx((0.503, 0.001))


def test_chunks_share_steps_with_decodes_and_whole_prompts_hold_them_up() -> None:
    jobs = [Job("0", 0.0, 1, 60), Job("1", 0.005, 1501, 1)]
    # 15.01 ms for the prompt, and one decoded token in every step.
    assert longest_gap(jobs, "whole") == pytest.approx(0.001 + 0.01501)
    assert longest_gap(jobs, "chunked") == pytest.approx(0.001 + 0.00256)  # chunks of 256 tokens
    assert longest_gap(jobs, "layered") == pytest.approx(0.001 + 0.01501 / 6)  # six groups of layers


def test_keys_and_values_move_at_the_bandwidth_of_the_link() -> None:
    costs = simple_costs(kv_bytes=1000.0)
    outcome = run("apart", ONE, 2, costs=costs, bandwidth=201_000 / 0.050)
    assert latencies(outcome, "ttft") == pytest.approx(0.003)
    assert latencies(outcome, "e2e") == pytest.approx(0.003 + 0.050 + 3 * 0.001)


def test_given_tokens_are_computed_again_only_after_a_preemption() -> None:
    jobs = [Job(str(number), 0.0, 100, 100) for number in range(8)]
    roomy = run("apart", jobs, 2)
    tight = run("apart", jobs, 2, costs=simple_costs(kv_tokens=800))
    assert (roomy.preemptions, tight.preemptions > 0) == (0, True)
    assert tight.utilization > roomy.utilization or tight.figures.duration_s > roomy.figures.duration_s


def test_both_engines_of_a_split_never_have_more_than_the_device() -> None:
    jobs = make_jobs(Workload(Lengths(50, 200), Lengths(10, 30), 100))
    for token_seconds in (None, 0.004):
        outcome = run("split", jobs, rate=200.0, token_seconds=token_seconds)
        assert 0.5 < outcome.utilization <= 1 + 1e-9
        assert outcome.figures.complete == 100


def test_reserving_predicted_lengths_prevents_preemptions() -> None:
    jobs = [Job(str(number), 0.0, 20, 200) for number in range(16)]
    costs = simple_costs(kv_tokens=1600)
    assert run("chunked", jobs, costs=costs).preemptions > 0
    exact = run("reserved", jobs, costs=costs, prediction_error=0.0)
    assert exact.preemptions == 0
    assert exact.figures.complete == 16


def test_attention_apart_halves_mlps_and_keeps_whole_attention() -> None:
    costs = simple_costs(mlp_share=0.5, hidden_bytes=0.0)
    setup = Setup(costs, RuntimeConfig(), 2)
    from runtime.simulate.costs import StepSize

    alone = costs.of_tokens(100)
    assert group_seconds(setup, StepSize(100), 1, 1) <= alone
    assert group_seconds(setup, StepSize(100), 1, 3) < group_seconds(setup, StepSize(100), 1, 1)
    assert 1 <= best_split(setup, 4) <= 3
    assert run("attention-apart", ONE, 5).figures.complete == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_all_requests_and_uses_more_devices(policy: str) -> None:
    jobs = make_jobs(Workload(Lengths(10, 300), Lengths(1, 40), 120, burstiness=0.3))
    slow, fast = (run(policy, jobs, devices, rate=400.0) for devices in (2, 8))
    for outcome in (slow, fast):
        assert (outcome.figures.complete, outcome.figures.failed) == (120, 0)
        assert outcome.figures.output_tokens == sum(job.output_tokens for job in jobs)
        assert 0 < outcome.utilization <= 1 + 1e-9
    assert latencies(fast, "e2e") < latencies(slow, "e2e")


def test_a_run_is_the_same_each_time() -> None:
    jobs = make_jobs(Workload(Lengths(10, 300), Lengths(1, 40), 50))
    assert run("reserved", jobs, rate=100.0) == run("reserved", jobs, rate=100.0)


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_use_all_engines(router: str) -> None:
    jobs = [replace(job, name=f"job {job.name}") for job in make_jobs(Workload(Lengths(64, 64), Lengths(8, 8), 64))]
    outcome = run("chunked", jobs, 4, rate=1000.0, router=router)
    assert outcome.figures.complete == 64
    assert outcome.utilization > 0.5


def test_routing_by_prefix_finds_more_of_them() -> None:
    shared = [make_jobs(Workload(Lengths(16, 16), Lengths(4, 4), 8, prefix=256, seed=seed)) for seed in range(4)]
    jobs = [
        replace(job, name=f"{group}/{job.name}", at=0.1 * (4 * place + group), pieces=(replace_name(job, 900 + group)))
        for group, each in enumerate(shared)
        for place, job in enumerate(each)
    ]
    jobs.sort(key=lambda job: job.at)
    in_turns, by_prefix = (run("chunked", jobs, 3, rate=10.0, router=name) for name in ("round-robin", "prefix"))
    assert by_prefix.figures.cached_tokens > in_turns.figures.cached_tokens


def replace_name(job: Job, name: int) -> tuple:  # type: ignore[type-arg]
    return (job.pieces[0]._replace(name=name), job.pieces[1]._replace(name=name * 1000 + job.pieces[1].name))


def test_the_best_rate_keeps_the_limits_and_a_higher_one_does_not() -> None:
    jobs = make_jobs(Workload(Lengths(100, 100), Lengths(20, 20), 300))
    setup = Setup(simple_costs(), RuntimeConfig(max_itl_ms=0, prefix_caching=False, max_num_seqs=16))
    best = best_rate(POLICIES["chunked"], setup, jobs, LIMITS, 0.9)
    assert best.good_share >= 0.9
    assert simulate(POLICIES["chunked"], setup, jobs, best.rate * 1.1, LIMITS).good_share < 0.9
    impossible = parse_objectives("ttft=0.01ms")
    assert best_rate(POLICIES["chunked"], setup, jobs[:5], impossible, 0.9).goodput == 0


def test_what_is_not_possible_is_said() -> None:
    setup = Setup(simple_costs(), RuntimeConfig(prefix_caching=False))
    assert left_out(POLICIES.values(), setup).keys() == {"apart", "attention-apart"}
    with pytest.raises(ToolkitError, match="--devices 2"):
        compare([POLICIES["apart"]], setup, ONE, LIMITS, 0.9)
    long = [Job("0", 0.0, 5000, 1)]
    with pytest.raises(ToolkitError, match="--scale-lengths"):
        compare([POLICIES["chunked"]], setup, long, LIMITS, 0.9)
    mixed = compare([POLICIES["chunked"]], setup, [*ONE, Job("1", 0.0, 5000, 1)], LIMITS, 0.9, 1.0)[0]
    assert (mixed.figures.complete, mixed.figures.failed) == (1, 1)
