"""Launches of 8B decoders through Triton's real path, onto a driver without a GPU."""

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

from jit_without_gpu.cases import FORMS
from jit_without_gpu.numbers import reading_zeros
from jit_without_gpu.own_process import compile_in_own_process
from jit_without_gpu.served import launch_with_blocks, serve_first_tokens, serve_overlapping

MOST_BUILDS = 20
"""Until the second token: each is a wait of about a second."""


@pytest.mark.full
@pytest.mark.every_combination
@pytest.mark.parametrize("form", FORMS)
def test_few_builds_come_before_the_second_token_and_later_launches_pass_triton_by(tmp_path: Path, form: str) -> None:
    builds, launches, again = compile_in_own_process(tmp_path, serve_first_tokens, form)
    assert not any(build.cached for build in builds)
    assert len({build.identity for build in builds}) == len(builds) <= MOST_BUILDS
    layers = FORMS[form].read_config()["num_hidden_layers"]
    assert launches >= 2 * 5 * layers
    assert again == (0, 0)


IN_LAYERS = {"add_rms_norm_kernel", "fused_qk_norm_rope_kv_write", "list_tiles", "paged_attention", "join_splits"}
BEHIND_LAYERS = 6
"""Launches of a step of Llama that do not overlap: final norm, head with its sums, and two that draw a token."""


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["int4 of 32 with zeros", "2 bits with zeros", "int8 inputs", "rotated inputs", "fp8 in float16", "nvfp4"]
)
def test_kernels_that_overlap_touch_no_memory_before_they_wait(tmp_path: Path, name: str) -> None:
    found = compile_in_own_process(tmp_path, serve_overlapping, name)
    launches, overlapping = found.launches
    assert 0 <= launches - overlapping <= BEHIND_LAYERS
    assert {kernel for kernel, _ in found.sources} > IN_LAYERS
    for kernel, source in found.sources:
        before, waits, after = source[source.index(".entry") :].partition("griddepcontrol.wait")
        assert waits, kernel
        assert "griddepcontrol.launch_dependents" in after, kernel
        touched = set(re.findall(r"\b(?:ld|st|cp|atom|red|prefetch|bra|ret)\.\w+(?:\.\w+)*", before))
        assert touched <= {*PARAMETERS, "prefetch.global.L2"}, kernel


@pytest.mark.full
def test_a_kernel_can_be_left_out_of_the_overlap(tmp_path: Path) -> None:
    found = compile_in_own_process(tmp_path, serve_overlapping, "int4 in float16", ("add_rms_norm_kernel",))
    launches, overlapping = found.launches
    assert launches - overlapping > BEHIND_LAYERS
    assert "add_rms_norm_kernel" not in {kernel for kernel, _ in found.sources}
    assert "fused_qk_norm_rope_kv_write" in {kernel for kernel, _ in found.sources}


PARAMETERS = [f"ld.param.{kind}" for kind in ("b32", "b64", "u32", "u64", "f32")]


@pytest.mark.full
def test_a_grid_that_no_gpu_has_is_refused(tmp_path: Path) -> None:
    assert compile_in_own_process(tmp_path, launch_with_blocks, 2**16 - 1) == 1
    with pytest.raises(RuntimeError, match="invalid argument"):
        compile_in_own_process(tmp_path, launch_with_blocks, 2**16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled")
def test_a_process_that_interprets_kernels_has_no_session() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        launch_with_blocks(1)


def test_tensors_without_numbers_read_as_zeros_within_a_session_only() -> None:
    empty = torch.empty(2, 3, dtype=torch.int64, device="meta")
    with reading_zeros():
        assert empty[0].tolist() == [0, 0, 0]
        assert torch.ones(3).copy_(empty[0]).tolist() == [0, 0, 0]
        assert not empty[0, 0]
        assert empty.new_empty(4, dtype=torch.int8).dtype == torch.int8
        assert torch.ones(2).tolist() == [1, 1]
        assert torch.ones(2).new_empty(3).device.type == "cpu"
    with pytest.raises(NotImplementedError):
        empty.tolist()
    with pytest.raises(NotImplementedError):
        torch.ones(3).copy_(empty[0])
