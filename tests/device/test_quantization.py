"""Tests of int8 networks on QNNPACK: dynamic, static (eager and FX) and PT2E quantization."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator

import pytest
import torch
from our_torch import only_our_torch
from torch import Tensor, nn
from torch.ao import quantization

DEFAULT_ENGINE = torch.backends.quantized.engine


@pytest.fixture(autouse=True)
def without_notices() -> Iterator[None]:
    """Suppress all warnings, including those that upstream's quantization modules print on import or use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def on_qnnpack() -> Iterator[None]:
    """Select QNNPACK, because upstream's wheels have another default engine."""
    torch.backends.quantized.engine = "qnnpack"
    yield
    torch.backends.quantized.engine = DEFAULT_ENGINE


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(made: type[nn.Module], *words: int, **options: object) -> nn.Module:
    torch.manual_seed(3)
    return made(*words, **options).eval()


def close(found: Tensor, wanted: Tensor, share: float = 0.05) -> bool:
    """Check the root mean square of the 8-bit error, relative to that of the result."""
    return bool((found - wanted).norm() <= share * wanted.norm())


class Network(nn.Module):  # type: ignore[misc]
    """Convolutions, a sum of two branches, a pool and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.sum = nn.quantized.FloatFunctional()
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map each 3-channel image in a batch to 10 numbers."""
        x = self.first(self.quant(x))
        x = self.sum.add(x, self.depthwise(x))
        return self.dequant(self.last(x.mean((2, 3))))


class Traceable(Network):
    """The same network without the modules that eager mode requires."""

    def forward(self, x: Tensor) -> Tensor:
        """Map each 3-channel image in a batch to 10 numbers."""
        x = self.first(x)
        x = x + self.depthwise(x)
        return self.last(x.mean((2, 3)))


class Recurrent(nn.Module):  # type: ignore[misc]
    """An LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.lstm, self.last = nn.LSTM(16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map sequences with 16 numbers per step to sequences with 4 numbers per step."""
        return self.dequant(self.last(self.lstm(self.quant(x))[0]))


@only_our_torch
def test_qnnpack_is_the_default_engine() -> None:
    assert "qnnpack" in torch.backends.quantized.supported_engines
    assert DEFAULT_ENGINE == "qnnpack"


def test_numbers_are_rounded_and_limited_to_8_bits() -> None:
    made = torch.quantize_per_tensor(torch.tensor([-2.0, 0.06, 0.3, 99.0]), 0.1, 10, torch.quint8)
    assert made.int_repr().tolist() == [0, 11, 13, 255]
    assert torch.allclose(made.dequantize(), torch.tensor([-1.0, 0.1, 0.3, 24.5]))


@pytest.mark.parametrize("kind", ["linear", "lstm", "gru"])
def test_dynamic_quantization_is_close_to_float32(kind: str) -> None:
    made = {
        "linear": lambda: nn.Sequential(seeded(nn.Linear, 64, 32), nn.ReLU(), seeded(nn.Linear, 32, 8)),
        "lstm": lambda: nn.Sequential(seeded(nn.LSTM, 32, 24, num_layers=2)),
        "gru": lambda: nn.Sequential(seeded(nn.GRU, 32, 24)),
    }[kind]()
    quantized = quantization.quantize_dynamic(made, {nn.Linear, nn.LSTM, nn.GRU}, dtype=torch.qint8)
    x = drawn(6, 64) if kind == "linear" else drawn(7, 2, 32)
    with torch.no_grad():
        found, wanted = quantized(x), made(x)
    found, wanted = (item[0] if isinstance(item, tuple) else item for item in (found, wanted))
    assert close(found, wanted)
    assert not torch.equal(found, wanted)


def test_a_dynamic_network_is_saved_and_loaded() -> None:
    quantized = quantization.quantize_dynamic(nn.Sequential(seeded(nn.Linear, 64, 32)), {nn.Linear})
    stream = io.BytesIO()
    torch.save(quantized.state_dict(), stream)
    again = quantization.quantize_dynamic(nn.Sequential(nn.Linear(64, 32)), {nn.Linear})
    again.load_state_dict(torch.load(io.BytesIO(stream.getvalue()), weights_only=False))
    assert torch.equal(again(drawn(3, 64)), quantized(drawn(3, 64)))


def test_static_quantization_of_eager_mode_is_close_to_float32() -> None:
    network = seeded(Network)
    network.qconfig = quantization.get_default_qconfig("qnnpack")
    fused = quantization.fuse_modules(copy.deepcopy(network), [["first.0", "first.1", "first.2"]])
    prepared = quantization.prepare(fused)
    for seed in range(4):
        prepared(drawn(2, 3, 16, 16, seed=seed))
    quantized = quantization.convert(prepared)
    assert isinstance(quantized.first[0], torch.ao.nn.intrinsic.quantized.ConvReLU2d)
    assert close(quantized(drawn(2, 3, 16, 16)), network(drawn(2, 3, 16, 16)), share=0.1)


