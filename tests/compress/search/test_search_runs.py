"""Searches from end to end on tiny random models: what is measured, chosen, written, resumed and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import CheckpointError, RecipeError, SchemeError
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions
from compress.recipe_file import load_recipe
from compress.reporting.report_data import read_headers, read_report
from compress.reporting.report_page import report_page
from compress.search.measure import LoadedModel
from compress.search.run import Files, carry_out, find, write_choice
from compress.search.space import Candidate, Goal, SearchRequest, parse_candidates
from compress.search.survey import survey
from compress.stages.finish import FinishStage

MENU = parse_candidates("w2g64,w4g64,w8")
TEXT = CalibrationOptions("bundled", samples=4, length=64)


def asked(goal: Goal, **options) -> SearchRequest:
    return SearchRequest(
        goal, **({"candidates": MENU, "measured": 2, "calibration": TEXT, "name": goal.name} | options)
    )


def opened(model: Path, out: Path, search: SearchRequest, **options):
    request = RunRequest(model, str(model), search.probe(), out, **({"dtype": "float32"} | options))
    return survey(search, request)


def files(out: Path) -> Files:
    return Files(out.with_name("figures.json"), out.with_name("found.yaml"), "compress search")


def test_a_search_for_bits_ends_in_a_checkpoint_that_its_recipe_makes_again(tiny_model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = opened(tiny_model("llama"), out, asked(Goal(bits_per_weight=4.0)), measure=False)
    result = carry_out(find(found, files(out), quiet=True), files(out), quiet=True).run
    assert result.structure.bits_per_weight <= 4.0 < 0.2 + result.structure.bits_per_weight
    schemes = PackedCheckpoint.open(out).schemes
    assert {str(Candidate(scheme)) for scheme in schemes.values()} <= {"w2g64", "w4g64", "w8"}
    for block in range(3):
        for siblings in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            assert len({schemes[f"model.layers.{block}.{name}"] for name in siblings}) == 1
    recipe = load_recipe(str(files(out).recipe))
    again = run(prepare(replace(found.run, recipe=recipe, out=tmp_path / "again")), quiet=True)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, again.out)]
    assert weights[0] == weights[1]
    search = json.loads((out / "compression_report.json").read_text())["search"]
    assert search["predicted"] == pytest.approx(sum(group["sensitivity"][group["chosen"]] for group in search["units"]))
    assert len(search["units"]) == 12


@pytest.mark.full
def test_floats_are_chosen_beside_integers(tiny_model, tmp_path: Path) -> None:
    out, offered = tmp_path / "out", parse_candidates("w2g64,mxfp4,nvfp4")
    request = asked(Goal(bits_per_weight=3.0), candidates=offered, method="rtn", ends=True)
    found = opened(tiny_model("llama"), out, request, measure=False)
    findings = find(found, files(out), quiet=True)
    assert carry_out(findings, files(out), quiet=True).run.structure.ok
    schemes = PackedCheckpoint.open(out).schemes
    chosen = {module: str(Candidate(scheme)) for module, scheme in schemes.items()}
    assert {"mxfp4", "nvfp4"} & set(chosen.values())
    assert {chosen[module] for module in chosen if "layers" not in module} == {"w2g64"}


@pytest.mark.full
def test_rank_and_sparsity_are_chosen_beside_widths(tiny_model, tmp_path: Path) -> None:
    """Every candidate in turn over the groups, so that all are made and read back; then the choice of the search."""
    out, model = tmp_path / "out", tiny_model("llama", num_hidden_layers=2)
    offered = parse_candidates("rank0.5,asvd0.8w8,2:4,2:4w4g64,w8,dense")
    found = opened(model, out, asked(Goal(bits_per_weight=6.0), candidates=offered), measure=False)
    findings = find(found, files(out), quiet=True)
    assert all(
        findings.known.of(group, candidate) > 0
        for group, candidates in found.candidates.items()
        for candidate in candidates[:-1]
    )
    assert all(findings.known.of(group, Candidate()) == 0 for group in found.candidates)
    mixed = {group: offered[index % len(offered)] for index, group in enumerate(found.candidates)}
    cost = sum(found.cost(group, candidate) for group, candidate in mixed.items())
    made = run(prepare(replace(found.run, recipe=found.request.recipe(mixed), out=tmp_path / "mixed")), quiet=True)
    assert not made.structure.problems
    assert 0.97 < made.structure.total_bytes / (cost + found.fixed_bytes) <= 1
    result = carry_out(findings, files(out), quiet=True).run
    recipe = load_recipe(str(files(out).recipe))
    again = run(prepare(replace(found.run, recipe=recipe, out=tmp_path / "again")), quiet=True)
    assert len({(folder / "model.safetensors").read_bytes() for folder in (result.out, again.out)}) == 1


@pytest.mark.full
def test_every_kind_of_candidate_is_finished(tiny_model, tmp_path: Path) -> None:
    offered = parse_candidates("rank0.5w8,2:4w4g64,w2g64,w2exl3,dense")
    request = asked(Goal(bits_per_weight=6.0), candidates=offered, finish=FinishStage(steps=2, learning_rate=0.01))
    # Sides of 128, which trellis codes need.
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=128, intermediate_size=256)
    found = opened(model, tmp_path / "out", request, measure=False)
    groups = {group: menu[index % len(menu)] for index, (group, menu) in enumerate(found.candidates.items())}
    assert set(groups.values()) == set(offered)
    made = run(prepare(replace(found.run, recipe=request.recipe(groups), out=tmp_path / "made")), quiet=True)
    assert made.structure.ok
    assert made.report["finish"]["kl_after"] < made.report["finish"]["kl_before"]
    packed = PackedCheckpoint.open(made.out)
    pruned = [group.name for group, candidate in groups.items() if candidate.pattern]
    for name in pruned:
        values = packed.packed_weight(name).dequantize()
        assert (values.unflatten(-1, (-1, 4)) != 0).sum(-1).max() <= 2


def test_a_rank_costs_and_loses_what_the_run_of_its_recipe_does(tiny_model, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, out = tiny_model("qwen3", torch.float32), tmp_path / "out"
    found = opened(model, out, asked(Goal(kl=1.0), candidates=parse_candidates("svd0.4,svd0.7,w8"), method="rtn"))
    known = find(found, files(out), quiet=True).known
    group = next(group for group in found.candidates if group.block == 1 and "gate_proj" in group.name)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        dense = torch.log_softmax(whole(found.measured).logits, -1)
        for module in group.modules:
            weight = whole.get_submodule(module).weight
            rank = found.layer_plans(group, found.candidates[group][0])[module].scheme.rank
            left, sigma, right = torch.linalg.svd(weight.double(), full_matrices=False)
            weight.copy_((left[:, :rank] * sigma[:rank]) @ right[:rank])
        changed = torch.log_softmax(whole(found.measured).logits, -1)
    expected = (dense.exp() * (dense - changed)).sum(-1).mean()
    low, high, _ = found.candidates[group]
    assert known.of(group, low) == pytest.approx(float(expected), rel=1e-3)
    assert known.of(group, low) > known.of(group, high)
    assert found.cost(group, low) < found.cost(group, high) < 4 * group.weights


def test_rounded_inputs_cost_divergence_and_no_bytes(tiny_model, tmp_path: Path) -> None:
    out, offered = tmp_path / "out", parse_candidates("w8g32,w8a8g32,w8a4g32")
    request = asked(Goal(bits_per_weight=9.0), candidates=offered[1:], method="rtn")
    found = opened(tiny_model("llama", num_hidden_layers=1), out, replace(request, candidates=offered), measure=False)
    known = find(found, files(out), quiet=True).known
    for group in found.candidates:
        exact, eight, four = (known.of(group, each) for each in offered)
        assert exact < four > 1.5 * eight
        assert len({found.cost(group, each) for each in offered}) == 1
    found = replace(found, request=request)
    assert found.request.recipe(dict.fromkeys(found.candidates, offered[2])).stages[0].scheme == offered[2].scheme


def test_low_rank_is_not_offered_where_it_would_be_no_smaller(tiny_model, tmp_path: Path) -> None:
    found = opened(
        tiny_model("llama"), tmp_path / "out", asked(Goal(kl=1.0), candidates=parse_candidates("rank0.9w8g128,2:4,w8"))
    )
    offered = {group.name.rpartition(".")[2]: list(map(str, offered)) for group, offered in found.candidates.items()}
    assert all("2:4" in offered and "rank0.9w8g128" not in offered for offered in offered.values())


def test_files_stay_within_a_target_of_size(tiny_model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    span = opened(model, tmp_path / "out", asked(Goal(bits_per_weight=8)))
    size = (span.smallest + span.largest) // 2 + span.fixed_bytes
    found = opened(model, tmp_path / "out", asked(Goal(size=size)), measure=False)
    result = carry_out(find(found, files(tmp_path / "out"), quiet=True), files(tmp_path / "out"), quiet=True).run
    assert 0.97 * size < result.structure.total_bytes <= size


def test_sensitivities_are_what_the_whole_model_says(tiny_model, tmp_path: Path) -> None:
    """By transformers' own forward, with one unit rounded to nearest."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("qwen3", torch.float32)
    found = opened(model, tmp_path / "out", asked(Goal(kl=1.0), method="rtn"))
    known = find(found, files(tmp_path / "out"), quiet=True).known
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    packed = tmp_path / "packed"
    group = next(group for group in found.candidates if group.block == 1 and "q_proj" in group.name)
    recipe = replace(asked(Goal(kl=1.0), method="rtn").recipe({group: MENU[0]}), calibration=TEXT)
    run(prepare(RunRequest(model, str(model), recipe, packed, measure=False)), quiet=True)
    with torch.no_grad():
        dense = torch.log_softmax(whole(found.measured).logits, -1)
        for module in group.modules:
            stored = PackedCheckpoint.open(packed).packed_weight(module)
            whole.get_submodule(module).weight.copy_(stored.dequantize())
        changed = torch.log_softmax(whole(found.measured).logits, -1)
    expected = (dense.exp() * (dense - changed)).sum(-1).mean()
    # The run knows no statistics, so its scales weigh all columns alike, as do those of the search by rtn.
    assert known.of(group, MENU[0]) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.full
