"""Which tensor-parallel sizes are possible, and which one is taken."""

from __future__ import annotations

import pytest

from ckpt.errors import ServeError
from ckpt.serve.tensor_parallel import Devices, choose, legal_sizes, obstacles

QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 28 * 64}
GPUS = Devices("GPUs", 8)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (QWEN, [1, 2, 4, 28]),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, [1, 2, 4, 8, 16, 32]),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, [1, 2, 3, 6, 12]),
        ({"n_head": 6}, [1, 2, 3, 6]),
        ({"num_attention_heads": 8, "kv_lora_rank": 512, "num_key_value_heads": 3}, [1, 2, 4, 8]),
        ({"num_attention_heads": 8, "intermediate_size": 36}, [1, 2, 4]),
        ({"num_attention_heads": 8, "n_inner": 36}, [1, 2, 4]),
        ({"num_attention_heads": 8, "moe_intermediate_size": 18}, [1, 2]),
        ({"num_attention_heads": 8, "shared_expert_intermediate_size": 2}, [1, 2]),
    ],
)
def test_sizes_are_those_that_vllm_accepts(config, sizes):
    assert legal_sizes(config) == sizes


def test_the_dense_width_does_not_matter_where_every_layer_has_experts():
    config = {
        "num_attention_heads": 8, "intermediate_size": 3, "moe_intermediate_size": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    assert legal_sizes(config) == [1, 2, 4, 8]
    assert legal_sizes({**config, "mlp_only_layers": [0]}) == [1]


def test_every_obstacle_is_named():
    assert obstacles({"num_attention_heads": 6, "intermediate_size": 10}, 4) == [
        "6 attention heads do not divide by 4",
        "6 key-value heads are neither a multiple nor a divisor of 4",
        "intermediate_size 10 does not divide by 4",
    ]


def test_the_training_size_is_taken_where_it_is_possible():
    assert choose(QWEN, "match", 4, GPUS).reason == "tensor-parallel size 4, as in training"


@pytest.mark.parametrize(
    ("trained", "count", "size"), [(8, 8, 4), (3, 8, 2), (4, 2, 2), (64, 64, 28)]
)
def test_else_the_nearest_possible_one_with_the_reason(trained, count, size):
    choice = choose(QWEN, "match", trained, Devices("GPUs", count))
    assert choice.size == size
    assert f"the nearest possible to training's {trained}, since" in choice.reason


def test_too_few_devices_are_a_reason():
    choice = choose(QWEN, "match", 4, Devices("CPU cores", 2))
    assert choice.reason.endswith("training's 4, since there are 2 CPU cores here")


def test_replicated_heads_are_mentioned():
    config = {"num_attention_heads": 8, "num_key_value_heads": 2}
    assert choose(config, 8, None, GPUS).reason == (
        "tensor-parallel size 8, as asked for (each of the 2 key-value heads is kept on 4 ranks)"
    )


def test_an_unknown_training_size_means_one():
    choice = choose(QWEN, "match", None, GPUS)
    assert choice.size == 1
    assert "not known" in choice.reason


def test_an_impossible_number_is_refused_with_those_that_are_possible():
    with pytest.raises(ServeError) as caught:
        choose(QWEN, 7, 4, Devices("GPUs", 4))
    assert str(caught.value) == (
        "tensor-parallel size 7 is not possible: 4 key-value heads are neither a multiple nor a "
        "divisor of 7; there are 4 GPUs here. Possible for this model: 1, 2, 4, 28; with 4 GPUs: "
        "1, 2, 4"
    )


def test_a_configuration_without_heads_is_refused():
    with pytest.raises(ServeError, match="lacks num_attention_heads"):
        legal_sizes({})
