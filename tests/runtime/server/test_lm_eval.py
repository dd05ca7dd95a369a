"""lm-eval's `local-completions` against the server: the evaluation harness measures the model that is served.

Everything is local: a task in YAML, its documents in JSON lines, and the checkpoint's own tokenizer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import is_idle, serving_demo

from compress.common.cli import demo_model_path
from runtime.engine.engine import Engine

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("tenacity", reason="lm-eval asks for it to talk to servers")

DOCUMENTS = [
    ("The castle was built in the", [" year", " 12th century", " xylophone zebra"]),
    ("He opened the door and", [" walked in", " saw a", " the of of"]),
    ("Once upon a time there was", [" a", " a little girl", " qqq"]),
    ("In 1943 the war", [" was", " had been going on", " ,,"]),
    ("Water is", [" a", " the", " wet and cold"]),
]


def write_tasks(folder: Path) -> None:
    """A multiple-choice task, for log-likelihoods, and one that generates."""
    rows = [{"text": text, "choices": choices, "gold": 0} for text, choices in DOCUMENTS]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    common = {**data, "test_split": "test", "doc_to_text": "{{text}}", "num_fewshot": 0}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
    choice |= {"target_delimiter": "", "metric_list": [{"metric": "acc", "aggregation": "mean"}]}
    generate = {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
    generate |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}}
    generate |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean"}]}
    for name, own in (("local_choice", choice), ("local_generate", generate)):
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **own}))  # JSON is YAML


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Engine, Any]]:
    with serving_demo(dtype="float32") as served:
        yield served


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def evaluate(url: str, task: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **model: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    write_tasks(folder)
    options = {"model": "demo", "base_url": f"{url}/v1/completions", "num_concurrent": 4, "max_retries": 1, **model}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args=options,
        tasks=[task],
        task_manager=manager,
        log_samples=True,
        verbosity=None,
    )


def expected_choices(reference: Any, tokenizer: Any, text: str, choices: list[str]) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation and whether it is the greedy one, from transformers in float32."""
    found = []
    for choice in choices:
        context, whole = tokenizer.encode(text), tokenizer.encode(text + choice)
        with torch.inference_mode():
            logprobs = reference(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        targets = torch.tensor(whole[len(context) :])
        rows = logprobs[len(context) - 1 : -1]
        likelihood = rows.gather(-1, targets.unsqueeze(-1)).sum()
        found.append((float(likelihood), bool((rows.argmax(-1) == targets).all())))
    return found


LOCAL_TOKENIZER = {"tokenizer": str(demo_model_path()), "tokenizer_backend": "huggingface"}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(LOCAL_TOKENIZER, marks=pytest.mark.full),
        {**LOCAL_TOKENIZER, "batch_size": 3},
        pytest.param({"tokenizer_backend": "remote"}, marks=pytest.mark.full),
    ],
)
def test_log_likelihoods_are_transformers(
    served: Any, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    url, _, tokenizer = served
    results = evaluate(url, "local_choice", tmp_path, monkeypatch, **model)
    samples = {sample["doc"]["text"]: sample for sample in results["samples"]["local_choice"]}
    assert len(samples) == len(DOCUMENTS)
    flags, accurate = [], 0
    for text, choices in DOCUMENTS:
        expected = expected_choices(reference, tokenizer, text, choices)
        for (value, is_greedy), (wanted, should_be) in zip(samples[text]["filtered_resps"], expected, strict=True):
            assert float(value) == pytest.approx(wanted, abs=1e-4)
            assert (is_greedy in (True, "True")) is should_be
            flags.append(should_be)
        accurate += max(range(3), key=lambda i, values=expected: values[i][0]) == 0
    assert {True, False} == set(flags)  # both kinds occur, or the flag would be untested
    assert results["results"]["local_choice"]["acc,none"] == pytest.approx(accurate / len(DOCUMENTS))


@pytest.mark.full
def test_generations_are_transformers(
    served: Any, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, engine, tokenizer = served
    results = evaluate(url, "local_generate", tmp_path, monkeypatch, **LOCAL_TOKENIZER)
    samples = results["samples"]["local_generate"]
    assert len(samples) == len(DOCUMENTS)
    for sample in samples:
        tokens = tokenizer.encode(sample["doc"]["text"])
        with torch.inference_mode():
            out = reference.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(out[0, len(tokens) :].tolist(), skip_special_tokens=True).split("\n")[0]
        assert sample["resps"][0][0] == text
    assert is_idle(engine)
