"""What the pretended accelerator (`tests.pretend_accelerator`) computes with: the CPU's memory and kernels, and where the host waits."""

import ctypes
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils.dlpack import from_dlpack, to_dlpack

NAME = "pretend"
CPU = torch.device("cpu")
EXTENSION = 12
"""What DLPack calls devices of this kind."""


@dataclass(repr=False)
class Waits:
    """How often the host waited.

    Attributes:
        places: ``(operation, line of the code that asked for it)`` -> times.
    """

    places: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self):
        """All of them."""
        return sum(self.places.values())

    def __repr__(self):
        """One line for each place, the busiest first."""
        return "\n".join(f"{times:6d}  {where}  [{what}]" for (what, where), times in self.places.most_common())


_counting = []


@contextmanager
def waits():
    """Count how often the host waits for a device while open, in all threads.

    Copies to the host count, and those from it that do not say ``non_blocking``; operations whose result's size depends on values;
    numbers that are read. ``assert count.total <= 3, count`` says where.
    """
    count = Waits()
    _counting.append(count)
    try:
        yield count
    finally:
        _counting.remove(count)


_room = []
"""Bytes that the devices may still be asked for, where that is limited."""


@contextmanager
def room_for(size):
    """While open, the devices have room for so many bytes more; what is freed does not come back."""
    _room.append(size)
    try:
        yield
    finally:
        _room.pop()


def wait(what):
    if _counting:
        key = what, _line()
        for count in _counting:
            count.places[key] += 1


def _line():
    """The innermost line of ours that is being run, and behind it the library's line that it called, where there is one."""
    library, frame = "", sys._getframe(1)
    while frame is not None:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if "/tests/pretend_" not in name and "/torch/" not in name:
            for folder in ("/src/freemoe/", "/benchmarks/", "/tests/"):
                if folder in name:
                    return f"{name.rpartition(folder)[2]}:{line} {frame.f_code.co_name}{library}"
            if not library and "/site-packages/" in name:
                library = f" ({name.rpartition('/site-packages/')[2]}:{line})"
        frame = frame.f_back
    return f"elsewhere{library}"


# What a tensor of the device is: a tensor of torch's extension kind over a storage that keeps the CPU's memory alive.

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _renamed(tensor, device):
    """The same memory, said to be the device's: a DLPack header with another device in it."""
    capsule = to_dlpack(tensor)
    header = (ctypes.c_int32 * 4).from_address(
        _pointer(capsule, b"dltensor")
    )  # the address, 8 bytes, then kind and number
    header[2], header[3] = EXTENSION, device.index or 0
    return from_dlpack(capsule)


def _set_storage(tensor, storage, offset, size, stride=()):
    """``tensor`` over a storage of its own device; torch's own way, which is the CPU's for all devices."""
    op = torch.ops.aten.set_.source_Storage_storage_offset
    return op._op_dk(DispatchKey.CPU, tensor, storage, offset, list(size), list(stride))


def _set(tensor, storage, like):
    return _set_storage(tensor, storage, like.storage_offset(), like.shape, like.stride())


def _to_device(value, device):
    """A new tensor of the device over the memory of one of the CPU."""
    value = value.resolve_conj().resolve_neg()
    if _room:
        _room[-1] -= value.untyped_storage().nbytes()
        if _room[-1] < 0:
            raise torch.OutOfMemoryError(f"{NAME} out of memory")
    memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    empty = torch.empty(0, dtype=value.dtype)
    return _set(_renamed(empty, device), _renamed(memory, device).untyped_storage(), value)


def _on_cpu(tensor):
    """The tensor of the CPU over a device tensor's memory; valid as long as the latter is."""
    own = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), CPU, own.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype)
    plain = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    plain = plain.conj() if tensor.is_conj() else plain
    return torch._neg_view(plain) if tensor.is_neg() else plain


def is_pretend(value):
    """Whether it is a tensor of these devices."""
    return isinstance(value, Tensor) and value.device.type == NAME


# What each operation does: check, count, compute on the CPU.

_READING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_consecutive"),
    *("unique_dim", "multinomial", "_linalg_eigh", "_linalg_svd"),
    *("_linalg_solve_ex", "linalg_lstsq", "linalg_eig", "linalg_eigvals"),
}
"""CUDA's kernels read something on the host before they return, or look whether it worked."""

