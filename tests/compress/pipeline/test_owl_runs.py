"""A first pass over the model decides how much of each block is pruned, also after a kill, and it pays."""

import pytest
from runs import compress, same_bytes

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, NMSparsity
from compress.checkpoint.writer import PieceStore
from compress.common.errors import CheckpointError
from compress.recipe import PruneStage, QuantizeStage


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_zeros_are_where_the_first_pass_put_them(tiny_model, tmp_path, method) -> None:
    stage = PruneStage(method, sparsity=0.6, layerwise="owl", outlier_factor=2.0, ignore=("down_proj",))
    report = compress(tiny_model("llama"), tmp_path / "out", stage).report
    shares = {each["block"]: each["share"] for each in report["layerwise"]}
    assert len(set(shares.values())) == 3
    assert sum(shares.values()) / 3 == pytest.approx(0.6)
    for block in report["blocks"]:
        zeros = [linear["zeros"] for linear in block["linears"]]
        assert zeros == pytest.approx([shares[block["block"]]] * len(zeros), abs=0.01)
    assert any("first pass" in note for note in report["plan"]["notes"])
    assert any("owl M=2" in (layer["pruning"] or "") for layer in report["plan"]["layers"])


def test_mixed_patterns_are_packed_with_integers(tiny_model, tmp_path) -> None:
    stage = PruneStage("wanda", NMSparsity(4, 8), layerwise="owl", outlier_factor=2.0, spread=0.25)
    report = compress(tiny_model("llama"), tmp_path / "out", stage, QuantizeStage("gptq", Int(4, 64))).report
    patterns = {each["block"]: each["pattern"] for each in report["layerwise"]}
    assert len(set(patterns.values())) > 1
    assert sum(int(pattern.partition(":")[0]) for pattern in patterns.values()) == 4 * len(patterns)
    for module, scheme in PackedCheckpoint.open(tmp_path / "out").schemes.items():
        assert str(scheme.sparsity) == patterns[module.rpartition(".self_attn")[0] or module.rpartition(".mlp")[0]]


@pytest.mark.parametrize("write", [2, 4])
def test_a_run_broken_off_in_its_first_pass_continues_there(tiny_model, tmp_path, monkeypatch, write) -> None:
    stage = PruneStage("wanda", sparsity=0.6, layerwise="owl", outlier_factor=2.0)
    whole = compress(tiny_model("llama"), tmp_path / "whole", stage)
    original, written = PieceStore.write, []

    def failing(store: PieceStore, key: str, *args, **kwargs) -> None:
        written.append(key)
        if len(written) == write:
            raise CheckpointError("the disk is full")
        original(store, key, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(PieceStore, "write", failing)
        with pytest.raises(CheckpointError, match="disk is full"):
            compress(tiny_model("llama"), tmp_path / "broken", stage)
    assert any(key.startswith("survey-hidden") for key in written)
    again = compress(tiny_model("llama"), tmp_path / "broken", stage)
    assert again.report["layerwise"] == whole.report["layerwise"]
    assert same_bytes(whole.out, again.out)
