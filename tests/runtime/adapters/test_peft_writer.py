"""Adapters that PEFT itself writes, against the weights that it merges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import adapted_engine, answers, merged_engine
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

peft = pytest.importorskip("peft")

PROMPT = list(range(3, 20))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linears": ("llama", {"target_modules": "all-linear"}),
    "rank-stabilized": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "patterns": (
        "qwen3",
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 5, "up_proj": 3},
            "alpha_pattern": {"v_proj": 7},
        },
    ),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}),
    "names of transformers 4": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "interleaved experts": ("gpt_oss", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    "some experts": (
        "gpt_oss",
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:], "alpha_pattern": {"down_proj": 5}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_peft_equal_what_it_merges(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    save_tiny_model(tmp_path / "base", family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    model.double().merge_and_unload().save_pretrained(tmp_path / "merged")
    engine = adapted_engine(tmp_path / "base", {"a": tmp_path / "adapter"})
    found = answers(engine, [("a", PROMPT), ("", PROMPT)])
    wanted = [answers(merged_engine(tmp_path / name, None), [("", PROMPT)])[0] for name in ("merged", "base")]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert found[0][1] == pytest.approx(wanted[0][1], abs=1e-9)
    assert found[0][0] != found[1][0]
