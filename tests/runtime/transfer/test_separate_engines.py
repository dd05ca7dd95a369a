"""Prefill and decode in separate engines: the answers are those of one engine, and nothing is left over."""

from separate_engines import alone, answers, separate

from runtime.core.request import SamplingParams

PROMPTS = [[3 + (7 * index + 11 * place) % 900 for place in range(20 + 37 * index)] for index in range(8)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLINGS = [
    GREEDY,
    SamplingParams(max_tokens=20, seed=1, n=3),
    SamplingParams(max_tokens=20, seed=2, logprobs=2),
    SamplingParams(max_tokens=60, seed=3, stop=("a", "e")),
    SamplingParams(max_tokens=20, seed=4, repetition_penalty=1.3),
    SamplingParams(max_tokens=5, seed=5, prompt_logprobs=1),
    SamplingParams(max_tokens=0, seed=5),
]
REQUESTS = [(prompt, SAMPLINGS[index % len(SAMPLINGS)]) for index, prompt in enumerate(PROMPTS * 2)]


def test_answers_are_those_of_one_engine() -> None:
    with alone() as one:
        wanted = answers(one, REQUESTS)
    with separate() as both:
        assert answers(both.decode, REQUESTS) == wanted
        both.check()
        assert set(both.results) == {"received"}
        assert both.results["received"] > 5
        sent, received = (engine.metrics.transferred_blocks_total for engine in both.engines)
        assert sent == received > 20
