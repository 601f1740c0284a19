"""Write torch's numerical results for inputs from numpy on one machine, and compare them on another.

    python3 numbers_of_torch.py write FILE      compute and save
    python3 numbers_of_torch.py compare FILE    compute, and compare with the results of another machine
    python3 numbers_of_torch.py compare FILE write FILE     compute once, then compare and write

Each case has a bound for the ratio of the largest difference to the largest magnitude in the case. A bound of zero
requires bit-identical results. Integers and booleans must always be identical.
The file also contains a partly trained network, whose training the other machine continues, and a script that the other
machine runs. In addition, the file contains a tensor in torch.save's older format, which is not a ZIP archive.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.ao.quantization
from torch import Tensor, nn

Case = Callable[[], dict[str, Tensor]]
CASES: dict[str, tuple[float, Case]] = {}
FLOAT32 = 2e-5
"""The bound for sums of several hundred float32 terms in a different order."""


def case(bound: float) -> Callable[[Case], Case]:
    """Register a case with its bound."""

    def enter(made: Case) -> Case:
        CASES[made.__name__] = (bound, made)
        return made

    return enter


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normally distributed numbers with numpy, so that they do not depend on torch."""
    return torch.from_numpy(numpy.random.Generator(numpy.random.PCG64(seed)).standard_normal(shape)).to(dtype)


