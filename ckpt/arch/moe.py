"""Routed and shared experts, and layers that predict further tokens, shared by families."""

from ckpt.arch.llama import H, L
from ckpt.arch.table import Rule
from ckpt.layout import COLUMN, GATE_UP, REPLICATED, ROW

E, HF_E = L + "mlp.experts.{expert}.", H + "mlp.experts.{expert}."
ROUTER = (
    Rule(L + "mlp.router.weight", REPLICATED, (H + "mlp.gate.weight",), layers="moe",
         keep_dtype=True),
    Rule(L + "mlp.router.expert_bias", REPLICATED, (H + "mlp.gate.e_score_correction_bias",),
         when="router_bias", layers="moe", keep_dtype=True),
)  # fmt: skip
ROUTED = (
    Rule(E + "linear_fc1.weight", GATE_UP,
         (HF_E + "gate_proj.weight", HF_E + "up_proj.weight"), layers="moe"),
    Rule(E + "linear_fc2.weight", ROW, (HF_E + "down_proj.weight",), layers="moe"),
)  # fmt: skip


def shared_experts(name: str) -> tuple[Rule, ...]:
    """Rows of the expert that every token visits, called ``name`` by Hugging Face."""
    source, target = L + "mlp.shared_experts.", H + f"mlp.{name}."
    return (
        Rule(source + "linear_fc1.weight", GATE_UP,
             (target + "gate_proj.weight", target + "up_proj.weight"),
             when="shared_ffn", layers="moe"),
        Rule(source + "linear_fc2.weight", ROW, (target + "down_proj.weight",),
             when="shared_ffn", layers="moe"),
    )  # fmt: skip


SHARED = shared_experts("shared_experts")
MTP = (
    Rule("mtp.layers.{mtp}.enorm.weight", REPLICATED, (H + "enorm.weight",), norm=True),
    Rule("mtp.layers.{mtp}.hnorm.weight", REPLICATED, (H + "hnorm.weight",), norm=True),
    Rule("mtp.layers.{mtp}.eh_proj.weight", COLUMN, (H + "eh_proj.weight",)),
    Rule("mtp.layers.{mtp}.final_layernorm.weight", REPLICATED, (H + "shared_head.norm.weight",),
         norm=True),
)  # fmt: skip
