"""Triton's kernels without a GPU: their results in the interpreter, and machine code for every GPU that they may meet."""

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freemoe.kernels.optional import importable
from tests.kernels.triton_cases import CASES, COMPILED, DTYPES, LAYERS

ROOT = Path(__file__).resolve().parents[2]

if not importable("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

CAPABILITIES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability -> KiB of shared memory that a block may have there."""

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@pytest.fixture(scope="module")
def interpreted():
    """Case -> what is wrong with its result. The interpreter is chosen as a kernel is defined, so it needs a process of its own."""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join([str(ROOT), *sys.path]), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "tests.kernels.triton_cases"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_interpreter_finds_what_the_reference_finds(case, dtype, interpreted):
    assert interpreted[f"{case}, {dtype}"] == ""


class Recorded:
    """Stands in for a kernel, and notes what it is launched with."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda *given, **constants: self.calls.append((self.kernel, given, constants))


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Every launch from here on, none of which is carried out."""
    from freemoe.kernels import triton_loops as dense
    from freemoe.kernels.sparse import triton_loops as sparse

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls = []
    for room, names in ((dense, ("multiply_up", "multiply_down")), (sparse, ("take_out", "band_products"))):
        for name in names:
            monkeypatch.setattr(room, name, Recorded(getattr(room, name), calls))
    return calls


def test_a_launch_goes_to_the_device_of_its_tensors(monkeypatch, launches):
    current = []

    @contextlib.contextmanager
    def device_of(x):
        current.append(x.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(Recorded, "__getitem__", lambda kernel, grid: lambda *given, **_: at.append(list(current)))
    at = []
    for case in (COMPILED[0], *COMPILED[-2:]):
        bare, arguments, _ = CASES[case](torch.float32)
        getattr(sys.modules[bare.__module__], bare.__name__)(*arguments)
    assert at == [[torch.device("cpu")]] * 4


def machine_code(kernel, given, constants, capability, aligned):
    """A kernel compiled for what it was launched with; ``aligned``: as if all addresses and sizes were multiples of 16."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    types = [TYPES[value.dtype] if isinstance(value, Tensor) else "i32" for value in given]
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    multiples = {(place,): [["tt.divisibility", 16]] for place in range(len(given))} if aligned else {}
    return triton.compile(ASTSource(kernel, signature, constants, multiples), target=GPUTarget("cuda", capability, 32))


def compilations():
    """Case, capability, aligned; the quick ones show every kernel once."""
    for case, capability in itertools.product(COMPILED, CAPABILITIES):
        other = case in COMPILED[1 : len(LAYERS)]
        yield pytest.param(
            case, capability, True, marks=() if capability == 80 and not other else pytest.mark.hardening
        )
        if not other:
            yield pytest.param(case, capability, False, marks=pytest.mark.hardening)


@pytest.mark.parametrize(("case", "capability", "aligned"), [*compilations()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compile_for_every_gpu(case, capability, aligned, dtype, launches):
    launch, arguments, _ = CASES[case](DTYPES[dtype])
    launch(*arguments)
    assert len(launches) == (2 if case.startswith("experts") else 1)
    for kernel, given, constants in launches:
        compiled = machine_code(kernel, given, constants, capability, aligned)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= CAPABILITIES[capability] * 1024
        # On 7.5 Triton multiplies every type without matrix units.
        units = capability >= 80 and dtype != "float32" and kernel.__name__ != "take_out"
        assert ("mma" in compiled.asm["ptx"]) == units
