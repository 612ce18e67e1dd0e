"""An accelerator that needs none: two devices of torch's own kind, ``pretend:0`` and ``pretend:1``, that the CPU computes.

Their tensors lie in the CPU's memory and hold real values. Operations that take tensors of two devices raise, as they would on CUDA,
and `waits` counts how often the host had to wait for a device and where. Importing this file registers the devices for the life of the
process, where ``--device auto`` then takes the first: so it is done by ``FREEMOE_TEST_DEVICE=pretend`` alone (`tests/conftest.py`), in a
process of its own. ``make test`` runs a quick part so, ``make hardening`` all.

What it cannot show:

- Code that asks for ``"cuda"`` by name (Triton kernels, memory in use, streams) goes the CPU's or the plain way here.
- Numbers, orders of ties and of sums are the CPU's, and so is the random generator: a seed draws here what it draws there.
- A generator of the device in an operation on the CPU's tensors is not noticed.
- Recurrent nets go cell by cell: one GRU (below) and no LSTM, where CUDA has a kernel for the whole sequence.
- Complex tensors work as views of real ones; what is conjugated or negated lazily is copied, where CUDA's kernels may take it.
- Numbers that are written where a mask is true (``x[mask] = 0``) never count as waiting; with a tensor of one element CUDA would wait.
- The backward pass runs in the thread that asked for it; torch's threads would run beside it.
"""

import ctypes
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.pretend_kernels import KERNELS, NAME, clone_storage, compute, generators, room_for, wait, waits

__all__ = ["COUNT", "NAME", "room_for", "waits"]

COUNT = 2


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self):
        return True

    def is_built(self):
        return True

    def has_primary_context(self, number):
        return True


_fetch_error = ctypes.pythonapi.PyErr_Fetch
_error = [ctypes.py_object() for _ in range(3)]
_error_pointers = [ctypes.byref(part) for part in _error]
_backward_errors = []
"""Errors on their way out of each backward pass that is running."""


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        if _backward_errors:
            # torch asks while an error is on its way and would end the process where Python, which cannot call anything then, fails.
            _fetch_error(*_error_pointers)
            if _error[1]:
                value = _error[1].value  # its text alone where C++ raised it
                _backward_errors[-1].append(value if isinstance(value, BaseException) else RuntimeError(value))
        return torch._C._autograd.DeviceType.PrivateUse1


class _Module:
    """``torch.pretend``."""

    @contextmanager
    def device(self, device):
        yield

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def device_count(self):
        return COUNT

    def current_device(self):
        return 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        """The devices' generator is the CPU's, which was seeded."""

    def get_rng_state(self, device=0):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=0):
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


_Generator = torch.Generator


class _DeviceGenerator(_Generator):
    """``torch.Generator``, whose devices are these too."""

    def __new__(cls, device="cpu"):
        there = torch.device(device)
        if there.type != NAME:
            return _Generator(there)
        made = _Generator.__new__(cls)
        made._device = torch.device(NAME, there.index or 0)
        # What an operation is given is another Python object for the same generator. These are never forgotten: an address comes again.
        generators.add(made._cdata)
        _kept.append(made)
        return made

    def __init__(self, device="cpu"):
        pass

    @property
    def device(self):
        return self._device


_kept = []


def _backward(*args, **kwargs):
    """The backward pass in this thread: torch keeps threads for the first device of a kind that was made in Python, not the second."""
    errors = []
    _backward_errors.append(errors)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            return _run_backward(*args, **kwargs)
    except SystemError as lost:
        raise (errors[0] if errors else lost) from None
    finally:
        _backward_errors.pop()


_run_backward = torch.autograd._engine_run_backward


def _move_module(module, *args, **kwargs):
    """Parameters of a module that is moved stay the same objects, as on CUDA; to swap what they hold is torch's way for other kinds."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _apply_to_module(module, *args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


_apply_to_module = torch.nn.Module._apply


def _register():
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), _Hooks(), _Guard())
    rest, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(compute, "PrivateUse1")
    for name, kernel in KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for lazy in ("Conjugate", "Negative"):
        # torch makes what is lazy real by this copy.
        aten.impl("_copy_from", KERNELS["_copy_from"], lazy)
    torch.autograd._engine_run_backward = _backward
    torch.UntypedStorage.clone = clone_storage
    torch.Generator = _DeviceGenerator
    torch.accelerator.synchronize = lambda device=None: wait("synchronize")
    # These take the number of a device from a guard in C++, which there is none of.
    new_tensor = Tensor.new_tensor
    Tensor.new_tensor = lambda self, data, **asked: new_tensor(self, data, **{"device": self.device, **asked})
    torch.nn.Module._apply = _move_module
    return [rest, aten]


_libraries = _register()
