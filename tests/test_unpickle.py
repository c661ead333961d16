"""The allow-list reader: known values come out, everything else is inert or refused."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import enum
import io
import pathlib
import pickle
import pickletools
import signal
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from builders import foreign_module

from ckpt.errors import SourceError, UnsafePickleError
from ckpt.sources.unpickle import Reader, Stub
from ckpt.tensors import DType

REFUSED = [
    "os.system",
    "posix.system",
    "nt.system",
    "os.popen",
    "os.execv",
    "os.putenv",
    "shutil.rmtree",
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "builtins.open",
    "builtins.getattr",
    "builtins.setattr",
    "builtins.delattr",
    "builtins.vars",
    "builtins.globals",
    "builtins.__import__",
    "builtins.input",
    "builtins.map",
    "builtins.filter",
    "builtins.type",
    "builtins.super",
    "builtins.memoryview",
    "builtins.breakpoint",
    "builtins.print",
    "__builtin__.eval",
    "__builtin__.apply",
    "__builtin__.execfile",
    "__builtin__.file",
    "__builtin__.getattr",
    "subprocess.Popen",
    "subprocess.call",
    "subprocess.check_output",
    "commands.getoutput",
    "importlib.import_module",
    "runpy.run_path",
    "pty.spawn",
    "webbrowser.open",
    "code.InteractiveConsole",
    "pickle.loads",
    "_pickle.loads",
    "cPickle.loads",
    "marshal.loads",
    "shelve.open",
    "copyreg.add_extension",
    "operator.attrgetter",
    "operator.itemgetter",
    "operator.methodcaller",
    "functools.reduce",
    "itertools.starmap",
    "types.CodeType",
    "types.FunctionType",
    "ctypes.CDLL",
    "socket.socket",
    "threading.Thread",
    "timeit.timeit",
    "multiprocessing.Process",
    "logging.config.dictConfig",
    "tempfile.mktemp",
    "zipfile.ZipFile",
    "io.open",
    "io.FileIO",
    "codecs.open",
    "_io.open",
    "_codecs.decode",
    "collections.namedtuple",
    "enum.EnumMeta",
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
    "torch.compile",
    "torch.ops.load_library",
    "torch.from_file",
    "torch._C._from_dlpack",
    "torch.utils.cpp_extension.load",
    "torch.storage._load_from_bytes",
    "torch.serialization.load",
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
    "torch.nn.Linear",
    "torch.utils.data.DataLoader",
    "numpy.load",
    "numpy.fromfile",
    "numpy.memmap",
    "numpy.testing._private.utils.runstring",
    "numpy.f2py.compile",
    "numpy.vectorize",
    "numpy.core.multiarray.fromfile",
    "numpy.lib.npyio.NpzFile",
    "pip.main",
    "setuptools.setup",
    "pkg_resources.load_entry_point",
    "ckpt.cli.main",
    "ckpt.engines.Install",
    "yaml.unsafe_load",
    "click.launch",
    "my_fork.make",
    "my_fork.Thing.build",
    "my_fork._load",
    "megatron.training.initialize",
    "builtins.list.__subclasses__",
    "collections.OrderedDict.__init__",
    "torch.Size.__class__",
]


def load(content):
    return Reader().load(content, file="somewhere.pt")


def called_as_global(module, name, argument):
    """Protocol 0's GLOBAL, then REDUCE."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def called_as_stack_global(module, name, argument):
    """Protocol 4's STACK_GLOBAL, whose names may have dots, then REDUCE."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    return b"\x80\x04" + b"".join(texts) + b"\x93" + f"(V{argument}\ntR.".encode()


def called_as_instance(module, name, argument):
    """Protocol 0's INST."""
    return f"(V{argument}\ni{module}\n{name}\n.".encode()


def called_by_newobj(module, name, argument):
    """Protocol 2's NEWOBJ."""
    return f"\x80\x02c{module}\n{name}\n(V{argument}\nt\x81.".encode("latin1")


@pytest.mark.parametrize(
    "form",
    [called_as_global, called_as_stack_global, called_as_instance, called_by_newobj],
    ids=lambda form: form.__name__,
)
def test_a17_what_no_checkpoint_needs_is_refused_in_every_spelling(tmp_path, form):
    """Functions anywhere, and anything of the standard library, torch and numpy not listed."""
    accepted = []
    for full in REFUSED:
        module, _, name = full.rpartition(".")
        if name in {"__subclasses__", "__init__", "__class__", "build"}:  # of a class
            module, _, owner = module.rpartition(".")
            name = f"{owner}.{name}"
        try:
            load(form(module, name, f"touch {tmp_path}/canary"))
        except UnsafePickleError as error:
            if "nothing was run" in str(error) and error.file == "somewhere.pt":
                continue
        accepted.append(full)
    assert accepted == []
    assert not list(tmp_path.iterdir())