def filled(module: nn.Module) -> nn.Module:
    """Fill a module's parameters with numbers that do not depend on torch's generator, and return the module."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(0.2 * drawn(*parameter.shape, seed=100 + number))
    return module


@case(0.0)
def conversions() -> dict[str, Tensor]:
    """Convert float32 to each dtype and back, except where C leaves the conversion undefined (negative to unsigned)."""
    x = drawn(64) * 10
    signed = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8)
    made = {str(dtype): x.to(dtype).to(torch.float64) for dtype in signed}
    made["uint8"] = x.abs().to(torch.uint8).to(torch.int64)
    made["bool"] = (x > 0).to(torch.uint8)
    made["complex"] = torch.view_as_real(torch.complex(x, -x).conj().resolve_conj())
    return made


@case(0.0)
def integers() -> dict[str, Tensor]:
    """Do int64 arithmetic with values beyond 32 bits, and use int64 indices."""
    x = torch.tensor([2**40 + 3, -(2**50), 7, 2**62])
    index = torch.tensor([3, 0, 2], dtype=torch.int64)
    return {
        "product": x * 3,
        "quotient": x // 5,
        "shift": x >> 7,
        "sum": x.sum(),
        "chosen": x[index],
        "sorted": x.sort().values,
        "gathered": torch.arange(20).reshape(4, 5).gather(1, torch.tensor([[4], [0], [2], [1]])),
    }


@case(FLOAT32)
def products() -> dict[str, Tensor]:
    """Compute matrix products in all layouts, in float32 and float64."""
    a, b = drawn(37, 53), drawn(53, 41, seed=2)
    return {
        "mm": a @ b,
        "transposed": b.t() @ a.t(),
        "mv": a @ b[:, 0],
        "batched": torch.bmm(drawn(3, 5, 7), drawn(3, 7, 2, seed=3)),
        "double": a.double() @ b.double(),
        "einsum": torch.einsum("ij,jk->ki", a, b),
    }


@case(FLOAT32)
def elementwise() -> dict[str, Tensor]:
    """Compute functions with vectorised implementations."""
    x = drawn(301)
    return {
        name: getattr(torch, name)(x.abs() + 0.1 if name in ("log", "sqrt", "rsqrt", "lgamma") else x)
        for name in ("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf", "expm1", "lgamma", "atan")
    }


def _with_gradients(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    leaves = [item.clone().requires_grad_() for item in inputs]
    out = filled(module)(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    (out * drawn(*out.shape, seed=9)).sum().backward()
    made = {"out": out.detach()}
    made |= {f"input {number}": leaf.grad for number, leaf in enumerate(leaves) if leaf.grad is not None}
    made |= {name: item.grad for name, item in module.named_parameters() if item.grad is not None}
    return made


@case(FLOAT32)
def convolution() -> dict[str, Tensor]:
    """Compute forward and backward passes of convolutions with stride, padding, dilation and groups."""
    module = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Conv2d(6, 5, 3, dilation=2, padding=2)
    )
    return _with_gradients(module, drawn(2, 4, 17, 19))


@case(FLOAT32)
def linear_layers() -> dict[str, Tensor]:
    """Compute linear layers, batch norm, layer norm, GELU and softmax.

    The layer before batch norm has no bias: batch norm would cancel it, and its gradient would be a rounding error.
    """
    module = nn.Sequential(
        nn.Linear(20, 30, bias=False),
        nn.BatchNorm1d(30),
        nn.GELU(),
        nn.Linear(30, 10),
        nn.LayerNorm(10),
        nn.Softmax(dim=1),
    )
    return _with_gradients(module, drawn(16, 20))


@case(FLOAT32)
def recurrent() -> dict[str, Tensor]:
    """Compute a bidirectional LSTM with two layers, and its gradients."""
    return _with_gradients(nn.LSTM(8, 12, num_layers=2, bidirectional=True), drawn(9, 3, 8))


@case(FLOAT32)
def attention() -> dict[str, Tensor]:
    """Compute multi-head attention and its gradients."""
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    return _with_gradients(module, drawn(2, 7, 16), drawn(2, 7, 16, seed=2), drawn(2, 7, 16, seed=3))


@case(1e-4)
def optimisers() -> dict[str, Tensor]:
    """Train the same network for ten steps with each optimiser."""
    made = {}
    for name, options in {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "RMSprop": {}, "Adagrad": {}}.items():
        module = filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimiser = getattr(torch.optim, name)(module.parameters(), lr=0.01, **options)
        for number in range(10):
            optimiser.zero_grad()
            nn.functional.mse_loss(module(drawn(12, 6, seed=number)), drawn(12, 1, seed=50 + number)).backward()
            optimiser.step()
        made[name] = torch.cat([item.detach().flatten() for item in module.parameters()])
    return made


def _training() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    return module, torch.optim.Adam(module.parameters(), lr=0.01)


def _train(module: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        optimiser.zero_grad()
        nn.functional.mse_loss(module(drawn(12, 6, seed=number)), drawn(12, 1, seed=50 + number)).backward()
        optimiser.step()


def half_trained() -> dict[str, Any]:
    """Return the saved state of a network and its optimiser after five steps."""
    module, optimiser = _training()
    _train(module, optimiser, range(5))
    return {"network": module.state_dict(), "optimiser": optimiser.state_dict()}


def trained_on(state: dict[str, Any]) -> Tensor:
    """Train the saved network for five more steps, and return its parameters."""
    module, optimiser = _training()
    module.load_state_dict(state["network"])
    optimiser.load_state_dict(state["optimiser"])
    _train(module, optimiser, range(5, 10))
    return torch.cat([item.detach().flatten() for item in module.parameters()])


@case(1e-4)
def training() -> dict[str, Tensor]:
    """Train a network for ten steps; save and load the network and its optimiser after five."""
    return {"ten steps": trained_on(half_trained())}


@case(1e-9)
def linear_algebra() -> dict[str, Tensor]:
    """Use LAPACK to solve problems that have a unique solution, in float64."""
    a = drawn(12, 12, dtype=torch.float64)
    spd = a @ a.T + 12 * torch.eye(12, dtype=torch.float64)
    u, s, v = torch.linalg.svd(a)
    return {
        "singular values": s,
        "svd": u @ torch.diag(s) @ v,
        "solve": torch.linalg.solve(spd, drawn(12, 3, dtype=torch.float64)),
        "cholesky": torch.linalg.cholesky(spd),
        "eigenvalues": torch.linalg.eigvalsh(spd),
        "determinant": torch.linalg.slogdet(spd).logabsdet,
        "inverse": torch.linalg.inv(spd),
        "least squares": torch.linalg.lstsq(
            drawn(20, 5, dtype=torch.float64), drawn(20, 2, dtype=torch.float64)
        ).solution,
    }


@case(FLOAT32)
def complex_algebra() -> dict[str, Tensor]:
    """Compute with complex numbers, for which BLAS and LAPACK have separate functions."""
    made = {}
    for dtype in (torch.complex64, torch.complex128):
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        a = torch.complex(drawn(2, 9, 9, dtype=part), drawn(2, 9, 9, seed=2, dtype=part))
        x, y = a[0, 0], a[1, :, 2]
        own = a[0] @ a[0].mH + 9 * torch.eye(9, dtype=dtype)
        found = {
            "dot": torch.dot(x, y),
            "vdot": torch.vdot(x, y),
            "outer": torch.outer(x, y),
            "mv": a[0] @ y,
            "mm": a[0] @ a[1],
            "mm, conjugated": a[0].mH @ a[1].mT,
            "bmm": torch.bmm(a, a.mH),
            "einsum": torch.einsum("bij,bij->b", a, a.conj()),
            "norm": torch.linalg.vector_norm(x),
            "solve": torch.linalg.solve(own, y),
            "cholesky": torch.linalg.cholesky(own),
            "eigenvalues": torch.linalg.eigvalsh(own),
            "singular values": torch.linalg.svdvals(a[1]),
        }
        for name, item in found.items():
            made[f"{name}, {dtype}"] = torch.view_as_real(item.resolve_conj()) if item.is_complex() else item
    return made


@case(FLOAT32)
def fourier() -> dict[str, Tensor]:
    """Compute Fourier transforms of even, odd and prime lengths."""
    return {
        **{f"fft {n}": torch.view_as_real(torch.fft.fft(drawn(n))) for n in (64, 45, 37)},
        "rfft2": torch.view_as_real(torch.fft.rfft2(drawn(12, 15))),
        "there and back": torch.fft.irfft(torch.fft.rfft(drawn(50)), n=50),
    }


def _halved(x: Tensor, times: int) -> Tensor:
    for number in range(times):
        x = x * 0.5 + float(number) if bool(x.sum() > 0) else x - 1.0
    return x


def _told_apart(x: Tensor, a: int, b: int, c: int) -> Tensor:
    if (a > 0 and b > 0 and c > 0) or (a < b and b < c and c < 40) or (a == 7 and b == 8 and c == 9 and a + b + c > 5):
        return _halved(x, a + b)
    return x - 1.0


_scripted = torch.jit.script(_halved)


@case(FLOAT32)
def scripted() -> dict[str, Tensor]:
    """Run TorchScript: a function with a loop and a branch, and a traced module."""
    module = filled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    traced = torch.jit.trace(module, drawn(2, 4))
    return {"scripted": _scripted(drawn(8), 5), "traced": traced(drawn(3, 4)).detach()}


@case(FLOAT32)
def threads() -> dict[str, Tensor]:
    """Compute with one OpenMP thread and with three."""
    x, before = drawn(400, 300), torch.get_num_threads()
    made = {}
    for number in (1, 3):
        torch.set_num_threads(number)
        made[f"{number} threads"] = torch.cat([x.sum(0), (x @ x.T).diagonal(), x.exp().mean(1)])
    torch.set_num_threads(before)
    return made


@case(FLOAT32)
def drawn_by_torch() -> dict[str, Tensor]:
    """Draw numbers with torch's seeded generator.

    For normal distributions, torch uses vector code only in larger tensors.
    """
    torch.manual_seed(11)
    return {
        "uniform": torch.rand(50),
        "normal, few": torch.randn(7),
        "normal, many": torch.randn(100),
        "normal, double": torch.randn(33, dtype=torch.float64),
        "integers": torch.randint(0, 1000, (40,)),
        "wide integers": torch.randint(0, 2**40, (40,)),
        "permutation": torch.randperm(37),
        "bernoulli": torch.bernoulli(torch.full((60,), 0.3)).to(torch.uint8),
        "exponential": torch.empty(20).exponential_(),
        "chosen": torch.multinomial(torch.arange(1.0, 9.0), 5),
        "dropout": nn.functional.dropout(torch.ones(64), 0.4),
    }


@case(FLOAT32)
def seeded() -> dict[str, Tensor]:
    """Return the initial parameters of a network that torch initialised from a seed, its loss and its gradients."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(24, 3))
    loss = nn.functional.cross_entropy(module(torch.randn(6, 2, 8)), torch.randint(0, 3, (6,)))
    loss.backward()
    made = {f"{name}'s gradient": item.grad for name, item in module.named_parameters() if item.grad is not None}
    return {"loss": loss.detach(), **made, **{name: item.detach() for name, item in module.named_parameters()}}


