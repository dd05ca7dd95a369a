"""Messages of errors: whole sentences, whatever their parts end with."""

import pytest

from compress.common.errors import ToolkitError


@pytest.mark.parametrize("end", ["", ".", " ", ". "])
def test_each_sentence_has_one_full_stop(end: str) -> None:
    assert str(ToolkitError(f"a is 1{end}", f"Set it to 2{end}")) == "a is 1. Set it to 2."
    assert str(ToolkitError(f"a is 1{end}", "Did you mean b?")) == "a is 1. Did you mean b?"
