"""Parts of weights have the shapes that the description of a rank's part says."""

import pytest
import torch
from tiny_configs import SIZES, VARIANTS
from transformers import AutoConfig

from compress.models.cuts import Cuts, Rank
from compress.models.registry import FAMILIES
from runtime.core.model_config import parse_config
from runtime.parallel.parts import cut_vector, cut_weight


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parts_have_the_shapes_of_their_description(family: str, count: int) -> None:
    try:
        config = AutoConfig.for_model(family, **(SIZES | VARIANTS[family])).to_dict()
    except ValueError:
        pytest.skip("transformers has no such model")
    spec = parse_config(config).spec
    matrices, vocabulary = spec.matrices(), (*spec.embeddings, spec.names.head)
    for index in range(count):
        cuts = Cuts(Rank(index, count), lambda module: 1)
        part = spec.cut(cuts).parameters()
        for name, shape in spec.parameters().items():
            module = name.removesuffix(".weight")
            cut = cuts.found.get(module if module in matrices else name)
            if cut is not None and module not in vocabulary and name != f"{spec.names.head}.bias":
                shape = (cut_weight if module in matrices else cut_vector)(torch.empty(shape, device="meta"), cut).shape
            assert part.get(name, shape) == shape, name
