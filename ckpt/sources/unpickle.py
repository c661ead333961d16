"""The one reader of pickles: an allow-list, inert stand-ins, and refusal of the rest.

A checkpoint's pickles name classes of the training code. None of it is imported. A name
on the allow-list becomes a plain value of ours; an unknown *class* becomes an inert
:class:`Stub` that keeps its arguments and state; a *function* or anything of the standard
library, torch or numpy that no checkpoint needs is refused (:class:`UnsafePickleError`).

The allowed names are those seen in real checkpoints of Megatron-LM, Megatron-Core 0.12 to
0.16 and DeepSpeed, and those that megatron/core/safe_globals.py lists.
"""

from __future__ import annotations

import gc
import mmap
import pickle
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from typing import TYPE_CHECKING, Any, BinaryIO

from ckpt.errors import SourceError, UnsafePickleError
from ckpt.sources.pickle_scan import pickle_end
from ckpt.sources.pickle_values import (
    Content,
    Fields,
    Record,
    Unread,
    encode,
    join_path,
    to_bytes,
    to_text,
)
from ckpt.tensors import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FOREIGN_ROOTS = {"torch", "numpy", "pip", "setuptools", "pkg_resources", "ckpt", "click", "yaml"}
_TORCH_DTYPES = {
    **{item.torch_name: item for item in DType},
    "half": DType.F16,
    "float": DType.F32,
    "double": DType.F64,
    "long": DType.I64,
}
# Types that no weight has, but that optimizer and random states may; read as their names.
_OTHER_DTYPES = {"uint16", "uint32", "uint64", "complex32", "complex64", "complex128"}
_OTHER_DTYPES |= {"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}
_STORAGES = {
    "DoubleStorage": DType.F64,
    "FloatStorage": DType.F32,
    "HalfStorage": DType.F16,
    "BFloat16Storage": DType.BF16,
    "Float8_e4m3fnStorage": DType.F8_E4M3,
    "Float8_e5m2Storage": DType.F8_E5M2,
    "LongStorage": DType.I64,
    "IntStorage": DType.I32,
    "ShortStorage": DType.I16,
    "CharStorage": DType.I8,
    "ByteStorage": DType.U8,
    "BoolStorage": DType.BOOL,
    "UntypedStorage": DType.U8,
}
# Functions that may be called; what they build is of no interest, so their arguments are kept.
_INERT_FUNCTIONS = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.numeric", "_frombuffer"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch._utils", "_rebuild_qtensor"),
    ("torch._utils", "_rebuild_sparse_tensor"),
    ("torch.serialization", "_get_layout"),
    ("torch", "device"),
    ("torch", "Generator"),
    ("copyreg", "__newobj__"),
    ("functools", "partial"),
}
# Classes of the standard library, torch and numpy that carry only data.
_INERT_CLASSES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.dtypes", "UInt32DType"),
    ("enum", "Enum"),
    ("signal", "Signals"),
    ("signal", "Handlers"),
    ("types", "SimpleNamespace"),
    ("argparse", "Namespace"),
    ("datetime", "timedelta"),
    ("datetime", "datetime"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("io", "BytesIO"),
    ("_io", "BytesIO"),
    ("uuid", "UUID"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("builtins", "range"),  # a list of it could be of any length
}
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath"}
_RECORDS = {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta"}
# Those of which a large index holds hundreds of thousands.
_FIELDS = {"MetadataIndex", "ChunkStorageMetadata", "_StorageInfo"}
# The save plans of every rank, most of a large index: nothing in them is read.
_UNREAD = {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"}
_BUILTINS: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": to_text,
    "bytes": to_bytes,
    "bytearray": to_bytes,
    "complex": complex,
    "list": list,
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "slice": slice,
    "object": object,
}


_KINDS = 2**12  # of single tensors that are remembered
_FRAME_BYTES = 2 * 64 * 1024  # a frame ends once it holds 64 KiB
_FIRST_BYTES, _LARGEST_BYTES = 2**18, 2**28  # of a pickle in a store, whose end is looked for


class Stub:
    """An object of a class that is not ours: its arguments and state, and no behaviour."""

    stub_name = "?"

    def __init__(self, *args: object) -> None:
        """Keep the arguments."""
        self.args = args

    def __setstate__(self, state: object) -> None:
        """Keep the state: a dict becomes attributes, anything else ``state``."""
        if isinstance(state, dict):
            plain = set(map(type, state)) <= {str}
            self.__dict__.update(state if plain else {str(k): v for k, v in state.items()})
        else:
            self.__dict__["state"] = state

    def __setitem__(self, key: object, value: object) -> None:
        """Keep an item of a foreign mapping."""
        self.__dict__.setdefault("items", []).append((key, value))

    def append(self, value: object) -> None:
        """Keep an item of a foreign sequence."""
        self.__dict__.setdefault("items", []).append(value)

    def extend(self, values: list[object]) -> None:
        """Keep items of a foreign sequence."""
        self.__dict__.setdefault("items", []).extend(values)

    def __repr__(self) -> str:
        """The foreign name and what it was called with."""
        return f"<{self.stub_name}{getattr(self, 'args', ())!r}>"


_INERT = (Stub, Record, Fields, Unread)
_BASES: dict[str, type] = {
    **dict.fromkeys(_RECORDS, Record),
    **dict.fromkeys(_FIELDS, Fields),
    **dict.fromkeys(_UNREAD, Unread),
}


class StateDict(dict[Any, Any]):
    """An ordered dictionary that, as torch's state dicts do, may carry attributes."""


class StorageRef:
    """A torch storage that was not read: where its bytes are, by key, and how many."""

    __slots__ = ("count", "dtype", "key")

    def __init__(self, key: str, dtype: DType, count: int) -> None:
        """``count`` elements of ``dtype`` in the archive's record ``data/<key>``."""
        self.key, self.dtype, self.count = key, dtype, count


class TensorRef:
    """A torch tensor that was not read: a strided part of a storage."""

    __slots__ = ("dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self,
        storage: StorageRef,
        dtype: DType,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> None:
        """``offset`` and ``strides`` count elements of ``dtype``."""
        self.storage, self.dtype, self.offset = storage, dtype, offset
        self.shape, self.strides = shape, strides


class _StorageType:
    """``torch.FloatStorage`` and its kind: a marker that says an element type."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype


@contextmanager
def unhurried_collector() -> Iterator[None]:
    """Make many objects that all stay: the cycle collector would look at them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Reader:
    """Loads pickles of one checkpoint and remembers the foreign classes it met."""

    def __init__(self) -> None:
        """Nothing met yet."""
        self.stubs: dict[str, type] = {}
        self._tensors: dict[bytes, TensorRef] = {}

    def load(self, content: bytes, *, file: str) -> Any:  # noqa: ANN401 - a pickle holds anything
        """The object in ``content``, built of plain values, stubs and tensor references.

        Raises UnsafePickleError for code that no checkpoint needs, SourceError for damage.
        """
        known = self._tensors.get(content)
        if known is not None:  # single tensors of one shape are stored with the same words
            return known
        try:
            pickle_end(content)
            with unhurried_collector():
                root = _Unpickler(Content(content), self).load()
        except UnsafePickleError as error:
            error.file = file
            raise
        except Exception as error:
            message = f"damaged or foreign pickle: {type(error).__name__}: {error}"
            raise SourceError(message, file=file, hint="Copy the file again") from error
        if isinstance(root, TensorRef) and len(self._tensors) < _KINDS:
            self._tensors[content] = root
        return root

    def load_without(self, content: bytes, field: str, *, file: str) -> Any:  # noqa: ANN401
        """As ``load``, but the object's last attribute, a list called ``field``, becomes None.

        Where no list of that name stands as protocol 4 writes it, everything is read.
        """
        text = field.encode()
        mark = b"\x8c" + bytes([len(text)]) + text + b"\x94"
        at = content.find(mark + b"]\x94")
        if at > 0 and content.endswith(b"ub.") and content.count(mark) == 1:
            # None, the items of the state, build, stop; then what the open frame may ask for.
            rest = b"Nub." + bytes(min(len(content) - at, _FRAME_BYTES))
            with suppress(SourceError):
                return self.load(content[:at] + mark + rest, file=file)
        return self.load(content, file=file)

    def load_next(self, stream: BinaryIO, *, file: str) -> Any:  # noqa: ANN401 - as above
        """The next object of a file of several pickles; the stream then stands behind it."""
        start = stream.tell()
        try:
            pickled = _next_pickle(stream, start)
        except ValueError as error:
            raise SourceError(f"damaged pickle: {error}", file=file) from error
        stream.seek(start + len(pickled))
        return self.load(pickled, file=file)

    def stub(self, module: str, name: str, base: type = Stub) -> type:
        """The inert stand-in of one foreign class; the same for each use of the name."""
        full = f"{module}.{name}"
        if full not in self.stubs:
            fields = {"stub_name": full} | ({"__slots__": ()} if base in {Unread, Fields} else {})
            self.stubs[full] = type(name.rpartition(".")[2], (base,), fields)
        return self.stubs[full]

    @property
    def foreign_classes(self) -> tuple[str, ...]:
        """Names of the classes outside torch, numpy and the standard library that were met."""
        known = ("torch.", "numpy.", "argparse.", "signal.", "io.", "_io.", "types.", "enum.")
        return tuple(sorted(name for name in self.stubs if not name.startswith(known)))


def _next_pickle(stream: BinaryIO, start: int) -> bytes:
    """The pickle at ``start``, without the storages of a file behind it; ValueError if damaged."""
    try:
        number = stream.fileno()
    except UnsupportedOperation:  # an object in a store: as much of it as it takes
        return _grown_pickle(stream, start)
    with mmap.mmap(number, 0, access=mmap.ACCESS_READ) as content:
        return content[start : pickle_end(content, start)]


def _grown_pickle(stream: BinaryIO, start: int) -> bytes:
    size = _FIRST_BYTES
    while True:
        stream.seek(start)
        content = stream.read(size)
        try:
            return content[: pickle_end(content)]
        except ValueError:
            if len(content) < size or size > _LARGEST_BYTES:
                raise
        size *= 4


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, reader: Reader) -> None:  # noqa: ANN401 - a binary stream
        super().__init__(stream, encoding="utf-8")
        self._reader = reader

    def persistent_load(self, pid: object) -> StorageRef:
        if type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage":  # noqa: PLR2004
            _, kind, key, _, count, *_ = pid
            if type(kind) is _StorageType and type(key) is str and type(count) is int:
                return StorageRef(key, kind.dtype, count)
        raise SourceError(f"unknown kind of storage {str(pid)[:80]}")

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401, PLR0911 - a list of cases
        # Protocol 2, which torch.save uses, spells modules as Python 2 did.
        module, name = NAME_MAPPING.get((module, name), (module, name))
        module = IMPORT_MAPPING.get(module, module)
        if (module, name) in _SPECIAL:
            return _SPECIAL[module, name]
        root = module.partition(".")[0]
        if module == "builtins" and name in _BUILTINS:
            return _BUILTINS[name]
        if root == "torch" and (found := _torch_name(module, name)) is not None:
            return found
        if root == "pathlib" and name in _PATHS:
            return join_path
        if (module, name) in _INERT_FUNCTIONS | _INERT_CLASSES:
            return self._reader.stub(module, name)
        if module.startswith("torch.distributed.checkpoint.") and name.lstrip("_")[:1].isupper():
            return self._reader.stub(module, name, _BASES.get(name, Stub))
        last = name.rpartition(".")[2].lstrip("_")
        is_class = last[:1].isupper()
        if root in sys.stdlib_module_names or root in _FOREIGN_ROOTS or not is_class:
            raise UnsafePickleError(
                f"the pickle asks for {module}.{name}, which no checkpoint needs; nothing was run",
                hint="Do not load this file with any other tool before you know who wrote it",
            )
        return self._reader.stub(module, name)


def _torch_name(module: str, name: str) -> Any:  # noqa: ANN401 - dtype, storage or None
    if module == "torch" and name in _TORCH_DTYPES:
        return _TORCH_DTYPES[name]
    if module == "torch" and name in _OTHER_DTYPES:
        return name
    if module in {"torch", "torch.storage", "torch.cuda"} and name in _STORAGES:
        return _StorageType(_STORAGES[name])
    return None


def _rebuild_tensor(
    storage: StorageRef, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> TensorRef:
    return TensorRef(storage, storage.dtype, offset, tuple(shape), tuple(strides))


def _rebuild_tensor_v3(  # noqa: PLR0913, PLR0917, RUF100 - torch's own signature
    storage: StorageRef,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    _grad: object,
    _hooks: object,
    dtype: DType,
    *_: object,
) -> TensorRef:
    return TensorRef(storage, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: TensorRef, *_: object) -> TensorRef:
    return tensor


def _rebuild_from_type(
    rebuild: object, _type: object, args: tuple[Any, ...], *_: object
) -> TensorRef | Stub:
    """A tensor with attributes of its own, such as DeepSpeed's partitions; these are left."""
    if rebuild is _rebuild_tensor:
        return _rebuild_tensor(*args)
    return _rebuild_tensor_v3(*args) if rebuild is _rebuild_tensor_v3 else Stub(*args)


def _reconstruct(kind: Callable[..., object], _base: object, _state: object) -> object:
    return kind() if isinstance(kind, type) and issubclass(kind, _INERT) else Stub()


def _new_object(kind: Callable[..., object], *args: object) -> object:
    return kind(*args) if isinstance(kind, type) and issubclass(kind, _INERT) else Stub()


def _default_dict(_factory: object = None, *pairs: Any) -> dict[Any, Any]:  # noqa: ANN401
    return dict(*pairs)


_SPECIAL: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): StateDict,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "deque"): list,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("_codecs", "encode"): encode,
    ("copyreg", "_reconstructor"): _reconstruct,
    ("copyreg", "__newobj__"): _new_object,
}
