"""Layers of tiny models that are one block each: Mamba-2, attention, MLP or experts.

And those of Nemotron-4, which has their MLP behind attention, and LayerNorms with biases.
"""

from __future__ import annotations

from tiny_tensors import Tensor, plain

AROUND = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
}
IN_PROJ, CONV = ("z", "x", "B", "C", "dt"), ("x", "B", "C")


def shortened(pattern: str, layers: int) -> str:
    """A pattern of that many layers, repeated or cut."""
    return (pattern * layers)[:layers]


def one_block(a, core: str, hf: str, letter: str, attention) -> list[Tensor]:
    """One layer's tensors; ``attention`` gives those of plain attention."""
    size = (a.hidden_size,)
    kinds = {"M": mamba, "-": mlp, "E": experts}
    norms = {"M": "norm", "*": "input_layernorm"}
    name = norms.get(letter, "pre_mlp_layernorm")
    inner = (
        attention(a, core + "self_attention.", hf + "mixer.")
        if letter == "*"
        else kinds[letter](a, core, hf + "mixer.")
    )
    return [plain(f"{core}{name}.weight", hf + "norm.weight", size), *inner]


def mamba(a, core: str, hf: str) -> list[Tensor]:
    """in_proj is [z; x; B; C; dt], conv1d's channels are [x; B; C]."""
    core += "mixer."
    inner = a.mamba_num_heads * a.mamba_head_dim
    state = a.mamba_num_groups * a.mamba_state_dim
    blocks = (inner, inner, state, state, a.mamba_num_heads)
    channels = (inner, state, state)
    projection = ((hf + "in_proj.weight", (sum(blocks), a.hidden_size)),)
    conv = {"weight": (sum(channels), 1, 4), "bias": (sum(channels),)}
    heads = ((a.mamba_num_heads,), "column")
    return [
        Tensor(core + "in_proj.weight", "blocks", projection, blocks=blocks, block_names=IN_PROJ),
        *(
            Tensor(f"{core}conv1d.{kind}", "blocks", ((f"{hf}conv1d.{kind}", shape),),
                   blocks=channels, block_names=CONV)
            for kind, shape in conv.items()
        ),
        Tensor(core + "A_log", "column", ((hf + "A_log", heads[0]),), fp32=True),
        Tensor(core + "D", "column", ((hf + "D", heads[0]),), fp32=True),
        plain(core + "dt_bias", hf + "dt_bias", *heads),
        plain(core + "norm.weight", hf + "norm.weight", (inner,), "column"),
        plain(core + "out_proj.weight", hf + "out_proj.weight", (a.hidden_size, inner), "row"),
    ]  # fmt: skip


def mlp(a, core: str, hf: str, width: int = 0, size: int = 0) -> list[Tensor]:
    """Without a gate; ``core`` ends before ``mlp.`` for a layer's own."""
    own = not width
    width, size = width or a.ffn_hidden_size, size or a.hidden_size
    core += "mlp." if own else ""
    return [
        plain(core + "linear_fc1.weight", hf + "up_proj.weight", (width, size), "column"),
        plain(core + "linear_fc2.weight", hf + "down_proj.weight", (size, width), "row"),
    ]


def experts(a, core: str, hf: str) -> list[Tensor]:
    """A sigmoid router with a bias, a shared expert, and perhaps a latent space."""
    core += "mlp."
    hidden, latent = a.hidden_size, a.moe_latent_size
    bias = ((hf + "gate.e_score_correction_bias", (a.num_experts,)),)
    found = [
        plain(core + "router.weight", hf + "gate.weight", (a.num_experts, hidden)),
        Tensor(core + "router.expert_bias", "copy", bias, fp32=True),
        *mlp(a, core + "shared_experts.", hf + "shared_experts.",
             a.moe_shared_expert_intermediate_size),
    ]  # fmt: skip
    for name, shape in (("fc1", (latent, hidden)), ("fc2", (hidden, latent))):
        if latent:
            at = f"{name}_latent_proj.weight"
            found.append(plain(core + at, hf + at, shape))
    for expert in range(a.num_experts):
        at = f"{core}experts.local_experts.{expert}."
        found += mlp(a, at, f"{hf}experts.{expert}.", a.moe_ffn_hidden_size, latent or hidden)
    return found


def nemotron4(a, core: str, hf: str, attention) -> list[Tensor]:
    """A Nemotron-4 layer."""
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    return [
        *(
            plain(f"{core}{ours}.{kind}", f"{hf}{theirs}.{kind}", (a.hidden_size,))
            for ours, theirs in norms.items()
            for kind in ("weight", "bias")
        ),
        *attention(a, core + "self_attention.", hf + "self_attn."),
        *mlp(a, core, hf + "mlp."),
    ]
