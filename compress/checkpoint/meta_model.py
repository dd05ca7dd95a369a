"""Models of transformers without weights, built from the config.json of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compress.checkpoint.config import CONFIG_FILE, dense_config
from compress.common.errors import CheckpointError
from compress.common.files import without_marks
from compress.models.architecture import Architecture, architecture_of
from compress.models.config import MAX_LAYERS, positive, refusal, text
from compress.models.generic import architecture_by_structure
from compress.models.registry import find_family
from compress.models.wrappers import OUTER, TIED

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


_OTHER_INPUTS = ("vision_config", "audio_config", "text_config")


def check_decoder(path: Path, config: dict[str, Any], trust_remote_code: bool = False) -> None:
    """Raises CheckpointError for models other than text-only decoders."""
    model_type = text(config, "model_type", "")
    if not model_type:
        raise CheckpointError(f"config.json of {path} has no model_type", "Use a Hugging Face model folder")
    other = [key for key in _OTHER_INPUTS if key in config]
    if other or config.get("is_encoder_decoder"):
        what = ", ".join(other) if other else "an encoder and a decoder"
        raise CheckpointError(
            f"model type {model_type!r} is not a decoder-only text model (config.json has {what})",
            "Use a decoder-only text model",
        )
    if "auto_map" in config and not trust_remote_code and not _is_known(model_type):
        raise CheckpointError(
            f"model type {model_type!r} needs Python code from {path}",
            "Read that code; if you trust it, add --trust-remote-code",
        )


def _is_known(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or _is_listed_elsewhere(model_type):
        return True
    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING


def load_config(path: Path, config: dict[str, Any], trust_remote_code: bool) -> PretrainedConfig:
    """Reads config.json with transformers. Raises CheckpointError for unknown or invalid values."""
    import transformers

    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise refusal("architectures", architectures, "a list of names")
    decoders = [name for name in architectures if name.endswith(("ForCausalLM", "LMHeadModel"))]
    known = trust_remote_code or _is_known(config["model_type"])
    if not known or (architectures and not decoders):
        raise CheckpointError(
            f"{' '.join(architectures) or 'this model'} (model type {config['model_type']!r}) is not a decoder-only "
            f"language model that transformers {transformers.__version__} knows",
            "Check config.json, or upgrade transformers if the model is newer: pip install -U transformers",
        )
    _check_sizes(config)
    try:
        loaded = read_transformers_config(path, config, trust_remote_code)
    # transformers and its validators raise unrelated types, and the code of a model folder any.
    except Exception as error:
        raise CheckpointError(
            f"config.json of {path} cannot be used: {_reason(error)}", "Correct config.json"
        ) from error
    # Weights are dequantized before the model sees them.
    loaded.__dict__.pop("quantization_config", None)
    if TIED in config:
        # A rotated source has a head of its own where the stored one has none.
        loaded.tie_word_embeddings = config[TIED]
    return loaded


def read_transformers_config(
    path: Path, config: Mapping[str, Any], trust_remote_code: bool = False
) -> PretrainedConfig:
    """Reads the config of a model, or of its text model, as transformers does, whose errors are of many types."""
    from transformers import AutoConfig

    if OUTER not in config:
        with without_marks(path) as folder:
            read = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
            return cast("PretrainedConfig", read)
    return AutoConfig.for_model(**{key: value for key, value in dense_config(config).items() if key != OUTER})


def _check_sizes(config: dict[str, Any]) -> None:
    """Raises CheckpointError for invalid sizes, naming the key, and for layer counts that would take hours to build."""
    if describe := find_family(config["model_type"]):
        describe(config)
    for key in ("num_hidden_layers", "n_layer"):
        if config.get(key) is not None:
            positive(config, key, most=MAX_LAYERS)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def build_on_meta(
    path: Path, config: PretrainedConfig, trust_remote_code: bool, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Builds a model with parameters on the meta device and real buffers.

    Args:
        dtype: of parameters, and of buffers that are made in it; None is float32, whatever the checkpoint's: then
            buffers are rounded where they are used, not here.

    Raises:
        CheckpointError: numbers that its modeling code cannot work with.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config.use_cache = False
    try:
        # Parameters go to the meta device one by one, so buffers keep the values that their modules compute.
        with init_empty_weights(include_buffers=False), no_init_weights():
            made = dtype or torch.float32
            model = auto_class(config.model_type).from_config(config, trust_remote_code=trust_remote_code, dtype=made)
            return cast("PreTrainedModel", model)
    except Exception as error:  # Any of many types, as above.
        raise CheckpointError(
            f"the model of {path} cannot be built: {_reason(error)}", "Correct config.json"
        ) from error


def build_described(config: Mapping[str, Any]) -> PreTrainedModel | None:
    """Builds the model of a config.json by transformers' own code, as `build_on_meta`; None for a type that it does not
    know. Raises CheckpointError for values that define no model."""
    from transformers import AutoConfig

    if not _is_known(str(config.get("model_type"))):
        return None
    try:
        described = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "auto_map"})
    except Exception as error:  # Any of many types, as above.
        raise CheckpointError(f"config.json cannot be used: {_reason(error)}", "Correct config.json") from error
    return build_on_meta(Path(CONFIG_FILE), described, trust_remote_code=False)


def auto_class(model_type: str) -> Any:
    """Returns the class of transformers that makes causal models of a type."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if _is_listed_elsewhere(model_type) else AutoModelForCausalLM


def _is_listed_elsewhere(model_type: str) -> bool:
    """Returns whether transformers lists a causal text model among multimodal ones only, such as Mistral 4."""
    from transformers.models.auto import modeling_auto

    listed = str(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type))
    return listed.endswith("ForCausalLM") and model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def find_architecture(model: PreTrainedModel) -> Architecture:
    """Finds the architecture of a model (which may be on the meta device), by family or else by structure.

    Raises:
        CheckpointError: sizes that define no model of its family, or no module list that could be the blocks.
    """
    from torch import nn

    from compress.checkpoint.modeling.experts import names_of_experts

    describe = find_family(model.config.model_type)
    if describe is not None:
        return architecture_of(describe(model.config.to_dict()))
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    found = architecture_by_structure(
        model.config.model_type,
        {name: len(module) for name, module in modules.items() if isinstance(module, nn.ModuleList)},
        {name for name, module in modules.items() if isinstance(module, nn.Linear)},
        embedding=names.get(model.get_input_embeddings(), ""),
        head=names.get(model.get_output_embeddings(), ""),
    )
    siblings, routers, experts = names_of_experts(modules[found.blocks].children())
    return replace(found, siblings=siblings, routers=routers, experts=experts)


@contextmanager
def no_loading_bar() -> Iterator[None]:
    """Hides the progress bar of transformers, which would interfere with that of this run."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