def test_static_quantization_of_an_lstm_is_close_to_float32() -> None:
    network, x = seeded(Recurrent), drawn(7, 2, 16)
    network.qconfig = quantization.get_default_qconfig("qnnpack")
    prepared = quantization.prepare(copy.deepcopy(network))
    prepared(x)
    quantized = quantization.convert(prepared)
    assert isinstance(quantized.lstm, torch.ao.nn.quantized.LSTM)
    assert close(quantized(x), network(x))


def test_dynamic_quantization_of_fx_mode_is_close_to_float32() -> None:
    from torch.ao.quantization import quantize_fx

    network, x = nn.Sequential(seeded(nn.Linear, 64, 32), nn.ReLU(), seeded(nn.Linear, 32, 8)), drawn(6, 64)
    mapping = quantization.QConfigMapping().set_global(quantization.default_dynamic_qconfig)
    quantized = quantize_fx.convert_fx(quantize_fx.prepare_fx(copy.deepcopy(network), mapping, (x,)))
    assert isinstance(quantized.get_submodule("2"), torch.ao.nn.quantized.dynamic.Linear)
    assert close(quantized(x), network(x))


def test_static_quantization_of_fx_mode_is_close_to_float32() -> None:
    from torch.ao.quantization import quantize_fx

    network, example = seeded(Traceable), drawn(2, 3, 16, 16)
    mapping = quantization.get_default_qconfig_mapping("qnnpack")
    prepared = quantize_fx.prepare_fx(copy.deepcopy(network), mapping, (example,))
    for seed in range(4):
        prepared(drawn(2, 3, 16, 16, seed=seed))
    quantized = quantize_fx.convert_fx(prepared)
    assert "quantized.add" in quantized.code or "quantized.add_relu" in quantized.code
    assert close(quantized(example), network(example), share=0.1)


def test_pt2e_quantization_is_close_to_float32() -> None:
    from torch.ao.quantization.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torch.ao.quantization.quantizer import xnnpack_quantizer

    network, example = seeded(Traceable), drawn(2, 3, 16, 16)
    captured = torch.export.export_for_training(network, (example,)).module()
    quantizer = xnnpack_quantizer.XNNPACKQuantizer()
    quantizer.set_global(xnnpack_quantizer.get_symmetric_quantization_config())
    prepared = prepare_pt2e(captured, quantizer)
    for seed in range(4):
        prepared(drawn(2, 3, 16, 16, seed=seed))
    quantized = convert_pt2e(prepared)
    assert "quantize_per_tensor" in quantized.code
    assert close(quantized(example), network(example), share=0.1)


def test_pt2e_quantization_of_an_embedding_is_close_to_float32() -> None:
    from torch.ao.quantization.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torch.ao.quantization.quantizer.embedding_quantizer import EmbeddingQuantizer

    network, words = nn.Sequential(seeded(nn.Embedding, 50, 16)), torch.tensor([[1, 4, 49], [0, 7, 7]])
    captured = torch.export.export_for_training(network, (words,)).module()
    prepared = prepare_pt2e(captured, EmbeddingQuantizer())
    prepared(words)
    quantized = convert_pt2e(prepared)
    assert "dequantize_per_channel" in quantized.code
    assert close(quantized(words), network(words), share=0.02)


def test_a_quantized_embedding_is_close_to_float32() -> None:
    network = nn.Sequential(seeded(nn.Embedding, 50, 16))
    network[0].qconfig = quantization.float_qparams_weight_only_qconfig
    quantized = quantization.convert(quantization.prepare(copy.deepcopy(network)))
    words = torch.tensor([[1, 4, 49], [0, 7, 7]])
    assert isinstance(quantized[0], torch.ao.nn.quantized.Embedding)
    assert close(quantized(words), network(words), share=0.01)


def test_wrong_inputs_are_refused() -> None:
    layer = quantization.quantize_dynamic(nn.Sequential(seeded(nn.Linear, 64, 32)), {nn.Linear})
    with pytest.raises(RuntimeError, match="Float"):
        layer(drawn(2, 64).double())
    with pytest.raises(RuntimeError, match="Float Tensor"):
        torch.quantize_per_tensor(torch.ones(3, dtype=torch.int64), 0.1, 0, torch.quint8)


@only_our_torch
def test_inputs_of_wrong_sizes_are_refused() -> None:
    """Without patch 0016, the QNNPACK layers read past the end of these inputs."""
    layer = quantization.quantize_dynamic(nn.Sequential(seeded(nn.Linear, 64, 32)), {nn.Linear})
    with pytest.raises(RuntimeError, match="64 input features"):
        layer(drawn(2, 63))
    static, conv = torch.ao.nn.quantized.Linear(64, 32), torch.ao.nn.quantized.Conv2d(6, 4, 3, groups=2)
    with pytest.raises(RuntimeError, match="64 input features"):
        static(torch.quantize_per_tensor(drawn(2, 63), 0.1, 128, torch.quint8))
    with pytest.raises(RuntimeError, match="6 input channels"):
        conv(torch.quantize_per_tensor(drawn(1, 5, 9, 9), 0.1, 128, torch.quint8))
    assert conv(torch.quantize_per_tensor(drawn(1, 6, 9, 9), 0.1, 128, torch.quint8)).shape == (1, 4, 7, 7)


def test_an_unsupported_engine_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not supported"):
        torch.backends.quantized.engine = "x86"
