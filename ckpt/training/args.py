"""The architecture of a trained model, in Megatron's terms, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.training.yarn import yarn_scale

if TYPE_CHECKING:
    from ckpt.tensors import DType


@dataclass(frozen=True)
class TrainingArgs:
    """Architecture of the trained model in Megatron's terms; sizes are those of the whole model.

    ``notes`` holds one line for each value that was derived or assumed.
    """

    layers: int
    hidden_size: int
    heads: int
    groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int | None
    padded_vocab_size: int
    max_positions: int
    normalization: str
    norm_eps: float
    zero_centered_norm: bool
    gated: bool
    activation: str
    linear_bias: bool
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    positions: str
    rotary_base: float
    rotary_percent: float
    rotary_interleaved: bool
    rotary_linear_factor: float | None
    llama3_scaling: bool
    llama3_factor: float
    sliding_window: int | None
    dtype: DType | None
    experts: int
    moe_layers: tuple[bool, ...]
    router_topk: int
    expert_ffn: int
    shared_ffn: int | None
    shared_gate: bool
    router_score: str
    router_bias: bool
    router_pre_softmax: bool
    router_groups: int | None
    router_group_topk: int | None
    router_scale: float | None
    aux_loss: float
    mla: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_head_dim: int
    rope_type: str | None
    yarn_factor: float
    yarn_original_positions: int | None
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale: float
    yarn_mscale_all_dim: float
    mtp_layers: int
    mtp_kept: int
    mla_softmax_known: bool
    embedding_norm: bool
    parallel_residual: bool
    seq_length: int | None = None
    # Whether queries and keys are normed over all heads together; None: no shape says it.
    full_qk_norm: bool | None = None
    # Whether MLA's two down projections are one tensor.
    fused_down: bool = False
    # DeepSeek sparse attention; whether its rotary pairs are neighbours, None: nothing says it.
    sparse_attention: bool = False
    indexer_heads: int = 0
    indexer_head_dim: int = 0
    indexer_topk: int = 0
    indexer_interleaved: bool | None = None
    indexer_norm_eps: float = 0.0
    # What the Gemmas have (see ckpt.training.gemma); None: nothing says it.
    post_norms: bool = False
    query_scalar: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    scales_embedding: bool | None = False
    local_rotary_base: float | None = None
    window_layers: tuple[bool, ...] | None = None
    # Kinds of a layer's first and second block where not every layer has attention and an MLP.
    mixers: tuple[str, ...] = ()
    feed_forwards: tuple[str, ...] = ()
    # A gate on attention's output; and gated delta nets in place of attention in some layers.
    attention_gate: bool = False
    linear_attention: str | None = None
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_conv_kernel: int = 0
    # A learned sink in every head's softmax; what gated linear units add to the ungated half, and
    # their clamp.
    sinks: bool = False
    glu_offset: float = 0.0
    glu_clamp: float | None = None
    # YaRN without MLA: whether the range of stretched dimensions is rounded to whole ones.
    yarn_truncates: bool = True
    # Residuals that start behind the norms (BLOOM and GPT-2 of Megatron-DeepSpeed).
    residual_post_norm: bool = False
    # Layers of one block each by their letters, and Mamba's sizes.
    hybrid_pattern: str = ""
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_groups: int = 0
    mamba_state: int = 0
    moe_latent: int | None = None
    # Arguments in use that a family must understand, each with a line that explains it.
    unusual: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def has_kind(self, layer: int, kind: str) -> bool:
        """Whether layer ``layer`` holds a block of this kind.

        ``attention``, ``linear_attention``, ``mamba``; ``dense`` and ``moe`` (the MLP). A layer
        past the last one predicts a further token and is built like the last, with attention.
        """
        if layer >= self.layers:
            return kind == "attention" or self._feed_forward(self.layers - 1) == kind
        mixer = self.mixers[layer] if self.mixers else "attention"
        return kind in {mixer, self._feed_forward(layer)}

    def _feed_forward(self, layer: int) -> str:
        if self.feed_forwards:
            return self.feed_forwards[layer]
        return "moe" if self.moe_layers[layer] else "dense"

    @property
    def qkv_bias_alone(self) -> bool:
        """Whether queries, keys and values have biases and the other linears have none."""
        return self.qkv_bias and not self.linear_bias

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return self.experts > 0

    @property
    def first_dense(self) -> int:
        """How many layers come before the first one with experts."""
        return self.moe_layers.index(True) if True in self.moe_layers else self.layers

    @property
    def moe_is_suffix(self) -> bool:
        """Whether the dense layers all come first."""
        return all(self.moe_layers[self.first_dense :])

    @property
    def all_moe(self) -> bool:
        """Whether every layer has routed experts."""
        return all(self.moe_layers) and self.is_moe

    @property
    def has_shared_expert(self) -> bool:
        """Whether an expert is there that every token visits."""
        return bool(self.shared_ffn)

    @property
    def shared_divides(self) -> bool:
        """Whether the shared expert is as wide as a whole number of routed ones."""
        return bool(self.shared_ffn and self.expert_ffn and self.shared_ffn % self.expert_ffn == 0)

    @property
    def limits_groups(self) -> bool:
        """Whether choosing groups of experts first changes which experts are chosen.

        It does not with one group, with all groups chosen, nor when each group counts by
        its best expert and as many groups as experts are chosen: the best k experts then
        lie in the best k groups.
        """
        if not self.router_groups or not self.router_group_topk or self.router_groups == 1:
            return False
        every = self.router_group_topk >= self.router_groups
        return not every and self.router_topk != self.router_group_topk

    @property
    def experts_per_group_topk(self) -> int | None:
        """How many experts' scores rank a group of experts, None without groups (moe_utils.py)."""
        if not self.limits_groups:
            return None
        return self.router_topk // (self.router_group_topk or 1)

    @property
    def normalises_scores(self) -> bool:
        """Whether the sigmoid scores of the chosen experts are made to sum to 1 (moe_utils.py)."""
        return self.router_topk > 1

    @property
    def query_rows(self) -> int:
        """Rows of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_rows(self) -> int:
        """Rows of all key heads together."""
        return self.groups * self.head_dim

    @property
    def multi_head(self) -> bool:
        """Whether every query head has a key and value head of its own."""
        return self.groups == self.heads

    @property
    def plain_head_dim(self) -> bool:
        """Whether the heads together are as wide as the hidden state."""
        return self.head_dim * self.heads == self.hidden_size

    @property
    def heads_divide_hidden(self) -> bool:
        """Whether the hidden state is a whole number of times as wide as there are heads."""
        return self.hidden_size % self.heads == 0

    @property
    def query_scalar_is_whole(self) -> bool:
        """Whether what divides attention's scores is the root of a whole number, or unknown."""
        return self.query_scalar is None or float(self.query_scalar).is_integer()

    @property
    def fits_llama_class(self) -> bool:
        """Whether transformers' Llama takes these sizes: it wants hidden to divide by heads.

        Its Mistral is the same network without that wish, but has no biases.
        """
        return self.hidden_size % self.heads == 0 or self.linear_bias

    @property
    def four_times_ffn(self) -> bool:
        """Whether the MLP is four times as wide as the hidden state."""
        return self.ffn_hidden_size == 4 * self.hidden_size

    @property
    def uses_yarn(self) -> bool:
        """Whether rotary positions are stretched by YaRN, which is MLA's default type."""
        chosen = self.rope_type in {None, "yarn"} if self.mla else self.positions == "yarn"
        return chosen and self.yarn_factor > 1

    @property
    def yarn_grows_unusually(self) -> bool:
        """Whether YaRN multiplies queries and keys by another number than by its factor's."""
        plain = yarn_scale(self.yarn_factor, 1.0)
        return self.uses_yarn and self.yarn_growth != plain

    @property
    def yarn_growth(self) -> float:
        """What YaRN multiplies rotated queries and keys by (yarn_rotary_pos_embedding.py)."""
        over = yarn_scale(self.yarn_factor, self.yarn_mscale_all_dim)
        return yarn_scale(self.yarn_factor, self.yarn_mscale) / over

    @property
    def layer_windows(self) -> tuple[bool, ...]:
        """Which layers attend to a window only."""
        if self.sliding_window is None:
            return (False,) * self.layers
        return self.window_layers or (True,) * self.layers

    @property
    def windows_alternate(self) -> bool:
        """Whether no layer has a window, or every second one from the first on."""
        alternating = tuple(layer % 2 == 0 for layer in range(self.layers))
        return self.sliding_window is None or self.layer_windows == alternating

    @property
    def mla_scales_plainly(self) -> bool:
        """Whether MLA's rotary scaling is YaRN with a factor above 1, or none at all.

        Megatron scales the softmax by mscale_all_dim without YaRN too
        (multi_latent_attention.py); no Hugging Face class does.
        """
        if not self.mla or self.uses_yarn or self.yarn_factor == 1:
            return True
        return self.rope_type == "rope" and (self.yarn_factor < 1 or not self.yarn_mscale_all_dim)

    @property
    def normalises_topk(self) -> bool:
        """Whether the chosen experts' softmax weights are made to sum to 1."""
        return self.is_moe and self.router_score == "softmax" and not self.router_pre_softmax

    @property
    def yarn_scales_softmax(self) -> bool:
        """Whether YaRN changes the scale of MLA's softmax."""
        return self.uses_yarn and self.yarn_mscale_all_dim != 0

    @property
    def kv_down_rows(self) -> int:
        """Rows of MLA's key-value down projection: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def has_q_lora(self) -> bool:
        """Whether MLA's queries have a down projection."""
        return bool(self.q_lora_rank)

    @property
    def separate_q_down(self) -> bool:
        """Whether that projection is a tensor of its own."""
        return self.has_q_lora and not self.fused_down

    @property
    def down_rows(self) -> int:
        """Rows of both of MLA's down projections."""
        return self.q_down_rows + self.kv_down_rows

    @property
    def further_layers_attend(self) -> bool:
        """Whether layers that predict further tokens, built like the last one, have attention."""
        return not self.mtp_kept or not self.mixers or self.mixers[-1] == "attention"

    @property
    def is_hybrid(self) -> bool:
        """Whether each layer is one block alone, as a pattern says."""
        return bool(self.hybrid_pattern)

    @property
    def has_mamba(self) -> bool:
        """Whether any layer is a state-space one."""
        return "mamba" in self.mixers

    @property
    def mamba_rows(self) -> int:
        """Channels of a state-space layer, all heads together."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_group_rows(self) -> int:
        """Channels of its B, and of its C."""
        return self.mamba_groups * self.mamba_state

    @property
    def experts_are_known(self) -> bool:
        """Whether layers with experts come with what Nemotron-H's have, or there are none."""
        if not any(self.moe_layers):
            return True
        routed = self.is_moe and self.router_score == "sigmoid" and self.router_bias
        return routed and self.has_shared_expert

    @property
    def delta_key_rows(self) -> int:
        """Rows of a gated delta net's queries, and of its keys."""
        return self.delta_key_heads * self.delta_key_dim

    @property
    def delta_value_rows(self) -> int:
        """Rows of a gated delta net's values, and of the gates on its output."""
        return self.delta_value_heads * self.delta_value_dim

    @property
    def rope_is_scaled(self) -> bool:
        """Whether rotary positions are stretched in any way."""
        return self.llama3_scaling or self.rotary_linear_factor is not None

    @property
    def q_down_rows(self) -> int:
        """Rows of MLA's query down projection, 0 without one."""
        return self.q_lora_rank or 0
