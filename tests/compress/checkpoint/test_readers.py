"""Claims about other engines are those of the table, by model type and form; without a measurement they are unknown."""

from collections.abc import Iterable

import pytest

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, SGLANG, TRANSFORMERS, VLLM
from compress.checkpoint.formats.readers import Measured, described, form_of, input_notes, measured, readers
from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import NM, Activations, BlockFp8, Fp8, Int, LowRank, Mxfp4, Mxfp8, NMSparsity, Nvfp4
from compress.models.wrappers import text_part


def loads(container: str, model_type: str, *schemes: Scheme) -> dict[str, bool | None]:
    return {each.engine: each.loads for each in readers(container, {"model_type": model_type}, schemes)}


def test_the_table_knows_engines_and_containers() -> None:
    for engine, table in measured().items():
        assert table.versions
        assert all(engine in CONTAINERS[container].engines for container in table.found)
        assert Measured.from_dict(table.to_dict()) == table


def test_a_usual_checkpoint_loads_where_it_was_measured() -> None:
    expected = {RUNTIME: True, TRANSFORMERS: True, VLLM: True, SGLANG: None}
    assert loads("compressed-tensors", "llama", Int(4, 128)) == expected
    assert loads("dense", "llama") == expected | {TRANSFORMERS: True}


@pytest.mark.parametrize(
    ("engine", "container", "model_type", "scheme"),
    [
        (TRANSFORMERS, "compressed-tensors", "gpt_oss", Int(4, 128)),
        (VLLM, "compressed-tensors", "gpt_oss", Int(4, 128)),
        (VLLM, "compressed-tensors", "gpt_oss", Mxfp4()),
        (TRANSFORMERS, "compressed-tensors", "granitemoe", Int(4, 128)),
        (TRANSFORMERS, "compressed-tensors", "granitemoehybrid", Int(4, 128)),
        (TRANSFORMERS, "compressed-tensors", "mistral4", Int(4, 128)),
        (TRANSFORMERS, "compressed-tensors", "llama", Int(4, 64, symmetric=False)),
        (VLLM, "gptq", "llama", Int(3, 128)),
        (VLLM, "gptq", "a type that nothing was measured with", Int(2, 32)),
        (VLLM, "compress-runtime", "mixtral", LowRank(Int(4, 32), 8)),
    ],
    ids=str,
)
def test_refusals_have_a_reason(engine: str, container: str, model_type: str, scheme: Scheme) -> None:
    (found,) = [each for each in readers(container, {"model_type": model_type}, [scheme]) if each.engine == engine]
    assert found.loads is False
    assert found.refusal


def test_one_form_of_several_decides() -> None:
    assert loads("gptq", "llama", Int(4, 128), Int(3, 128))[VLLM] is False


def test_what_was_not_measured_is_unknown() -> None:
    unknown = dict.fromkeys((TRANSFORMERS, VLLM, SGLANG))
    assert loads("compressed-tensors", "a new type", Int(4, 128)) == {RUNTIME: True, **unknown}
    assert loads("mxfp4", "gpt_oss", Mxfp4()) == {RUNTIME: True, **unknown}
    inside = text_part({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    assert {each.loads for each in readers("dense", inside, [])} == {True, None}


@pytest.mark.parametrize(
    ("scheme", "name", "exact"),
    [
        (Int(4, 64), "w4a16 sym", "w4a16 g64 sym"),
        (Int(8, None, activations=Activations.INT8), "w8a8 sym", "w8a8 channel sym"),
        (Fp8(), "w8a16 fp8", "w8a16 fp8 channel"),
        (BlockFp8(), "w8a16 fp8 blocks 128x128", "w8a16 fp8 blocks 128x128"),
        (Nvfp4(), "w4a16 nvfp4", "w4a16 nvfp4 g16"),
    ],
    ids=str,
)
def test_forms_have_names_without_sizes(scheme: Scheme, name: str, exact: str) -> None:
    assert form_of("compressed-tensors", scheme) == name
    assert form_of("compressed-tensors", scheme, with_groups=True) == exact


def test_forms_of_our_own_are_named_by_their_structure() -> None:
    schemes = LowRank(Int(4, 32), 8), NM(Int(4, 32), NMSparsity(2, 4))
    assert [form_of("compress-runtime", scheme) for scheme in schemes] == ["rank", "sparsity"]


@pytest.mark.parametrize(
    ("schemes", "bits"),
    [([Int(4, 128)], []), ([Mxfp8(), Int(8, 128)], ["8 bits"]), ([Mxfp4(), Mxfp8()], ["4 bits", "8 bits"])],
)
def test_inputs_that_vllm_rounds_unasked_are_told(schemes: Iterable[Scheme], bits: list[str]) -> None:
    notes = input_notes(schemes)
    assert len(notes) == len(bits)
    assert all(width in note and VLLM in note for width, note in zip(bits, notes, strict=True))


def test_the_description_leaves_out_what_no_engine_does() -> None:
    said = described(readers("compressed-tensors", {"model_type": "gpt_oss"}, [Int(4, 128)]))
    assert said["loaded by"] == RUNTIME
    assert TRANSFORMERS in said["not loaded by"]
    assert said["not known of"] == SGLANG
    assert "not loaded by" not in described(readers("gguf", {"model_type": "llama"}, [Int(4, 32)]))