def test_embedding_and_head_are_measured_and_chosen_like_layers(tiny_model, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, out = tiny_model("llama", torch.float32), tmp_path / "out"
    # Each next to dense in most of the network, so that size is a matter of the ends.
    found = opened(model, out, asked(Goal(bits_per_weight=7.0), candidates=MENU[1:], ends=True), measure=False)
    findings = find(found, files(out), quiet=True)
    carry_out(findings, files(out), quiet=True)
    stored = PackedCheckpoint.open(out)
    assert {"model.embed_tokens", "lm_head"} < stored.schemes.keys()
    embedding = next(group for group in found.candidates if group.name == "model.embed_tokens")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        dense = torch.log_softmax(whole(found.measured).logits, -1)
        whole.model.embed_tokens.weight.copy_(stored.packed_weight("model.embed_tokens").dequantize())
        changed = torch.log_softmax(whole(found.measured).logits, -1)
    expected = (dense.exp() * (dense - changed)).sum(-1).mean()
    chosen = stored.schemes["model.embed_tokens"]
    assert findings.known.of(embedding, Candidate(chosen)) == pytest.approx(float(expected), rel=1e-3, abs=1e-7)


def test_an_interrupted_search_goes_on_with_what_it_has(tiny_model, tmp_path: Path, monkeypatch) -> None:
    measured: list[int] = []
    divergence = LoadedModel.divergence

    def counted(self, block: int) -> float:
        if len(measured) == 7:
            raise KeyboardInterrupt
        measured.append(block)
        return divergence(self, block)

    out = tmp_path / "out"
    found = opened(tiny_model("llama"), out, asked(Goal(bits_per_weight=4.0)))
    monkeypatch.setattr(LoadedModel, "divergence", counted)
    with pytest.raises(KeyboardInterrupt):
        find(found, files(out), quiet=True)
    monkeypatch.setattr(LoadedModel, "divergence", divergence)
    continued = find(opened(tiny_model("llama"), out, found.request), files(out), quiet=True).known
    whole = find(
        opened(tiny_model("llama"), out, found.request), replace(files(out), sensitivities=tmp_path / "b"), quiet=True
    ).known
    assert continued.values == whole.values
    monkeypatch.setattr(LoadedModel, "divergence", None)
    other = opened(tiny_model("llama"), out, asked(Goal(kl=0.5), candidates=MENU[:2]))
    assert find(other, files(out), quiet=True).known.values == whole.values


def test_figures_of_another_model_are_refused(tiny_model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    find(opened(tiny_model("llama"), out, asked(Goal(kl=1.0), candidates=MENU[1:])), files(out), quiet=True)
    with pytest.raises(CheckpointError, match=r"\(measured, texts .*--restart"):
        find(opened(tiny_model("llama"), out, asked(Goal(kl=1.0), measured=3)), files(out), quiet=True)


@pytest.mark.full
def test_a_divergence_is_met_by_a_few_checkpoints(tiny_model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = opened(tiny_model("llama"), out, asked(Goal(kl=0.01), tries=4), figures=("drafts",))
    result = carry_out(find(found, files(out), quiet=True), files(out), quiet=True).run
    tries = result.report["search"]["tries"]
    assert result.report["figures"].keys() == {"drafts"}
    kept = [each for each in tries if each["measured"] <= 0.01]
    assert 1 <= len(tries) <= 4
    assert result.quality["kl_mean"] == min(kept, key=lambda each: each["bytes"])["measured"] <= 0.01
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "found.yaml", "out"]
    assert f"the checkpoint has {result.quality['kl_mean']:.4f}" in files(out).recipe.read_text()
    assert result.report["structure"]["path"] == str(out)


@pytest.mark.full
def test_a_limit_holds_after_finishing(tiny_model, tmp_path: Path) -> None:
    out, stage = tmp_path / "out", FinishStage(steps=2)
    found = opened(tiny_model("llama"), out, asked(Goal(kl=0.02), tries=2, finish=stage))
    result = carry_out(find(found, files(out), quiet=True), files(out), quiet=True).run
    assert result.report["finish"]["stage"]["steps"] == 2
    tries = result.report["search"]["tries"]
    assert result.quality["kl_mean"] in [each["measured"] for each in tries]
    recipe = load_recipe(str(files(out).recipe))
    assert recipe.stages[-1] == stage
    assert f"the checkpoint has {result.quality['kl_mean']:.4f} after finishing" in files(out).recipe.read_text()
    again = run(prepare(replace(found.run, recipe=recipe, out=tmp_path / "again", measure=False)), quiet=True)
    assert len({(folder / "model.safetensors").read_bytes() for folder in (out, again.out)}) == 1


@pytest.mark.full
def test_what_cannot_be_reached_is_said_with_what_can(tiny_model, tmp_path: Path) -> None:
    out, model = tmp_path / "out", tiny_model("llama")
    with pytest.raises(RecipeError, match=r"\b2 .*\b2\.250 "):
        opened(model, out, asked(Goal(bits_per_weight=2.0)))
    findings = find(opened(model, out, asked(Goal(kl=1e-9), candidates=MENU[:2])), files(out), quiet=True)
    with pytest.raises(RecipeError, match=r" 1 .*1e-09.*w4g64"):
        carry_out(findings, files(out), quiet=True)
    assert not list(tmp_path.glob("out*"))


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(tiny_model, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("compress.common.device.available_bytes", lambda device: 5 << 20)
    found = opened(tiny_model("llama"), tmp_path / "out", asked(Goal(kl=1.0)))
    with pytest.raises(CheckpointError, match=r"5.0"):
        find(found, files(tmp_path / "out"), quiet=True)
    assert not (tmp_path / "figures.json").exists()


def test_schemes_whose_groups_do_not_divide_a_layer_are_not_offered_to_it(tiny_model, tmp_path: Path) -> None:
    model = tiny_model("llama", intermediate_size=160)
    found = opened(model, tmp_path / "out", asked(Goal(kl=1.0)))
    offered = {
        group.name.rpartition(".")[2]: [str(each) for each in offered] for group, offered in found.candidates.items()
    }
    assert offered["down_proj"] == ["w8"]
    assert offered["q_proj"] == ["w2g64", "w4g64", "w8"]


def test_an_engine_leaves_out_what_it_does_not_load(tiny_model, tmp_path: Path) -> None:
    menu = parse_candidates("w2g64,w3exl3,w4g64asym,w5g64,w8,2:4")

    def offered(engine: str | None) -> set[str]:
        found = opened(tiny_model("llama"), tmp_path / "out", asked(Goal(kl=1.0), candidates=menu, engine=engine))
        return {str(each) for each in next(iter(found.candidates.values()))}

    assert offered(None) == set(map(str, menu))
    assert offered("vLLM") == {"w2g64", "w4g64asym", "w8", "2:4"}
    assert offered("transformers") == {"w2g64", "w8"}
    only = asked(Goal(kl=1.0), candidates=parse_candidates("w3exl3,w4exl3"), engine="vLLM")
    with pytest.raises(SchemeError, match="vLLM is not known to load w3a16 exl3"):
        opened(tiny_model("llama"), tmp_path / "out", only)
    with pytest.raises(RecipeError, match="unknown engine 'vllm'"):
        opened(tiny_model("llama"), tmp_path / "out", replace(only, engine="vllm"))


def test_ignored_layers_take_no_part(tiny_model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = opened(tiny_model("llama"), out, asked(Goal(bits_per_weight=4.0), ignore=("down_proj",), method="rtn"))
    assert not any("down_proj" in module for group in found.candidates for module in group.modules)
    findings = find(found, files(out), quiet=True)
    choice = findings.first_choice()
    recipe = write_choice(findings, choice, files(out))
    assert set(choice.candidates.values()) <= set(MENU)
    assert not any("down_proj" in target for stage in recipe.stages for target in stage.targets)


@pytest.mark.full
def test_the_report_draws_what_was_found(tiny_model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = opened(tiny_model("llama"), out, asked(Goal(bits_per_weight=4.0), method="rtn"), measure=False)
    result = carry_out(find(found, files(out), quiet=True), files(out), quiet=True).run
    report = read_report(out)
    page = report_page(report, read_headers(report)).html()
    assert "Sensitivity of layers" in page
    assert "q_proj, k_proj, v_proj, block 2: KL " in page
    assert f"{result.report['search']['predicted']:.4f}" in page