@case(FLOAT32)
def inference() -> dict[str, Tensor]:
    """Run layers without gradients in two memory formats. On ARM, torch has separate kernels for this case."""
    image = drawn(2, 8, 14, 15)
    layers = {
        "conv": filled(nn.Conv2d(8, 12, 3, stride=2, padding=1)),
        "pointwise": filled(nn.Conv2d(8, 12, 1)),
        "depthwise": filled(nn.Conv2d(8, 8, 3, groups=8, padding=1)),
    }
    made = {}
    with torch.no_grad():
        for name, layer in layers.items():
            made[name] = layer(image)
            made[f"{name}, channels last"] = layer(image.to(memory_format=torch.channels_last)).contiguous()
        made["linear"] = filled(nn.Linear(40, 24))(drawn(3, 11, 40))
        made["one row"] = filled(nn.Linear(40, 24))(drawn(1, 40))
        made["lstm"] = filled(nn.LSTM(8, 12))(drawn(9, 3, 8))[0]
        made["attention"] = filled(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval())(drawn(2, 7, 16))
    return made


@case(0.03)
def quantized() -> dict[str, Tensor]:
    """Run int8 layers on QNNPACK. The bound is a few 8-bit steps, because two machines may round differently."""
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, "qnnpack"
    quantization = torch.ao.quantization
    static = nn.Sequential(
        quantization.QuantStub(), filled(nn.Conv2d(4, 8, 3)), nn.ReLU(), nn.Flatten(), filled(nn.Linear(200, 6)),
        quantization.DeQuantStub(),
    ).eval()  # fmt: skip
    static.qconfig = quantization.get_default_qconfig("qnnpack")
    prepared = quantization.prepare(static)
    prepared(drawn(4, 4, 7, 7))
    embedding = nn.Sequential(filled(nn.Embedding(30, 16)))
    embedding[0].qconfig = quantization.float_qparams_weight_only_qconfig
    try:
        with torch.no_grad():
            linear = quantization.quantize_dynamic(nn.Sequential(filled(nn.Linear(40, 24))), {nn.Linear})
            lstm = quantization.quantize_dynamic(nn.Sequential(filled(nn.LSTM(8, 12))), {nn.LSTM})
            return {
                "rounded": torch.quantize_per_tensor(drawn(50), 0.02, 100, torch.quint8).int_repr(),
                "linear": linear(drawn(5, 40)),
                "lstm": lstm(drawn(9, 3, 8))[0],
                "static": quantization.convert(prepared)(drawn(2, 4, 7, 7, seed=2)),
                "embedding": quantization.convert(quantization.prepare(embedding))(torch.arange(9).view(3, 3)),
            }
    finally:
        torch.backends.quantized.engine = before


