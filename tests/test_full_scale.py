"""Checkpoints of full size, all holes: what is said of them is exact."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sparse_megatron import (
    DEEPSEEK_V3,
    LLAMA3_405B,
    WRITERS,
    Model,
    Ranks,
    open_item,
)

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.convert.sketch import Sketcher
from ckpt.errors import SourceError, UnsafePickleError
from ckpt.inspection import inspect_directory
from ckpt.sources import open_source
from ckpt.sources.unpickle import Reader, unhurried_collector

# Full width, fewer layers and experts: the same code paths, and a test of a second or two.
SMALL = Model({**DEEPSEEK_V3.args, "num_layers": 4, "moe_layer_freq": [0, 0, 1, 1],
               "num_experts": 32})  # fmt: skip


def deepseek_parameters(layers: int, dense: int, experts: int) -> int:
    """Counted by hand from the sizes in DeepSeek-V3's report, without its further-token layer."""
    hidden, heads = 7168, 128
    attention = hidden * 1536 + 1536 + 1536 * heads * (128 + 64)
    attention += hidden * (512 + 64) + 512 + 512 * heads * (128 + 128) + heads * 128 * hidden
    expert = 3 * hidden * 2048
    sparse = (layers - dense) * (experts * (expert + hidden + 1) + expert)
    dense_mlp = dense * 3 * hidden * 18432
    return 2 * 129280 * hidden + hidden + layers * (attention + 2 * hidden) + sparse + dense_mlp


def test_the_count_by_hand_is_that_of_the_published_model():
    """671 billion; 14,848 of them are the router's biases, which some counts leave out."""
    assert deepseek_parameters(61, 3, 256) - 58 * 256 == 671_026_404_352


@pytest.mark.parametrize("format_", WRITERS)
def test_parameters_of_full_width_are_counted_exactly(tmp_path, format_):
    """Every rank's part counts once, experts on ranks of their own included."""
    WRITERS[format_](tmp_path, SMALL, Ranks(tp=2, pp=2, ep=4))
    facts = inspect_directory(tmp_path).as_dict()
    assert facts["parameters"] == deepseek_parameters(4, 2, 32)
    assert facts["family"] == "deepseek_v3"
    plan = plan_conversion(tmp_path, ConvertOptions()).plan
    assert plan.parameters == facts["parameters"]
    assert sum(c.nbytes for t in plan.targets for c in t.copies) == plan.nbytes


@pytest.mark.parametrize("format_", WRITERS)
def test_a_terabyte_is_inspected_without_a_plan(tmp_path, format_):
    """All 405 billion parameters of Llama 3, in stacked layers too."""
    WRITERS[format_](tmp_path, LLAMA3_405B, Ranks(tp=2, pp=3), optimizer=False)
    facts = inspect_directory(tmp_path).as_dict()
    assert facts["parameters"] == 405_853_388_800
    assert facts["family"] == "llama"


@pytest.mark.parametrize("format_", WRITERS)
def test_without_spans_all_but_the_places_is_as_with_them(tmp_path, format_):
    """The quick listing differs in offsets alone."""
    WRITERS[format_](tmp_path, SMALL, Ranks(tp=2, ep=2, etp=1), optimizer=False)
    quick, full = (open_source(tmp_path, spans=spans) for spans in (False, True))
    plain = [
        [
            replace(t, shards=tuple(replace(s, view=replace(s.view, offset=0)) for s in t.shards))
            for t in checkpoint.tensors
        ]
        for checkpoint in (quick, full)
    ]
    plain = [[replace(t, copies=(), copy_names=()) for t in tensors] for tensors in plain]
    assert plain[0] == plain[1]
    assert quick.skipped == full.skipped


