"""Models whose layers kernels can compute at once, as policy over their descriptions."""

from __future__ import annotations

from dataclasses import replace

from compress.models.architecture import is_pre_norm
from compress.models.mixers.attention import Attention
from compress.models.mlp import MLP, Mixture
from compress.models.router import Router
from compress.models.spec import ModelSpec


def layers_unsupported(spec: ModelSpec) -> str:
    """Says why fused layers cannot compute the blocks of a model, or of a stage; empty when they can."""
    blocks, mixers = [block for block in spec.blocks if block.mixers or block.parts], spec.attentions
    if len(mixers) < len(blocks) or blocks[0].second is not None:
        return "computes no recurrent layers"
    block, mixer, rope = blocks[0], mixers[0], mixers[0].rope
    if mixer.latent is not None:
        return "computes no projections to latents"
    if any(replace(each, window=mixer.window, rope=rope) != mixer for each in mixers):
        return "takes layers with the same heads, and keys and values of their own"
    unlike = [mlp for each in spec.blocks for mlp in each.mlps if not is_gated_silu(mlp)]
    others = {mlp.activation if mlp.clamped is None else "a clamped gate" for mlp in unlike}
    if others:
        return f"computes gated silu, not {', '.join(sorted(others))}"
    adds = block.parallel_mixture is not None or block.layer_input is not None or block.scalar
    if block.is_parallel or block.residual is not None or adds or not is_pre_norm(block):
        return "computes plain norms before attention and MLP only, and adds what they give as it is"
    if rope is None or rope.partial != 1 or rope.interleaved or any(each.rope != rope for each in mixers):
        return "rotates all layers and channels alike"
    if mixer.output_gate or mixer.head_gate is not None:
        return "has no gate after attention"
    if mixer.scale is not None or mixer.position_scale is not None:
        return "computes scores divided by the root of the head dimension"
    if mixer.softcap is not None or mixer.chunk is not None or mixer.sink_logits:
        return "knows no soft caps, chunks of tokens and sink logits"
    if mixer.qk_norm is not None and not fuses_head_norms(mixer):
        return "computes plain norms of heads before their rotation only"
    return ""


def latents_unsupported(spec: ModelSpec) -> str:
    """Says that an attention does not read the latents of a model; empty for a model without."""
    return "reads no latents" if any(mixer.latent is not None for mixer in spec.attentions) else ""


def indexers_unsupported(spec: ModelSpec) -> str:
    """Says that an attention cannot leave out tokens; empty for a model without indexers."""
    sparse = any(mixer.latent is not None and mixer.latent.indexer is not None for mixer in spec.attentions)
    return "sees all tokens, where an indexer chooses them" if sparse else ""


def is_gated_silu(mlp: MLP) -> bool:
    """Whether an MLP is that of Llama, whatever its sizes and biases."""
    return mlp.activation in ("silu", "swish") and mlp == MLP(mlp.inputs, mlp.down, mlp.activation, name=mlp.name)


def fuses_head_norms(mixer: Attention) -> bool:
    """Whether `Ops.rotate` computes the norms of query and key heads."""
    norms = mixer.qk_norm or ()
    return not mixer.norms_rotated and all(norm.is_plain and norm.size == mixer.head_dim for norm in norms)


def is_plain_mixture(mixture: Mixture) -> bool:
    """Whether routing and sum of a mixture are those of common families, whatever tensors hold it."""
    router = mixture.router
    weights = router.activation, router.normalizes, router.scale, router.bias, router.bias_is_row
    choice = router.num_groups, router.num_chosen_groups, router.in_float32, router.least_sum
    known = Router(router.scores, router.num_chosen, *weights, *choice)
    plain = Mixture(known, mixture.experts, mixture.shared, mixture.shared_gate, mixture.name, mixture.stacks)
    return router.activation in ("softmax", "sigmoid") and not router.scores.bias and mixture == plain
