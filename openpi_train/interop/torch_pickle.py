"""The pickle in a file of `torch.save`: names of tensors, plain values, and blanks for all else. Nothing of it is run.

Operations are read by Python's `pickletools` and done here, not by `pickle`: the latter takes memory as the file says
(an index of 2**31 in its memo), and time without end (hashes of nested tuples). Here an operation adds one object, and
their number is limited. Read next: `torch_file.py`.
"""

import collections
import dataclasses
import io
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}

# A tensor takes about 25 operations, and 100 bytes with its name: these are limits of 80,000 tensors and more.
MOST_OPERATIONS = 2_000_000
MOST_BYTES = 128 << 20
_MOST_DIMS = 32
_MOST_SIZE = 1 << 62
_MOST_INT_BITS = 1024
# Keys are hashed at each use; those of optimizers' state are pairs.
_MOST_KEY_PARTS = 16

_UnpicklingError = pickle.UnpicklingError


@dataclasses.dataclass(frozen=True)
class Storage:
    """The values of tensors: `dtype` is a numpy dtype, or the `Named` type of one that is not read."""

    key: str
    dtype: Any
    size: int


@dataclasses.dataclass(frozen=True)
class StridedTensor:
    """A tensor: a part of a storage. Offset and strides count values."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Named:
    """A class or function by its name; it is not imported."""

    __slots__ = ("what",)

    def __init__(self, what: str):
        self.what = what


class Blank:
    """Stands for an object that is none of the tensors; `held` is its state.

    What is called with one argument, as `OmegaConf.create` with a dict, holds that.
    """

    __slots__ = ("held", "what")

    def __init__(self, what: str):
        self.what = what
        self.held: Any = None


class Unpickled:
    """What a pickle says. Reads the file up to the pickle's end.

    `value` is what is pickled, `storages` those that it refers to, `others` the names of classes and functions that are
    blanks in it. Raises pickle.UnpicklingError if the pickle is damaged or beyond a limit; ValueError, KeyError,
    IndexError, TypeError, AttributeError or EOFError if it is damaged.
    """

    def __init__(self, file: BinaryIO):
        self.storages: dict[str, Storage] = {}
        self.others: list[str] = []
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._spent = 0
        self.value = self._run(_Bounded(file))

    def _run(self, file: "_Bounded") -> Any:
        for operation, argument, _ in pickletools.genops(file):  # pyright: ignore[reportArgumentType] (read, readline)
            self._spend(1)
            name = operation.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _LITERALS:
                self._stack.append(_checked(argument))
            elif name in _OWN:
                _OWN[name](self, argument)
            else:
                raise _UnpicklingError(f"it has the operation {name}, which torch does not write")
        raise EOFError("it has no end")

    def _spend(self, number: int) -> None:
        self._spent += number
        if self._spent > MOST_OPERATIONS:
            raise _UnpicklingError(f"it has more than {MOST_OPERATIONS:,} operations, far more than tensors need")

    def _ignore(self, _: object) -> None:
        pass

    def _pop(self, _: object = None) -> Any:
        return self._stack.pop() if self._stack else self._pop_mark()

    def _mark(self, _: object) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _pop_mark(self, _: object = None) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _dup(self, _: object) -> None:
        self._stack.append(self._stack[-1])

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else int(index)] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[int(index)])

    def _empty_list(self, _: object) -> None:
        self._stack.append([])

    def _empty_dict(self, _: object) -> None:
        self._stack.append({})

    def _empty_set(self, _: object) -> None:
        self._stack.append(Blank("builtins.set"))

    def _list(self, _: object) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _tuple(self, _: object) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("its stack is empty")
        items = tuple(self._stack[-count:])
        self._stack[-count:] = [items]

    def _dict(self, _: object) -> None:
        items = self._pop_mark()
        self._stack.append({})
        self._add_pairs(items)

    def _frozenset(self, _: object) -> None:
        self._pop_mark()
        self._stack.append(Blank("builtins.frozenset"))

    def _append(self, _: object) -> None:
        value = self._stack.pop()
        self._add([value])

    def _appends(self, _: object) -> None:
        self._add(self._pop_mark())

    def _setitem(self, _: object) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._add_pairs([key, value])

    def _setitems(self, _: object) -> None:
        self._add_pairs(self._pop_mark())

    def _add(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1].extend(items)
        elif not isinstance(self._stack[-1], Blank):
            raise TypeError("it adds to what is no list")

    def _add_pairs(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                self._stack[-1][_key(key)] = value
        elif not isinstance(self._stack[-1], Blank):
            raise TypeError("it sets items of what is no dictionary")

    def _named(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._found(module, name))

    def _stack_named(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise TypeError("it names a class by what is no text")
        self._stack.append(self._found(module, name))

    def _found(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        what = f"{module}.{name}"
        if what not in _KNOWN:
            self.others.append(what)
        return Named(what)

    def _reduce(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(function, arguments))

    def _new(self, _: object) -> None:
        arguments, made = self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(made, arguments))

    def _new_with_names(self, _: object) -> None:
        self._stack.pop()
        self._new(None)

    def _instance(self, argument: str) -> None:
        arguments = tuple(self._pop_mark())
        self._named(argument)
        self._stack.append(self._called(self._stack.pop(), arguments))

    def _object(self, _: object) -> None:
        made, *arguments = self._pop_mark()
        self._stack.append(self._called(made, tuple(arguments)))

    def _called(self, function: object, arguments: object) -> Any:
        if not isinstance(arguments, tuple):
            raise TypeError("it calls a function without a tuple of arguments")
        if isinstance(function, Blank):
            function.held = {"_content": arguments[0]} if len(arguments) == 1 else None
            return function
        if not isinstance(function, Named):
            raise TypeError("it calls what is no function")
        match function.what:
            case "collections.OrderedDict":
                return self._ordered(arguments)
            case "torch._utils._rebuild_tensor_v2":
                storage, offset, shape, strides = arguments[:4]
                if not isinstance(storage, Storage):
                    raise TypeError("it has a tensor without a storage")
                return StridedTensor(storage, _size(offset), _sizes(shape), _sizes(strides))
            case "torch._utils._rebuild_parameter":
                return arguments[0]
            case "torch.Size":
                return _sizes(arguments[0])
        return Blank(function.what)

    def _ordered(self, arguments: tuple[object, ...]) -> dict[Any, Any]:
        """What Python 2 wrote as a list of pairs; Python 3 adds items to an empty one."""
        made: dict[Any, Any] = collections.OrderedDict()
        for pairs in arguments[:1]:
            if not isinstance(pairs, list):
                raise TypeError("it makes a dictionary of what is no list")
            self._spend(len(pairs))
            for key, value in pairs:
                made[_key(key)] = value
        return made

    def _build(self, _: object) -> None:
        state = self._stack.pop()
        if isinstance(self._stack[-1], Blank):
            self._stack[-1].held = state

    def _refer(self, _: object) -> None:
        pid = self._stack.pop()
        if not isinstance(pid, tuple) or len(pid) not in (5, 6):
            raise _UnpicklingError("it refers to something that is no storage")
        kind, dtype, key, _, size = pid[:5]
        if kind != "storage" or not isinstance(key, str | int) or not isinstance(dtype, np.dtype | Named):
            raise _UnpicklingError("it refers to something that is no storage")
        self._stack.append(self.storages.setdefault(str(key), Storage(str(key), dtype, _size(size))))


class _Bounded:
    """Reads a file up to a number of bytes, and never asks it for more than it has."""

    def __init__(self, file: BinaryIO):
        self._file = file
        begin = file.tell()
        self._end = file.seek(0, io.SEEK_END)
        self._most = begin + MOST_BYTES
        file.seek(begin)

    def read(self, count: int) -> bytes:
        return self._file.read(self._allowed(count))

    def readline(self) -> bytes:
        return self._file.readline(self._allowed(MOST_BYTES))

    def tell(self) -> int:
        return self._file.tell()

    def _allowed(self, count: int) -> int:
        at = self._file.tell()
        if at >= self._most:
            raise _UnpicklingError(f"its pickle has more than {MOST_BYTES:,} bytes, far more than tensors need")
        return max(min(count, self._end - at, self._most - at), 0)


def _checked(value: object) -> Any:
    if isinstance(value, int) and value.bit_length() > _MOST_INT_BITS:
        raise ValueError("it has a number of hundreds of digits")
    return value


def _key(key: object) -> Any:
    """A key of a dictionary, which is quick to hash."""
    parts = key if isinstance(key, tuple) else (key,)
    simple = isinstance(key, _SIMPLE) or (len(parts) <= _MOST_KEY_PARTS and all(isinstance(k, _SIMPLE) for k in parts))
    if not simple:
        raise TypeError(f"a dictionary in it has a {type(key).__name__} as a key")
    return key


_SIMPLE = (str, int, float, bytes, type(None), Blank, Named)


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_SIZE:
        raise ValueError("a tensor in it has a size or offset that is no number of values")
    return value


def _sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > _MOST_DIMS:
        raise ValueError(f"a tensor in it has a shape that is no tuple of at most {_MOST_DIMS} numbers")
    return tuple(_size(one) for one in values)


_KNOWN = frozenset(
    (
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        "torch.Size",
    )
)
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE "
    "SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_OWN: Mapping[str, Any] = {
    "PROTO": Unpickled._ignore,
    "FRAME": Unpickled._ignore,
    "POP": Unpickled._pop,
    "MARK": Unpickled._mark,
    "POP_MARK": Unpickled._pop_mark,
    "DUP": Unpickled._dup,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), Unpickled._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Unpickled._get),
    "EMPTY_LIST": Unpickled._empty_list,
    "EMPTY_DICT": Unpickled._empty_dict,
    "EMPTY_SET": Unpickled._empty_set,
    "LIST": Unpickled._list,
    "TUPLE": Unpickled._tuple,
    "TUPLE1": lambda self, _: self._tuple_of(1),
    "TUPLE2": lambda self, _: self._tuple_of(2),
    "TUPLE3": lambda self, _: self._tuple_of(3),
    "DICT": Unpickled._dict,
    "FROZENSET": Unpickled._frozenset,
    "APPEND": Unpickled._append,
    "APPENDS": Unpickled._appends,
    "ADDITEMS": Unpickled._appends,
    "SETITEM": Unpickled._setitem,
    "SETITEMS": Unpickled._setitems,
    "GLOBAL": Unpickled._named,
    "STACK_GLOBAL": Unpickled._stack_named,
    "REDUCE": Unpickled._reduce,
    "NEWOBJ": Unpickled._new,
    "NEWOBJ_EX": Unpickled._new_with_names,
    "INST": Unpickled._instance,
    "OBJ": Unpickled._object,
    "BUILD": Unpickled._build,
    "BINPERSID": Unpickled._refer,
}
