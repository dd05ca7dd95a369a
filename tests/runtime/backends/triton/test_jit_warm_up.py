"""Warm-up of decoders through Triton's real path, onto a driver without a GPU: nothing is compiled afterwards."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")
if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

from jit_without_gpu.cases import FORMS
from jit_without_gpu.own_process import compile_in_own_process
from jit_without_gpu.warmed import Warmed, warm_up_and_serve

from runtime.backends.triton.kernel_cache import unpack_kernels
from runtime.core.progress import Stage


@pytest.mark.slow
@pytest.mark.every_combination
@pytest.mark.parametrize(("form", "kv_cache"), [*((form, "16bit") for form in FORMS), ("int4", "int4")])
def test_no_request_compiles_and_an_archive_brings_all_kernels(form: str, kv_cache: str, tmp_path: Path) -> None:
    options = {"kv_cache": kv_cache, "speculative_model": "ngram" if form == "int8" else ""}
    archive, elsewhere = tmp_path / "kernels.tar.xz", tmp_path / "elsewhere"
    cold: Warmed = compile_in_own_process(tmp_path / "cache", warm_up_and_serve, form, archive, **options)
    assert cold.after == []
    compiled = [build.identity for build in cold.before if not build.cached]
    assert len(compiled) == len(set(compiled)) == len({build.identity for build in cold.before})
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert unpack_kernels(archive, elsewhere) >= len(compiled)
    warm: Warmed = compile_in_own_process(elsewhere, warm_up_and_serve, form, **options)
    assert {build.identity for build in warm.before} == set(compiled)
    assert all(build.cached for build in warm.before)
    assert warm.after == []
    assert 0 < warm.reported[Stage.COMPILATION] < len(compiled)  # those of two steps told that all are there
