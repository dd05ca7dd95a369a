from typing import Any

import pytest

from compress.checkpoint.kv_cache import KV_FORMATS, KVCacheScheme, stored_kv_cache, wished_kv_cache
from compress.common.errors import SchemeError

RECORDED = KVCacheScheme("int4", rotate=True, sinks=4)


def test_sizes_count_scales_and_offsets() -> None:
    assert [KVCacheScheme(name).head_bytes(128, 2) for name in KV_FORMATS] == [512, 260, 264, 200, 136]
    assert [KVCacheScheme(name).bits_per_number(128) for name in KV_FORMATS] == [16, 8.125, 8.25, 6.25, 4.25]
    assert KVCacheScheme().head_bytes(64, 8) == 2 * 64 * 8


def test_keys_and_values_may_differ() -> None:
    assert [(KVCacheScheme(n).key_format, KVCacheScheme(n).value_format) for n in ("k8v4", "fp8")] == [
        ("int8", "int4"),
        ("fp8", "fp8"),
    ]


def test_what_is_stored_is_read() -> None:
    for scheme in (KVCacheScheme(), KVCacheScheme("fp8"), KVCacheScheme("k8v4", True, 4, 32)):
        assert KVCacheScheme.from_dict(scheme.to_dict()) == scheme
        assert stored_kv_cache({"compression_config": {"kv_cache": scheme.to_dict()}}) == scheme
    assert stored_kv_cache({}) is None
    assert KVCacheScheme.from_dict({"format": "int8"}) == KVCacheScheme("int8")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"format": "int3"}, r"'int3'.*16bit.*fp8"),
        ({"format": "int4", "group": 32}, "'group'"),
        ({"format": "int4", "sinks": -1}, "sinks=-1"),
        ({"format": "int4", "recent": 1.5}, "recent=1.5"),
        ({"format": "int4", "rotate": "yes"}, "rotate='yes'"),
        ({"format": "16bit", "sinks": 4}, "exact already"),
        ("int4", "not an object"),
    ],
)
def test_refusals_name_what_is_wrong(block: Any, words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        KVCacheScheme.from_dict(block)


def test_wishes_go_before_what_is_recorded() -> None:
    assert wished_kv_cache(None) == KVCacheScheme()
    assert wished_kv_cache(None, "int4") == KVCacheScheme("int4", rotate=True)
    assert wished_kv_cache(RECORDED) == wished_kv_cache(RECORDED, "int4") == RECORDED
    assert wished_kv_cache(RECORDED, "fp8") == KVCacheScheme("fp8")
    assert wished_kv_cache(RECORDED, "16bit") == KVCacheScheme()
    assert wished_kv_cache(RECORDED, residual_length=8) == KVCacheScheme("int4", True, 4, 8)
    assert wished_kv_cache(RECORDED, rotate=False, sinks=0) == KVCacheScheme("int4")
    with pytest.raises(SchemeError, match="exact already"):
        wished_kv_cache(None, sinks=4)
