"""GLM-4 with the sizes of its configuration class."""

from torch import device
from transformers import AutoConfig, AutoModelForCausalLM

from compress.models.registry import find_family


def test_sizes_of_a_config_without_fields() -> None:
    config = AutoConfig.for_model("glm")
    with device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    family = find_family("glm")
    assert family is not None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert family(config.to_dict()).parameters() == shapes
