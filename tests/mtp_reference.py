"""Answers of the layers that predict further tokens, computed with transformers' own layers.

transformers builds no such layer for DeepSeek V3, so the layer is its decoder layer of one model
with more layers, and what surrounds it is written out here as the release describes it
(DeepSeek-V3 technical report, section 2.2: norms of the hidden state and of the next token's
embedding, joined and projected, one block, the shared output head).
"""

from __future__ import annotations

import torch
from converted import read_tensors
from torch.nn.functional import embedding, linear, rms_norm

from ckpt.validate.hf_run import load_model


def mtp_logits(directory, ids):
    """Logits [batch, positions, vocabulary] of each further token's head, the nearest first."""
    tensors = read_tensors(directory)
    model = load_model(directory)
    config = model.config
    layers, further = config.num_hidden_layers, config.num_nextn_predict_layers
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        found = []
        for number in range(layers, layers + further):
            own = {
                name.removeprefix(f"model.layers.{number}."): value.float()
                for name, value in tensors.items()
                if name.startswith(f"model.layers.{number}.")
            }
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))  # the next token; none after the last
            hidden = _layer(model, own, hidden, ids)
            found.append(linear(hidden, own["shared_head.head.weight"]))
    return found


def _layer(model, own, hidden, ids):
    config = model.config
    size, eps = (config.hidden_size,), config.rms_norm_eps
    token = rms_norm(embedding(ids, own["embed_tokens.weight"]), size, own["enorm.weight"], eps)
    before = rms_norm(hidden, size, own["hnorm.weight"], eps)
    joined = linear(torch.cat([token, before], dim=-1), own["eh_proj.weight"])
    layer = _decoder_layer(model, own)
    positions = torch.arange(ids.shape[1])[None]
    rotary = model.model.rotary_emb(joined, positions)
    mask = torch.full((ids.shape[1],) * 2, torch.finfo(joined.dtype).min).triu(1)[None, None]
    after = layer(joined, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
    after = after[0] if isinstance(after, tuple) else after
    return rms_norm(after, size, own["shared_head.norm.weight"], eps)


def _decoder_layer(model, own):
    """transformers' decoder layer with the tensors of the further layer."""
    last = model.config.num_hidden_layers - 1
    layer = type(model.model.layers[last])(model.config, last).float().eval()
    state = {
        name: value
        for name, value in own.items()
        if name.startswith(("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm."))
    }
    experts = range(model.config.n_routed_experts)

    def stacked(kind):
        return torch.stack([state.pop(f"mlp.experts.{e}.{kind}_proj.weight") for e in experts])

    if "mlp.experts.0.gate_proj.weight" in state:
        state["mlp.experts.gate_up_proj"] = torch.cat([stacked("gate"), stacked("up")], dim=1)
        state["mlp.experts.down_proj"] = stacked("down")
    layer.load_state_dict(state)
    return layer