@case(0.0)
def through_numpy() -> dict[str, Tensor]:
    """Convert a tensor to a numpy array and back, without a copy if the layout allows it."""
    x = drawn(4, 6)
    array = x.numpy()
    array[1, 1] = 7.0
    return {"shared": x, "strided": torch.from_numpy(array[::2, ::3].copy())}


def computed() -> dict[str, dict[str, Tensor]]:
    """Compute all cases and return their results by name."""
    return {name: {key: item.detach().clone() for key, item in made().items()} for name, (_, made) in CASES.items()}


def faults(reference: dict[str, dict[str, Tensor]], found: dict[str, dict[str, Tensor]]) -> list[str]:
    """Return messages about results that are missing, have another type or shape, or differ by more than the bound."""
    said = []
    for name, (bound, _) in CASES.items():
        if reference[name].keys() != found[name].keys():
            said.append(f"{name}: different results: {sorted(reference[name].keys() ^ found[name].keys())}")
            continue
        for key, wanted in reference[name].items():
            seen = found[name][key]
            if (wanted.shape, wanted.dtype) != (seen.shape, seen.dtype):
                said.append(
                    f"{name}, {key}: {seen.dtype} {tuple(seen.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
                )
            elif bound == 0 or not (wanted.is_floating_point() or wanted.is_complex()):
                if not torch.equal(wanted, seen):
                    said.append(f"{name}, {key}: not equal")
            else:
                difference = (wanted.double() - seen.double()).abs().max()
                share = float(difference / wanted.double().abs().max())
                if not share <= bound:
                    said.append(f"{name}, {key}: relative difference {share:.2e}, bound {bound:.0e}")
    return said