def test_an_item_of_the_sparse_checkpoint_is_one_that_torch_loads(tmp_path):
    """The archives that are written without their data are whole."""
    WRITERS["torch_dist"](tmp_path, SMALL, Ranks(tp=2), optimizer=False)
    checkpoint = open_source(tmp_path, spans=False)
    tensor = next(t for t in checkpoint.tensors if t.name.endswith("linear_kv_up_proj.weight"))
    view = tensor.shards[1].view
    loaded = open_item(Path(view.file), view.offset, view.nbytes + 1577)
    assert loaded.shape == (128 * 256 // 2, 512)
    assert loaded.dtype is torch.bfloat16


class Holder:
    """Stands for torch's class of the index: attributes in order."""


def index_of(**values: object) -> bytes:
    holder = Holder()
    holder.__dict__.update(values)
    content = pickle.dumps(holder, protocol=4)
    assert content.count(__name__.encode()) == 1
    return content


def load(content: bytes, **options: str):
    return Reader().load_without(content, "plans", file="index", **options)


def test_the_last_attribute_is_left_out_and_the_others_are_whole():
    """What stands before it is read as ever, also over many frames of the pickle."""
    before = {f"name {number}": (number, number + 1) for number in range(9000)}
    found = load(index_of(before=before, plans=[object] * 9000))
    assert found.before == before
    assert found.plans is None


def test_an_attribute_whose_name_stands_twice_is_read():
    """Where it is a key as well, its place is not sure, and everything is read."""
    found = load(index_of(before={"plans": 3}, plans=[5]))
    assert found.before == {"plans": 3}
    assert found.plans == [5]


def test_an_index_that_is_cut_short_is_refused_though_its_end_is_not_read():
    """A file that ends early was not copied whole."""
    with pytest.raises(SourceError, match="damaged"):
        load(index_of(before=[7], plans=list(range(900)))[:-40])


def test_code_before_the_attribute_that_is_not_read_is_refused():
    """Leaving the end out leaves no other check out."""
    content = index_of(before=print, plans=[5])
    with pytest.raises(UnsafePickleError, match=r"builtins\.print"):
        load(content)


def fail_without_collector() -> None:
    assert not gc.isenabled()
    raise ValueError("any")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_cycle_collector_is_as_before_after_a_failure(enabled):
    """It is off only while many objects are made, and stays off where it was off."""
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="any"):
            unhurried_collector()(fail_without_collector)()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


PLANS = """
import sys
from pathlib import Path
from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.convert.sketch import Sketcher
from ckpt.convert.needs import needs_of
planned = plan_conversion(Path(sys.argv[1]), ConvertOptions())
print(needs_of(planned, Path(sys.argv[1] + '-hf'), 1).plan_bytes, len(planned.plan.targets))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="nothing tells the peak")
@pytest.mark.parametrize("format_", WRITERS)
def test_a28_a_model_of_256_experts_is_planned_in_bounded_memory(tmp_path, format_):
    """All 45,000 tensors of DeepSeek-V3 take a fraction of what one of its files holds."""
    WRITERS[format_](tmp_path / "run", DEEPSEEK_V3, Ranks(ep=4), optimizer=False)
    done = subprocess.run(
        [sys.executable, "-c", PLANS, str(tmp_path / "run")],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    peak, targets = map(int, done.stdout.split())
    assert targets == 45_395
    assert peak < 250e6


def test_tensors_that_are_alike_are_planned_once(tmp_path, monkeypatch):
    """However many experts and layers there are: the work is that of the rows of the table."""
    drawn, draw = [], Sketcher.draw

    def counted(self, match):
        drawn.append(match.tensor.name)
        return draw(self, match)

    monkeypatch.setattr(Sketcher, "draw", counted)
    WRITERS["torch"](tmp_path, SMALL, Ranks(tp=2, pp=2, ep=4))
    checkpoint = open_source(tmp_path)
    plan = plan_conversion(tmp_path, ConvertOptions()).plan
    assert len(plan.targets) > 2 * 32 * 3
    assert len(drawn) < 30 < len(checkpoint.tensors)
