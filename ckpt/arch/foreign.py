"""Models that are recognised and not supported: how each is told, and what stands in the way.

A row is consulted before a family is chosen, so that the message names the model and not the
family that happens to be nearest. Most names are Megatron-Bridge's (src/megatron/bridge/models).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Foreign:
    """One row: a model, why it cannot be converted, and what gives it away.

    ``tensors`` are patterns of training names, one of which suffices; ``arguments`` are groups
    of training arguments, one of which must be in use as a whole. ``aliases`` are what a user
    may call it with ``--family``, ``relatives`` the families that come nearest. ``hint`` is a
    next step that is better than a relative.
    """

    name: str
    reason: str
    tensors: tuple[str, ...] = ()
    arguments: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    relatives: tuple[str, ...] = ()
    hint: str = "Nothing was written"

    def evidence(self, names: Iterable[str], values: Mapping[str, Any]) -> str | None:
        """The first tensor or argument that gives the model away, or None."""
        for pattern in map(re.compile, self.tensors):
            found = next((name for name in names if pattern.search(name)), None)
            if found:
                return found
        for group in self.arguments:
            if all(values.get(argument) for argument in group):
                return ", ".join(f"{argument}={values[argument]!r:.40}" for argument in group)
        return None

    def error(self, evidence: str) -> FamilyError:
        """The refusal, with what gave the model away."""
        hint = self.hint
        if self.relatives:
            hint = f"Supported relatives: {', '.join(self.relatives)}"
        return FamilyError(f"this is {self.name} ({evidence}): {self.reason}", hint=hint)


FOREIGN: tuple[Foreign, ...] = (
    # What may be wrong with a checkpoint of any model.
    Foreign("a model with LoRA adapters that were not merged",
            "adapters beside the weights are not supported",
            tensors=(r"\.adapter\.", r"\.to_wrap\.", r"\.lora_\w+\."),
            hint="Merge the adapter into the weights first, and convert the merged checkpoint"),
    Foreign("multi-latent attention in its absorbed form, for inference",
            "the projection that it was made from is not stored",
            tensors=(r"\.linear_[kv]_up_proj\.",),
            hint="Convert the training checkpoint that it was made from"),
    Foreign("a model in MXFP4", "weights of 4 bits with scales are not supported",
            tensors=(r"_(blocks|scales)$",), aliases=("gpt_oss_mxfp4",),
            hint="Convert a checkpoint in bf16, as training keeps it"),
    Foreign("a heterogeneous model (puzzle)", "a size of its own for each layer is not supported",
            arguments=(("heterogeneous_block_specs",), ("heterogeneous_layers_config_path",),
                       ("heterogeneous_layers_config_encoded_json",)),
            aliases=("puzzle", "llama_nemotron"), relatives=("llama",)),
    Foreign("a model with a value, reward or classification head",
            "only heads that predict tokens are supported",
            tensors=(r"^(v_head|value_head|rm_head|reward_head|classification_head|score)\.",)),
    # Models of other kinds.
    Foreign("a model for images, video or sound",
            "only language models are supported; its language part alone is not written either",
            tensors=(r"^(vision|audio|visual|image|video|sound)(_\w+)?\.", r"^(thinker|talker)\.",
                     r"^(mm_projector|multi_modal_projector)\."),
            aliases=("llava", "qwen2_vl", "qwen2.5_vl", "qwen3_vl", "gemma3_vl", "glm4v",
                     "kimi_vl")),
    Foreign("BERT", "an encoder that fills in masked tokens is not supported",
            tensors=(r"^(lm_head\.(dense|layer_norm)|pooler|binary_head)\.",
                     r"^embedding\.tokentype_embeddings\."), aliases=("bert",)),
    Foreign("Retro", "a retriever in the model is not supported",
            arguments=(("retro_add_retriever",),), aliases=("retro",), relatives=("gpt2",)),
    Foreign("T5", "an encoder beside the decoder is not supported",
            tensors=(r"\.(cross_attention|inter_attention)\.",), aliases=("t5",)),
    # Families that come near to supported ones.
    Foreign("DeepSeek-V4", "its attention, hyper-connections and hashed routing are not supported",
            tensors=(r"\.linear_kv_proj\.", r"\.linear_o_group_proj", r"_hyper_connection\.",
                     r"\.router\.tid2eid$", r"\.attn_sink$", r"\.compressor\.",
                     r"^decoder\.hc_head"),
            aliases=("deepseek_v4",), relatives=("deepseek_v3", "deepseek_v32")),
    Foreign("Kimi K3", "its mixed residual streams and norms of experts are not supported",
            tensors=(r"(attention|mlp|output_attn)_res_(proj|norm)\.", r"\.routed_expert_norm\."),
            aliases=("kimi_k3",), relatives=("deepseek_v3",)),
    Foreign("Kimi Linear", "Kimi delta attention is not supported",
            tensors=(r"\.(f_[ab]_proj|g_[ab]_proj|[qkv]_conv1d)\.",), aliases=("kimi_linear",),
            relatives=("deepseek_v3",)),
    Foreign("Falcon-H1", "attention and Mamba side by side in a layer are not supported",
            tensors=(r"\.mamba_mixer\.", r"\.linear_fc1_up\."), aliases=("falcon_h1",)),
    Foreign("Gemma 3n", "alternating updates and learned augmented residuals are not supported",
            tensors=(r"(^|\.)(altup|laurel)\w*\.",), aliases=("gemma3n",),
            relatives=("gemma3_text",)),
    Foreign("Gemma 4", "embeddings for each layer and scaled layers are not supported",
            tensors=(r"\.layer_scalar$", r"per_layer_(input_gate|projection|input_norm)\.",
                     r"embed_tokens_per_layer\.", r"\.per_expert_scale$"),
            aliases=("gemma4",), relatives=("gemma3_text",)),
    Foreign("ERNIE 4.5 VL", "experts for text beside experts for images are not supported",
            tensors=(r"\.(text|vision)_moe_layer\.",), aliases=("ernie4_5_vl",)),
    Foreign("Llama 4",
            "chunked attention, and router weights on the experts' input, are not supported",
            arguments=(("qk_l2_norm", "moe_apply_probs_on_input"),), aliases=("llama4",),
            relatives=("llama", "mixtral")),
    # Known by name alone: their training names are those of other models.
    Foreign("ERNIE 4.5 with experts", "its softmax router with a bias is not supported",
            aliases=("ernie4_5_moe",), relatives=("ernie4_5",)),
    Foreign("Hunyuan", "there is no table of its tensors yet",
            aliases=("hunyuan", "hy_v3", "hunyuan_v1_dense", "hunyuan_v1_moe"),
            relatives=("qwen3", "qwen3_moe")),
    Foreign("MiMo-V2", "its sliding windows with sinks are not supported",
            aliases=("mimo", "mimo_v2_flash"), relatives=("qwen2", "qwen3_moe")),
    Foreign("MiniMax-M1", "lightning attention is not supported",
            aliases=("minimax_m1", "minimax_text_01"), relatives=("minimax_m2",)),
    Foreign("Step-3", "there is no table of its tensors yet",
            aliases=("step", "step3", "step3p5", "stepfun")),
    Foreign("Qwen3.5", "its image part and its layout of linear attention are not supported",
            aliases=("qwen3_5", "qwen3.5", "qwen3_5_moe"), relatives=("qwen3", "qwen3_moe")),
)  # fmt: skip


def refuse_foreign(names: Iterable[str], values: Mapping[str, Any]) -> None:
    """Raise FamilyError for tensors or arguments of a model that is known not to be supported.

    ``names`` are training tensors' names, ``values`` the training arguments.
    """
    # Layers and experts are many and alike: one name of each kind is as good as all of them.
    known = tuple({_NUMBERS.sub("0", name): name for name in reversed(tuple(names))}.values())
    for row in FOREIGN:
        evidence = row.evidence(known, values)
        if evidence is not None:
            raise row.error(evidence)


def foreign_family(family: str) -> Foreign | None:
    """The row that a user calls ``family``, or None."""
    return next((row for row in FOREIGN if family.lower() in row.aliases), None)