_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
generators = set()
"""Addresses of those that draw for the devices."""


def _flat(value):
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _each(change, value):
    if isinstance(value, list | tuple):
        return type(value)(_each(change, part) for part in value)
    return change(value)


def _check(op, name, args, values):
    """Where it runs; raises where its tensors lie on two devices, and counts where the host waits."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    # A number without dimensions may lie on the host, and so may indices, which torch copies by itself.
    placed = [t for t in tensors if t.ndim or is_pretend(t)]
    devices = list(dict.fromkeys(t.device for t in placed if is_pretend(t)))
    outside = [t for t in placed if not is_pretend(t)]
    if name in _INDEXED:
        indices = [i for i in args[1] if i is not None]
        masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
        outside = [t for t in outside if not any(t is i for i in indices) or not is_pretend(args[0])]
        if masks and name != "index" and (len(masks) < len(indices) or args[2].numel() > 1):
            wait("index by a mask")  # reading by one asks for its places first, which counts itself
    writes_outside = [a for a in args[:1] if name.endswith("_") and isinstance(a, Tensor) and not is_pretend(a)]
    if outside or writes_outside or len(devices) > 1:
        shapes = [(tuple(t.shape), str(t.device)) for t in tensors]
        raise RuntimeError(f"{op.name()} takes tensors of two devices: {shapes}, in {_line()}")
    if name in _READING or (name == "repeat_interleave" and not any(isinstance(v, int) for v in values)):
        wait(name.strip("_"))
    for value in values:
        if isinstance(value, torch._C.Generator) and value._cdata not in generators:
            raise RuntimeError(f"{op.name()} draws on {NAME} from a generator of the CPU, in {_line()}")
    return devices[0] if devices else next((v for v in values if isinstance(v, torch.device)), torch.device(NAME, 0))


@dataclass(frozen=True)
class _Schema:
    """What an operation's signature says.

    Attributes:
        name: Without "aten::".
        results: For each, the argument that it is written into, or None for a new one.
        is_view: Whether all results share an argument's memory and nothing is written.
        out: Arguments by name that results are written into, whatever their shape was.
        tensors: Places of arguments that are one tensor.
        places: Name of an argument -> its place.
    """

    name: str
    results: tuple[str | None, ...]
    is_view: bool
    out: tuple[str, ...]
    tensors: tuple[int, ...]
    places: dict[str, int]


@cache
def _schema(op):
    schema = op._schema
    aliases = [r.alias_info for r in schema.returns]
    sources = {s: a.name for a in schema.arguments if a.alias_info is not None for s in a.alias_info.before_set}
    return _Schema(
        schema.name.removeprefix("aten::"),
        tuple(sources[next(iter(a.before_set))] if a is not None and a.is_write else None for a in aliases),
        bool(aliases) and all(a is not None and not a.is_write for a in aliases),
        tuple(a.name for a in schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write),
        tuple(n for n, a in enumerate(schema.arguments) if str(a.type) == "Tensor"),
        {a.name: n for n, a in enumerate(schema.arguments)},
    )


def compute(op, *args, **kwargs):
    """Any operation on tensors of the device."""
    schema = _schema(op)
    values = list(_flat((*args, *kwargs.values())))
    device = _check(op, schema.name, args, values)
    if schema.is_view:  # keeps the device's storage
        return op._op_dk(DispatchKey.CPU, *args, **kwargs)
    on_cpu = [_each(_host, a) for a in args]
    by_name = {k: torch.empty(0, dtype=v.dtype) if k in schema.out else _each(_host, v) for k, v in kwargs.items()}
    for n in schema.tensors:
        if n < len(on_cpu) and isinstance(on_cpu[n], int | float):
            on_cpu[n] = _number(on_cpu[n], next((v for v in values if is_pretend(v)), None))
    computed = op(*on_cpu, **by_name)
    for k in schema.out:
        _write(kwargs[k], by_name[k])

    def result(value, written):
        if written is None:
            return _each(lambda v: _result(v, device, values), value)
        return kwargs[written] if written in kwargs else args[schema.places[written]]

    if len(schema.results) == 1:
        return result(computed, schema.results[0])
    return tuple(map(result, computed, schema.results)) if schema.results else None


def _host(value):
    if is_pretend(value):
        return _on_cpu(value)
    return CPU if isinstance(value, torch.device) and value.type == NAME else value


def _number(value, like):
    """A number in a tensor's place, which comes as a number; not every operation takes one."""
    fits = like is not None and (like.is_floating_point() or like.is_complex() or isinstance(value, int))
    return torch.tensor(value, dtype=like.dtype if like is not None and fits and like.dtype != torch.bool else None)