def test_a_refused_name_is_found_inside_any_nesting():
    """As an item, a key's value, a state, an argument, an item of a foreign sequence."""
    bad = b"cos\nsystem\n"
    for content in (
        b"(l" + bad + b"a.",
        b"(dVkey\n" + bad + b"s.",
        b"cmy\nThing\n)R" + bad + b"b.",
        b"cmy\nThing\n(" + bad + b"tR.",
        b"cmy\nThing\n)R" + bad + b"a.",
        b"ccollections\nOrderedDict\n)R" + bad + b"b.",
        b"cfunctools\npartial\n(" + bad + b"tR.",
        b"ccopyreg\n_reconstructor\n(" + bad + b"NNtR.",
        b"\x80\x02cmy\nThing\n(" + bad + b"t\x81.",
        b"((V1\n" + bad + b"tQ.",
    ):
        with pytest.raises(UnsafePickleError, match=r"os\.system|posix\.system"):
            load(content)


def test_a_module_that_could_be_imported_is_not(tmp_path, monkeypatch):
    """Neither its import nor its class's __setstate__ and __reduce__ run."""
    (tmp_path / "planted.py").write_text(
        f"open({str(tmp_path / 'canary')!r}, 'w')\n"
        "class Thing:\n    def __setstate__(self, state): raise SystemExit(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reader = Reader()
    found = reader.load(b"cplanted\nThing\n(V1\ntR(dVkey\nV2\nsb.", file="x")
    assert isinstance(found, Stub)
    assert vars(found) == {"args": ("1",), "key": "2"}
    assert reader.foreign_classes == ("planted.Thing",)
    assert "planted" not in sys.modules
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cmy\nThing\n(N(dV__init__\ncbuiltins\nlist\nstb.",  # attributes of a class
        b"cmy\nThing\n(dV__class__\nN sb.",
        b"ctorch\nfloat32\n(dV_value_\n(Vx\nI9\ntsb.",  # attributes of an element type
        b"ctorch\nfloat32\n(N(dV_value_\n(Vx\nI9\ntstb.",
        b"ccollections\nOrderedDict\nV1\nb.",
        b"\x82\x01.",  # an extension code of copyreg
        b"Pmy_id\n.",  # a storage that is none
        b"cmy\nThing\n(I1\nI2\nu.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x3f.",  # 2^62 bytes
        b"cbuiltins\nbytearray\n(L9999999999999999L\ntR.",
        b"cbuiltins\nint\n(Vx\ntR.",
        b"",
        b"\x80\x63.",
        b"garbage",
    ],
)
def test_damage_and_abuse_of_opcodes_is_an_error_with_the_file(content):
    """Nothing escapes as another exception, and element types stay what they are."""
    try:
        load(content)
    except SourceError as error:
        assert error.file == "somewhere.pt"  # noqa: PT017 - some of them may load as inert values
    assert DType.F32.value == ("float32", 4)
    assert vars(Stub)["stub_name"] == "?"


def test_known_values_come_out_plain():
    """What real training arguments hold."""
    args = argparse.Namespace(
        number=1, real=2.5, path=pathlib.PurePosixPath("a/b"), dtype=torch.bfloat16,
        signal=signal.SIGTERM, size=torch.Size([2, 3]), flags={1, 2}, when=dt.timedelta(1),
        ordered=collections.OrderedDict(a=1), counts=collections.defaultdict(list, a=[1]),
        nothing=None, blob=b"\x00\xff", array=np.arange(3),
    )  # fmt: skip
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found = vars(load(pickle.dumps(args, protocol=protocol)))
        assert found["number"], found["real"] == (1, 2.5)
        assert found["path"] == "a/b"
        assert found["dtype"] is DType.BF16
        assert found["size"] == (2, 3)
        assert found["flags"] == {1, 2}
        assert found["ordered"] == {"a": 1}
        assert found["counts"] == {"a": [1]}
        assert found["blob"] == b"\x00\xff"


def test_unknown_classes_become_stubs_that_keep_what_they_were_given():
    """Enums, dataclasses and nested classes of a training code are read and named."""

    class Backend(enum.Enum):
        auto = 5

    class Plain:
        def __init__(self):
            self.size = 3

    with foreign_module("megatron.core.transformer.enums", AttnBackend=Backend, Plain=Plain):
        content = pickle.dumps([Backend.auto, Plain(), Plain])
    reader = Reader()
    backend, plain, kind = reader.load(content, file="x")
    assert backend.args == (5,)
    assert plain.size == 3
    assert issubclass(kind, Stub)
    assert reader.foreign_classes == (
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.Plain",
    )
    assert "megatron" in repr(backend)


def test_standard_classes_are_not_reported_as_foreign():
    """Only what the user may want to know."""
    reader = Reader()
    space = types.SimpleNamespace(a=signal.SIGINT, b=np.zeros(2))
    reader.load(pickle.dumps(space), file="x")
    assert reader.foreign_classes == ()


def test_the_refused_list_is_written_as_pickles_that_would_have_run():
    """The four spellings are valid: an unguarded reader would have made the call."""
    for form in (called_as_global, called_as_stack_global, called_as_instance):
        content = form("builtins", "len", "abc")
        pickletools.dis(content, out=io.StringIO())
        assert pickle.loads(content) == 3


GIGABYTES = 2**33
SMALL_BOMBS: dict[str, bytes] = {
    "bytes": b"\x80\x04\x8e" + GIGABYTES.to_bytes(8, "little") + b".",
    "bytes in four": b"\x80\x04B" + (2**32 - 1).to_bytes(4, "little") + b".",
    "text": b"\x80\x04\x8d" + GIGABYTES.to_bytes(8, "little") + b".",
    "bytearray": b"\x80\x05\x96" + GIGABYTES.to_bytes(8, "little") + b".",
    "integer": b"\x80\x04\x8b" + (2**31 - 1).to_bytes(4, "little") + b".",
    "frame": b"\x80\x04\x95" + GIGABYTES.to_bytes(8, "little") + b"N.",
    "number of an object": b"\x80\x02Nr" + (2**28).to_bytes(4, "little") + b".",
    "number of an object as text": b"Np268435456\n.",
    "bytes of a length": b"\x80\x04cbuiltins\nbytes\n\x8a\x05\x00\x00\x00\x00\x02\x85R.",
    "bytearray of a length": b"\x80\x04cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.",
    "list of a range": b"\x80\x04cbuiltins\nlist\ncbuiltins\nrange\nJ\x00\x00\x00\x7f\x85R\x85R.",
    "shape of a range": b"\x80\x04ctorch\nSize\ncbuiltins\nrange\nJ\x00\x00\x00\x7f\x85R\x85R.",
    "queue of a range": b"\x80\x04ccollections\ndeque\ncbuiltins\nrange\nJ\x00\x00\x00\x7f"
    b"\x85R\x85R.",
}


def doubled(start: bytes, step: bytes, times: int = 40) -> bytes:
    """A pickle in which each step refers to the one before it twice."""
    return b"\x80\x04" + start + (b"q\x00" + step) * times + b"."


SMALL_BOMBS["path of paths"] = doubled(
    b"X\x04\x00\x00\x00aaaa", b"0cpathlib\nPurePosixPath\nh\x00h\x00\x86R"
)
SMALL_BOMBS["text of nested lists"] = (
    b"\x80\x04cbuiltins\nstr\n]" + b"q\x00]h\x00ah\x00a" * 40 + b"\x85R."
)


@pytest.mark.parametrize("name", SMALL_BOMBS)
def test_a_small_pickle_that_asks_for_gigabytes_is_refused_before_they_are_taken(name):
    """CPython would allocate them first and look for the bytes later."""
    import tracemalloc

    content = SMALL_BOMBS[name]
    assert len(content) < 2000
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=r"x\.pt: damaged or foreign pickle"):
            Reader().load(content, file="x.pt")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_numpy_arrays_of_any_shape_are_kept_as_what_was_written():
    """No array is made of a shape."""
    content = pickle.dumps({"ids": np.arange(3)}, protocol=2)
    vast = content.replace(b"K\x03\x85", b"\x8a\x06\x00\x00\x00\x00\x00\x10\x85")
    assert vast != content  # the shape (3,) is now (2**44,)
    for pickled in (content, vast):
        assert set(Reader().load(pickled, file="x.pt")) == {"ids"}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_look_before_loading_ends_where_the_pickle_does(protocol):
    """Every opcode that Python writes, and bytes that follow."""
    from ckpt.sources.pickle_scan import pickle_end

    value = {
        "text": ["", "a" * 300, "ä\n" * 70000],
        "bytes": [b"", b"." * 300, bytearray(b"\n" * 70000)],
        "numbers": [0, 255, 256, 2**16, -1, 2**31, 2**70, -(2**3000), 1.5, True, None],
        "many": [tuple(range(n)) for n in range(600)],
        "sets": [{1, 2}, frozenset({3})],
        "name": collections.OrderedDict(a=argparse.Namespace(b=signal.SIGTERM)),
    }
    content = pickle.dumps(value, protocol=protocol)
    assert pickle_end(content + b"more.") == len(content)
    assert pickle_end(b"x" * 7 + content + b"more.", 7) == 7 + len(content)
    for cut in (1, len(content) // 2, len(content) - 1):
        with pytest.raises(ValueError, match=r"no end|claims"):
            pickle_end(content[:cut])


def test_a_claim_behind_the_first_window_is_found_in_small_and_in_large_pickles():
    """What was seen to be harmless in one file is not taken to be so in a shorter one."""
    from ckpt.sources.pickle_scan import pickle_end

    for filler in (b"N0" * 700, b"N0" * 2**20, b"X\x03\x00\x00\x00abcN00" * 200):
        numbered = b"\x80\x02" + filler + b"Nr" + (1200).to_bytes(4, "little") + b"."
        assert pickle_end(numbered) == len(numbered)
        vast = numbered[:-5] + (2**28).to_bytes(4, "little") + b"."
        for bad in (
            vast,
            numbered[:-6] + b"B\xff\xff\xff\x7f.",
            numbered[:-6] + b"\x8e" + b"\x01" * 9,
        ):
            with pytest.raises(ValueError, match=r"no end|claims"):
                pickle_end(bad)
    alike = b"\x80\x02" + b"Nr" + (1000).to_bytes(4, "little")
    assert pickle_end(alike + b"0" * 1000 + b".") == 1009
    with pytest.raises(ValueError, match="claims 1000"):
        pickle_end(alike + b"0" * 600 + b".")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_read_the_same_from_one_piece_as_by_few_bytes(protocol):
    """Lines, long texts and frames come out of the content that is not copied."""
    value = {"lines": ["a\nb", 1.5, 2**70], "long": "x" * 300_000, "bytes": [b"\n" * 70_000]}
    assert load(pickle.dumps(value, protocol=protocol)) == value


def test_the_fields_of_an_index_are_keys_by_themselves():
    """Two of equal content do not become one, and none of their items is taken for another's."""
    module = "torch.distributed.checkpoint.metadata"
    one = f"c{module}\nMetadataIndex\n)\x81(dVfqn\nVname\nsb".encode("latin1")
    found = load(b"\x80\x02(d" + one + b"I1\ns" + one + b"I2\ns.")
    assert list(found.values()) == [1, 2]
    assert [key[0] for key in found] == [{"fqn": "name"}] * 2


def archive_pickle(shape, dtype=torch.bfloat16):
    """The words with which torch.save stores one tensor."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=dtype), buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


def test_single_tensors_of_one_shape_are_read_once():
    """Their pickles are equal to the byte; another shape or type is another tensor."""
    reader = Reader()
    first, again = (reader.load(archive_pickle((3, 5)), file="f") for _ in range(2))
    assert first is again
    other = reader.load(archive_pickle((5, 3)), file="f")
    assert (first.shape, other.shape) == ((3, 5), (5, 3))
    assert reader.load(archive_pickle((3, 5), torch.float32), file="f").dtype is DType.F32
    tables = [reader.load(pickle.dumps({"a": 1}), file="f") for _ in range(2)]
    assert tables[0] is not tables[1]


def test_of_the_plans_in_an_index_nothing_is_kept():
    """What reads an index needs no memory for the half of it that says nothing."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    items = [WriteItem(MetadataIndex(f"w{n}"), WriteItemType.TENSOR) for n in range(3)]
    kept = {"index": MetadataIndex("w7"), "plans": [SavePlan(items), SavePlan([])]}
    found = Reader().load(pickle.dumps(kept, protocol=4), file="f")
    assert found["index"][0]["fqn"] == "w7"
    assert found["plans"][0] is found["plans"][1]
    assert not hasattr(found["plans"][0], "items")
