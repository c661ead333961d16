"""GPT-2, GPT-NeoX and BLOOM: tensors with biases, and how Hugging Face keeps them.

A name with ``#`` is a part of the Hugging Face tensor before it; parts are joined in order.
"""

from __future__ import annotations

import torch

GPT2 = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "input_layernorm": "ln_1",
    "linear_qkv": "attn.c_attn",
    "linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "linear_fc1": "mlp.c_fc",
    "linear_fc2": "mlp.c_proj",
    "decoder.final_layernorm": "transformer.ln_f",
    "output_layer.weight": "lm_head.weight",
    "layer": "transformer.h.{}.",
}
NEOX = {
    "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
    "input_layernorm": "input_layernorm",
    "linear_qkv": "attention.query_key_value",
    "linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "linear_fc1": "mlp.dense_h_to_4h",
    "linear_fc2": "mlp.dense_4h_to_h",
    "decoder.final_layernorm": "gpt_neox.final_layer_norm",
    "output_layer.weight": "embed_out.weight",
    "layer": "gpt_neox.layers.{}.",
}
BLOOM = {
    **NEOX,
    "embedding.word_embeddings.weight": "transformer.word_embeddings.weight",
    "embedding.word_embeddings.norm": "transformer.word_embeddings_layernorm",
    "linear_qkv": "self_attention.query_key_value",
    "linear_proj": "self_attention.dense",
    "decoder.final_layernorm": "transformer.ln_f",
    "output_layer.weight": "lm_head.weight",
    "layer": "transformer.h.{}.",
}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def rows(a, names):
    """(training name, kind, parts) of every tensor of a model of this kind."""
    hidden, ffn = a.hidden_size, a.ffn_hidden_size
    table = (a.vocab_size, hidden)
    yield from embeddings(a, names, table)
    # GPT-2 keeps all queries, all keys, all values; the others the order of Megatron's heads
    fused = names is not GPT2
    qkv = ("column", [(3 * hidden, hidden)]) if fused else ("qkv", [(hidden, hidden)] * 3)
    for layer in range(a.num_layers):
        core, hf = f"decoder.layers.{layer}.", names["layer"].format(layer)
        linears = {
            "self_attention.linear_qkv": qkv,
            "self_attention.linear_proj": ("row", [(hidden, hidden)]),
            "mlp.linear_fc1": ("column", [(ffn, hidden)]),
            "mlp.linear_fc2": ("row", [(hidden, ffn)]),
        }
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            for what in ("weight", "bias"):
                parts = ((f"{hf}{names[norm]}.{what}", (hidden,)),)
                yield f"{core}{norm}.{what}", "copy", parts
        for name, (kind, shapes) in linears.items():
            at = hf + names[name.rpartition(".")[2]]
            suffixes = ["#q", "#k", "#v"] if kind == "qkv" else [""]
            for what in ("weight", "bias"):
                parts = tuple(
                    (f"{at}.{what}{suffix}", shape if what == "weight" else shape[:1])
                    for suffix, shape in zip(suffixes, shapes, strict=True)
                )
                # the bias of a linear that ranks add up is there once, and whole
                kept = "copy" if kind == "row" and what == "bias" else kind
                yield f"{core}{name}.{what}", kept, parts
    for what in ("weight", "bias"):
        last = f"{names['decoder.final_layernorm']}.{what}"
        yield f"decoder.final_layernorm.{what}", "copy", ((last, (hidden,)),)
    if a.untie_embeddings_and_output_weights:
        yield "output_layer.weight", "vocab", ((names["output_layer.weight"], table),)


def embeddings(a, names, table):
    """Words, and positions or a norm where the model has them."""
    word, place = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
    yield word, "vocab", ((names[word], table),)
    if place in names:
        yield place, "copy", ((names[place], (a.max_position_embeddings, a.hidden_size)),)
    norm = "embedding.word_embeddings.norm"
    for what in ("weight", "bias") if norm in names else ():
        yield f"{norm}.{what}", "copy", ((f"{names[norm]}.{what}", (a.hidden_size,)),)


def joined(found, conv1d=CONV1D):
    """Hugging Face's tensors: parts joined, and the weights of its Conv1D turned around."""
    whole: dict[str, list[torch.Tensor]] = {}
    for name, value in found.items():
        whole.setdefault(name.partition("#")[0], []).append(value)
    return {
        name: torch.cat(parts).t().contiguous() if name.endswith(conv1d) else torch.cat(parts)
        for name, parts in whole.items()
    }