def clone_storage(storage):
    """A storage's copy (`copy.deepcopy`), for which torch would ask the device for memory."""
    if storage.device.type != NAME:
        return _clone_storage(storage)
    own = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return _renamed(torch.empty(0, dtype=torch.uint8).set_(own).clone(), storage.device).untyped_storage()


_clone_storage = torch.UntypedStorage.clone


def _result(value, device, values):
    if not isinstance(value, Tensor):
        return value
    address = value.untyped_storage().data_ptr()
    if address and any(is_pretend(v) and v.untyped_storage().data_ptr() == address for v in values):
        value = value.clone()  # its memory is another tensor's, which may go
    return _to_device(value, device)


def _write(target, value):
    """What an operation left in its ``out``, which takes its shape."""
    if target.shape == value.shape:
        _on_cpu(target).copy_(value)
    else:
        _set(target, _to_device(value, target.device).untyped_storage(), value)


def _histc(tensor, *args):
    """The CPU counts no whole numbers."""
    if len(args) < 3 or args[1] == args[2]:
        wait("histc")
    return _to_device(torch.histc(_on_cpu(tensor).float(), *args).to(tensor.dtype), tensor.device)


def _copy(source, target, non_blocking=False):
    if is_pretend(source) and not is_pretend(target):
        wait("copy to the host")
    elif is_pretend(target) and not is_pretend(source) and not non_blocking:
        wait("copy from the host")
    (_on_cpu(target) if is_pretend(target) else target).copy_(_on_cpu(source) if is_pretend(source) else source)
    return target


def _copy_and_resize(source, target):
    if source.shape != target.shape:
        target.resize_(source.shape)
    return _copy(source, target)


def _resize(tensor, size, *, memory_format=None):
    own = _on_cpu(tensor)
    new = torch.empty(size, dtype=tensor.dtype)
    shared = min(new.numel(), own.numel())
    new.view(-1)[:shared] = own.reshape(-1)[:shared]
    return _set(tensor, _to_device(new, tensor.device).untyped_storage(), new)


def _as_strided(tensor, size, stride, offset=None):
    own = tensor.storage_offset() if offset is None else offset
    return _set_storage(tensor, tensor.untyped_storage(), own, size, stride)


def _gru_cell(ingoing, hidden, before, b_in=None, b_hidden=None):
    """A GRU's step, which torch has for accelerators alone; the second tensor is for its gradient."""
    i, h = (
        g.chunk(3, 1)
        for g in (ingoing if b_in is None else ingoing + b_in, hidden if b_hidden is None else hidden + b_hidden)
    )
    reset, update = torch.sigmoid(i[0] + h[0]), torch.sigmoid(i[1] + h[1])
    new = torch.tanh(i[2] + reset * h[2])
    return new + update * (before - new), torch.cat([reset, update, new, before, h[2]], 1)


def _gru_cell_backward(gradient, workspace, has_bias):
    reset, update, new, before, h = workspace.chunk(5, 1)
    d_update = gradient * (before - new) * update * (1 - update)
    d_new = gradient * (1 - update) * (1 - new * new)
    d_reset = d_new * h * reset * (1 - reset)
    d_in, d_hidden = torch.cat([d_reset, d_update, d_new], 1), torch.cat([d_reset, d_update, d_new * reset], 1)
    biases = (d_in.sum(0), d_hidden.sum(0)) if has_bias else (None, None)
    return d_in, d_hidden, gradient * update, *biases


KERNELS = {
    "_copy_from": _copy,
    "_copy_from_and_resize": _copy_and_resize,
    "resize_": _resize,
    "histc": _histc,
    "as_strided_": _as_strided,
    "set_.source_Storage_storage_offset": _set_storage,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""What is not any operation: it knows both devices, or the CPU has no such kernel."""
