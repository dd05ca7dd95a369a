"""The gate of 8-bit activations: a record or an own measurement decides, exact runs stay exact."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from folders import change_config, private_copy
from runs import compress, with_outliers

import runtime.activations
from compress.checkpoint.activations import (
    ACTIVATIONS_MEASURED_KEY,
    AS_STORED,
    EIGHT_BITS,
    MAX_SHARE,
    SIXTEEN_BITS,
    measured_activations,
)
from compress.checkpoint.config import COMPRESSION_KEY, read_config
from compress.checkpoint.weights import Activations, Int, Mxfp4, Scheme
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, ToolkitError
from compress.cpu.binding import library
from compress.stages.quantize import QuantizeStage
from runtime.activations import AddedDivergence, choose_activations, measure
from runtime.backends.cpu import linear_kernels
from runtime.backends.cpu.linear import Activations as Rounding
from runtime.backends.registry import is_fast
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM
from runtime.model.loader import load_model, open_weights
from runtime.model.scoring import score

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled library")
in_16_bits = pytest.mark.skipif(
    not is_fast(torch.bfloat16), reason="this processor computes in float32, where activations are not rounded"
)
TOKENS = torch.randint(10, 4000, (2, 32), generator=torch.Generator().manual_seed(1))
OUTLIERS = list(range(32, 64))
"""One group of columns."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compress-runtime" / "activations"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with 4-bit weights, measured by the run."""
    out = tmp_path_factory.mktemp("models") / "packed"
    compress(demo_model_path(), out, QuantizeStage("rtn", Int(4, 128)), measure=True)
    return out


def pack(folder: Path, scheme: Scheme, source: Path | None = None) -> Path:
    """The demo model rounded without a measurement, as other tools do."""
    compress(source or demo_model_path(), folder, QuantizeStage("rtn", scheme))
    return folder


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("models") / "packed", Int(4, 128))


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[AddedDivergence]:
    """Those that were made."""
    made: list[AddedDivergence] = []

    def count(*arguments: object) -> AddedDivergence:
        made.append(measure(*arguments))
        return made[-1]

    monkeypatch.setattr(runtime.activations, "measure", count)
    return made


def measured(path: Path) -> AddedDivergence:
    return measure(*open_weights(path, "cpu", "bfloat16", "auto", False, False))


@in_16_bits
def test_compression_records_both_divergences_and_reports_what_is_served(recorded: Path) -> None:
    found = measured_activations(read_config(recorded))
    assert found is not None
    assert found.kl_16bit < found.kl_8bit <= (1 + MAX_SHARE) * found.kl_16bit
    assert choose_activations(recorded, device="cpu").activations == EIGHT_BITS


@in_16_bits
def test_a_record_is_read_and_nothing_is_measured(recorded: Path, measurements: list, cache: Path) -> None:
    assert choose_activations(recorded, device="cpu").kernels == EIGHT_BITS
    assert not measurements
    assert not cache.exists()


@in_16_bits
@pytest.mark.parametrize(("share", "form"), [(0.0, EIGHT_BITS), (0.99, EIGHT_BITS), (1.01, SIXTEEN_BITS)])
def test_the_limit_is_a_tenth_of_the_own_divergence(share: float, form: str, recorded: Path, tmp_path: Path) -> None:
    path = private_copy(recorded, tmp_path / "model")
    record = read_config(path)[COMPRESSION_KEY][ACTIVATIONS_MEASURED_KEY]
    record["kl_8bit"] = record["kl_16bit"] * (1 + share * MAX_SHARE)
    change_config(path, **{COMPRESSION_KEY: {"format_version": 1, ACTIVATIONS_MEASURED_KEY: record}})
    choice = choose_activations(path, device="cpu")
    assert choice.activations == form
    assert len(choice.notes) == 1


@pytest.mark.parametrize("record", [{}, {"kl_16bit": 0.1}, "0.1", {"kl_16bit": "a", "kl_8bit": "b"}])
def test_a_damaged_record_is_refused(record: object) -> None:
    block = {ACTIVATIONS_MEASURED_KEY: record}
    if isinstance(record, dict) and len(record) == 2:
        block[ACTIVATIONS_MEASURED_KEY] = record | {"tokens": 1, "data": "", "data_sha256": "", "protocol": ""}
    with pytest.raises(CheckpointError, match=ACTIVATIONS_MEASURED_KEY):
        measured_activations({COMPRESSION_KEY: block})


@in_16_bits
def test_another_tools_checkpoint_is_measured_once_and_the_answer_kept(
    unrecorded: Path, measurements: list, cache: Path, tmp_path: Path
) -> None:
    path = private_copy(unrecorded, tmp_path / "model")
    assert choose_activations(path, device="cpu") != choose_activations(path, device="cpu")  # when it was measured
    assert len(measurements) == 1
    assert measurements[0].is_within_limit
    assert len(list(cache.iterdir())) == 1
    assert {file.name for file in path.iterdir()} == {file.name for file in unrecorded.iterdir()}
    change_config(path, rope_parameters={"rope_theta": 9000.0, "rope_type": "default"})
    choose_activations(path, device="cpu")
    assert len(measurements) == 2


@in_16_bits
def test_an_answer_that_cannot_be_kept_still_serves(
    unrecorded: Path, measurements: list, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.parent.write_text("no folder")
    assert choose_activations(unrecorded, device="cpu").activations == EIGHT_BITS
    assert len(measurements) == 1


def test_a_checkpoint_without_tokenizer_keeps_16_bits(unrecorded: Path, tmp_path: Path) -> None:
    path = private_copy(unrecorded, tmp_path / "model")
    (path / "tokenizer.json").unlink()
    assert choose_activations(path, device="cpu").activations == SIXTEEN_BITS


def test_the_limit_without_a_record_follows_the_bits_of_the_weights(unrecorded: Path, tmp_path: Path) -> None:
    four, eight = measured(unrecorded), measured(pack(tmp_path / "packed", Int(8, 128)))
    assert four.limit == 4**4 * eight.limit
    assert four.kl == pytest.approx(eight.kl, rel=0.5)  # rounding activations costs alike
    assert four.is_within_limit
    assert not eight.is_within_limit


def test_scales_by_groups_of_columns_bear_outliers_that_scales_of_rows_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_outliers(demo_model_path(), tmp_path / "dense", OUTLIERS, 128.0)
    path = pack(tmp_path / "packed", Int(4, 32), source)
    by_groups = measured(path)
    assert by_groups.is_within_limit
    rows = SimpleNamespace(INT8_GROUP=Rounding.INT8_ROW, INT8_ROW=Rounding.INT8_ROW, FLOAT=Rounding.FLOAT)
    monkeypatch.setattr(linear_kernels, "Activations", rows)
    by_rows = measured(path)
    assert not by_rows.is_within_limit
    assert by_rows.kl > 100 * by_groups.kl
    assert choose_activations(path, device="cpu").activations == SIXTEEN_BITS  # the gate refuses them


def test_outliers_in_every_group_are_refused(tmp_path: Path) -> None:
    source = with_outliers(demo_model_path(), tmp_path / "dense", [5, 77, 130, 201], 128.0)
    path = pack(tmp_path / "packed", Int(4, 128), source)
    assert measured(path).kl > 0.1
    assert choose_activations(path, device="cpu").activations == SIXTEEN_BITS


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "float64"}, {"kernels": "reference"}, {"kernels": "cpu"}]
)
def test_exact_runs_stay_exact(options: dict, recorded: Path) -> None:
    choice = choose_activations(recorded, device="cpu", **options)
    assert choice.kernels == options.get("kernels", "auto")
    expected = score(load_model(recorded, device="cpu", **options), TOKENS)
    found = score(load_model(recorded, device="cpu", **(options | {"kernels": choice.kernels})), TOKENS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options", [{"dtype": "float64"}, {"kernels": "reference"}, {"path": demo_model_path}, {"path": "floats"}]
)
def test_8_bits_without_such_kernels_are_refused(options: dict, recorded: Path, tmp_path: Path) -> None:
    path = options.pop("path", recorded)
    path = pack(tmp_path / "packed", Mxfp4()) if path == "floats" else path() if callable(path) else path
    with pytest.raises(ToolkitError) as caught:
        choose_activations(path, EIGHT_BITS, device="cpu", **options)
    assert "--activations" in caught.value.remedy
    choice = choose_activations(path, device="cpu", **options)
    assert choice.activations == SIXTEEN_BITS
    assert len(choice.notes) == (path != demo_model_path())  # a dense model has no packed weights to speak of


@pytest.mark.parametrize("scheme", [Int(8, None, True, Activations.INT8), Int(4, 64, True, Activations.INT4)], ids=str)
def test_activations_that_the_checkpoint_rounds_itself_stay_as_they_are(scheme: Int, tmp_path: Path) -> None:
    choice = choose_activations(pack(tmp_path / "packed", scheme), device="cpu")
    assert (choice.kernels, choice.activations) == ("auto", AS_STORED)
    assert str(scheme) in choice.notes[0]


@pytest.mark.parametrize("name", ["w4a8", EIGHT_BITS])
def test_the_old_spelling_names_the_new_one(name: str, recorded: Path) -> None:
    with pytest.raises(ToolkitError) as caught:
        choose_activations(recorded, kernels=name)
    assert f"--activations {EIGHT_BITS}" in caught.value.remedy


@pytest.fixture
def serve(recorded: Path) -> Callable[..., LLM]:
    return lambda **options: LLM(recorded, RuntimeConfig(device="cpu", num_blocks=128, **options))


@in_16_bits
def test_the_engine_serves_what_is_chosen_and_says_so(serve: Callable[..., LLM]) -> None:
    for asked, kernel in (("auto", "cpu_w4a8"), (SIXTEEN_BITS, "kernel cpu "), (EIGHT_BITS, "cpu_w4a8")):
        first, *others = serve(activations=asked).engine.runner.decoder.description
        assert first.startswith("activations")
        assert any(kernel in line for line in others)


@in_16_bits
def test_an_answer_does_not_depend_on_other_sequences(serve: Callable[..., LLM]) -> None:
    llm = serve(activations=EIGHT_BITS)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
    prompts = ["Once upon a time", "The sea", "def main():", "One", "A long way from here there was", "Why"]
    together = llm.generate(prompts, sampling)
    for prompt, beside in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], sampling)
        assert alone.token_ids == beside.token_ids
        assert alone.logprobs == beside.logprobs
