"""Every family converts bit for bit from each format, from whatever ranks and spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from converted import assert_converts
from megatron_checkpoints import first_of_each, wanted
from megatron_families import FAMILIES
from tiny_megatron import (
    EXTRA_STATES,
    Ranks,
    TinyModel,
    write_legacy,
    write_torch_dist,
)

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import CkptError, SourceError

# GPT-2 has other names and no gates; its checkpoints come from Megatron itself.
LIKE_LLAMA = {"llama3", "mistral"}
NAMES = [name for name in FAMILIES if name not in {"gpt", *LIKE_LLAMA} and "-gg" not in name]
# Further families are in the property test of every layout by default, here in the slow run.
CORE = {"llama1p", "qwen2", "qwen3", "mixtral", "qwen2moe", "qwen3moe", "deepseek", "deepseek-mtp"}
MOE = [name for name in NAMES if "num_experts" in FAMILIES[name]]
LEGACY = {
    "one": (Ranks(), False),
    "tp2pp2-te": (Ranks(tp=2, pp=2), True),
    "tp2vpp3": (Ranks(tp=2, vpp=3), False),
}
DIST: dict[str, dict[str, Any]] = {
    "te-single": dict(te=True, single=True),
    "te-prefix-optimizer": dict(te=True, prefix="module.", optimizer=True),
    "local-common-state": dict(common="common_state"),
}
EXPERTS: dict[str, tuple[Ranks, dict[str, Any]]] = {
    "ep3-te-grouped": (Ranks(ep=3), dict(te=True, grouped=True)),
    "tp2ep2etp1-grouped": (Ranks(tp=2, ep=2, etp=1), dict(grouped=True)),
    "pp2ep2-te-grouped": (Ranks(pp=2, ep=2), dict(te=True, grouped=True)),
}


def core_first(families):
    return [
        name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in families
    ]


@pytest.mark.parametrize("layout", LEGACY)
@pytest.mark.parametrize("family", core_first(NAMES))
def test_legacy_ranks_give_the_exact_tensors(tmp_path, family, layout):
    model, (ranks, te) = TinyModel(family), LEGACY[layout]
    assert_converts(write_legacy(tmp_path / "run", model, ranks, te=te), model, tmp_path / "out")


@pytest.mark.parametrize("form", DIST)
@pytest.mark.parametrize("family", core_first(NAMES))
def test_a14_a15_torch_dist_key_forms_give_the_exact_tensors(tmp_path, family, form):
    model = TinyModel(family, dtype=torch.bfloat16)
    source = write_torch_dist(tmp_path / "run", model, Ranks(tp=2), **DIST[form])
    assert_converts(source, model, tmp_path / "out")


@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.parametrize("family", core_first(MOE))
def test_a05_a07_a08_experts_keep_their_numbers(tmp_path, family, layout):
    """Experts count from 0 on each rank, rank folders may be absent, parameters may be grouped."""
    model, (ranks, options) = TinyModel(family), EXPERTS[layout]
    source = write_legacy(tmp_path / "run", model, ranks, **options)
    assert_converts(source, model, tmp_path / "legacy")
    source = write_torch_dist(tmp_path / "dist", model, ranks, **options)
    assert_converts(source, model, tmp_path / "out")


@pytest.mark.parametrize("layout", LEGACY)
@pytest.mark.parametrize("family", ["deepseek", "deepseek-mtp", "deepseek-v32"])
def test_fused_down_projections_are_taken_apart_rank_by_rank(tmp_path, family, layout):
    """Each rank holds its share of the queries' rows, then of the keys and values'."""
    ranks, te = LEGACY[layout]
    model = TinyModel(family, args={"mla_down_proj_fusion": True})
    assert_converts(write_legacy(tmp_path / "run", model, ranks, te=te), model, tmp_path / "out")


def test_a_fused_down_projection_that_is_whole_on_every_rank_is_read_once(tmp_path):
    """TransformerEngine's duplicated linear; the other ranks' copies are compared."""
    model = TinyModel("deepseek", args={"mla_down_proj_fusion": True})
    source = write_legacy(tmp_path / "run", model, Ranks(tp=2))
    files = [torch.load(file, weights_only=False) for file in rank_files(source)]
    for name in [name for name in files[0]["model"] if name.endswith("down_proj.weight")]:
        shares = [file["model"][name].split([20, 17]) for file in files]
        both = torch.cat([torch.cat(half) for half in zip(*shares, strict=True)])
        for file in files:
            file["model"][name] = both.clone()
    for file, content in zip(rank_files(source), files, strict=True):
        torch.save(content, file)
    assert_converts(source, model, tmp_path / "out")
    files[1]["model"]["decoder.layers.1.self_attention.linear_qkv_down_proj.weight"][3] += 1
    torch.save(files[1], rank_files(source)[1])
    with pytest.raises(CkptError, match="linear_qkv_down_proj"):
        convert_checkpoint(source, tmp_path / "other", ConvertOptions())


def rank_files(source):
    return sorted(source.glob("iter_*/mp_rank_*/model_optim_rng.pt"))


@pytest.mark.parametrize("extra", EXTRA_STATES)
def test_a18_extra_states_of_every_form_are_left_out(tmp_path, extra):
    model = TinyModel("deepseek-mtp")
    source = write_legacy(tmp_path / "run", model, Ranks(tp=2, pp=2), te=True, extra=extra)
    assert_converts(source, model, tmp_path / "out")


STRUCTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", dict(tp=2, format="torch_dist")),
    ("llama", dict(tp=2, pp=2, te=True, format="torch")),
    ("qwen2", dict(pp=2, format="torch")),
    ("qwen3", dict(tp=2, single=True, format="torch_dist")),
    ("mixtral", dict(tp=2, ep=2, etp=1, format="torch")),
    ("mixtral", dict(ep=2, format="torch_dist")),
    ("mixtral-gg", dict(ep=2, format="torch")),
    ("qwen2moe", dict(tp=2, te=True, format="torch_dist")),
    ("qwen3moe", dict(ep=2, te=True, format="torch_dist")),
    ("qwen3moe", dict(tp=2, te=True, format="torch")),
    ("qwen3next", dict(tp=2, te=True, format="torch_dist")),
    ("qwen3next", dict(tp=2, te=True, format="torch")),
    ("qwen3next-mtp", dict(pp=2, te=True, format="torch")),
    ("nemotron", dict(tp=2, te=True, format="torch_dist")),
    ("nemotron", dict(tp=2, te=True, format="torch")),
    ("nemotronh", dict(tp=2, te=True, format="torch_dist")),
    ("nemotronh", dict(tp=2, pp=2, te=True, format="torch")),
    ("nemotron3-latent", dict(ep=2, te=True, format="torch_dist")),
    ("nemotron3", dict(tp=2, te=True, format="torch")),
    ("deepseek", dict(tp=2, format="torch")),
    ("deepseek", dict(tp=2, ep=2, te=True, single=True, format="torch_dist")),
    ("deepseek-mtp", dict(pp=2, te=True, format="torch")),
    ("deepseek-lite", dict(tp=2, format="torch_dist")),
    ("gemma2", dict(tp=2, te=True, format="torch")),
    ("gemma3", dict(tp=2, te=True, format="torch_dist")),
    ("glm4", dict(tp=2, te=True, format="torch")),
    ("minimax", dict(tp=2, te=True, format="torch")),
    ("minimax", dict(tp=2, ep=2, te=True, format="torch_dist")),
    ("deepseek-v32", dict(tp=2, te=True, format="torch")),
    ("deepseek-glm5", dict(tp=2, te=True, format="torch_dist")),
]


@pytest.fixture(scope="module")
def real(request, megatron_checkpoints):
    from megatron_checkpoints import Layout

    depth = {family: TinyModel(family).values for family, _ in STRUCTURES}
    numbers = wanted(request, "number")
    layouts = [
        Layout(
            family,
            **options,
            overrides={
                "num_layers": depth[family].num_layers
                + depth[family].num_layers % options.get("pp", 1),
                "moe_layer_freq": _frequency(depth[family], options.get("pp", 1)),
            },
        )
        for family, options in (STRUCTURES[number] for number in numbers)
    ]
    return dict(zip(numbers, megatron_checkpoints(layouts), strict=True))


def _frequency(values, pp):
    frequency = values.moe_layer_freq
    return [*frequency, 1] if isinstance(frequency, list) and pp == 2 else frequency


def structure(directory):
    """Names, shapes and chunks of every weight that a checkpoint stores, whatever the values."""
    import pickle

    found: dict[Any, Any] = {}
    for file in directory.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        for key in [key for key in state if key.startswith("model")]:
            for name, value in state[key].items():
                if isinstance(value, torch.Tensor) and "_extra_state" not in name:
                    found[file.parent.name, key, name] = tuple(value.shape)
    for file in directory.glob("iter_*/.metadata"):
        index = pickle.loads(file.read_bytes())
        for name, entry in index.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
                found[name] = (tuple(entry.size), frozenset(chunks))
    assert len(found) > 5
    return found


@pytest.mark.megatron
@pytest.mark.parametrize(
    "number",
    first_of_each(range(len(STRUCTURES)), lambda n: STRUCTURES[n][0]),
    ids=lambda n: f"{STRUCTURES[n][0]}-{n}",
)
def test_tiny_checkpoints_have_the_structure_of_real_ones(tmp_path, real, number):
    """The same names, shapes, rank folders and chunks as Megatron itself writes."""
    family, options = STRUCTURES[number]
    made = real[number]
    model = TinyModel(family, args=dict(made.layout.overrides))
    ranks = Ranks(**{key: options[key] for key in ("tp", "pp", "ep", "etp") if key in options})
    te, grouped = options.get("te", False), model.values.moe_grouped_gemm
    if options["format"] == "torch":
        write_legacy(tmp_path / "run", model, ranks, te=te, grouped=grouped)
    else:
        single = options.get("single", False)
        # TransformerEngine's stand-in stores each expert as a chunk of its own
        write_torch_dist(tmp_path / "run", model, ranks, te=te, single=single)
    assert structure(tmp_path / "run") == structure(made.directory)


def test_a08_expert_ranks_that_overwrote_each_others_file_are_refused(tmp_path):
    """With ETP above TP two ranks save under one name: half of each expert is lost."""
    model = TinyModel("mixtral")
    source = write_legacy(tmp_path / "run", model, Ranks(tp=2, etp=4))
    with pytest.raises(SourceError, match="2 expert tensor-parallel ranks wrote this one file"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert not (tmp_path / "out").exists()