def _in_the_old_format(tensor: Tensor) -> Tensor:
    stream = io.BytesIO()
    torch.save(tensor, stream, _use_new_zipfile_serialization=False)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def saved_script() -> Tensor:
    """Return the bytes that torch.jit.save writes for a script with a call, a loop and a long condition."""
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(_told_apart), stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def results_of(script: Tensor) -> dict[str, Tensor]:
    """Load a saved script, run it on this machine, and return its results."""
    loaded = torch.jit.load(io.BytesIO(script.numpy().tobytes()))
    return {"taken": loaded(drawn(8), 2, 3, 4), "not taken": loaded(drawn(8), -1, -2, 4)}


@case(FLOAT32)
def scripts_that_are_saved() -> dict[str, Tensor]:
    """Return the results of a script that was saved and loaded."""
    return results_of(saved_script())


def exchanged(found: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Return the contents of the file for the other machine."""
    return {
        "results": found,
        "half trained": half_trained(),
        "old format": _in_the_old_format(drawn(5, 7)),
        "script": saved_script(),
    }


def differences(document: dict[str, Any], found: dict[str, dict[str, Tensor]]) -> list[str]:
    """Continue another machine's training and run its script; return messages about differences from its results."""
    said = faults(document["results"], found)
    went_on = {**document["results"], "training": {"ten steps": trained_on(document["half trained"])}}
    said += [f"{line}, after continuing the other machine's training" for line in faults(document["results"], went_on)]
    ran = {**document["results"], "scripts_that_are_saved": results_of(document["script"])}
    said += [f"{line}, with the other machine's script" for line in faults(document["results"], ran)]
    old = torch.load(io.BytesIO(document["old format"].numpy().tobytes()), weights_only=True)
    return said if torch.equal(old, drawn(5, 7)) else [*said, "tensor in the old format: not equal"]


def main(*words: str) -> int:
    """Perform the actions in ``words``, which are pairs of an action and a file; return the number of differences."""
    if not words or len(words) % 2 or not {*words[::2]} <= {"write", "compare"}:
        print(f"usage: {__doc__}", file=sys.stderr)
        sys.exit(2)
    found = computed()
    results = f"{sum(len(item) for item in found.values())} results of {len(found)} cases"
    said: list[str] = []
    for action, file in zip(words[::2], words[1::2], strict=True):
        if action == "write":
            torch.save(exchanged(found), file)
            print(f"{results} written")
        else:
            differ = differences(torch.load(file, weights_only=True), found)
            print("\n".join(differ) or f"{results} agree")
            said += differ
    return len(said)


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 100))
