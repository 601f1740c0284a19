"""The workloads of the benchmark ``cpu``, with a marker at the start and end of each.

The target's Python runs this script:

    python3 workloads.py ROWS.json

Only ``import torch`` and the second call to each workload are counted: the first call allocates memory, packs weights
and chooses kernels. The script writes ROWS.json, a list of objects with ``name``, ``region`` (the region's number, or 0
if the workload was not run) and ``reason``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = 0x43500000
"""The base of the invalid file descriptors that mark regions; count.c defines the same value."""


def mark(region: int) -> None:
    """Start a region, or end the current one if ``region`` is 0, via an invalid system call that the plugin detects."""
    with contextlib.suppress(OSError):
        os.close(MARK + region)


mark(1)
import torch  # noqa: E402

mark(0)

from torch import Tensor, nn  # noqa: E402
from torch.ao import quantization  # noqa: E402
from torch.nn import functional  # noqa: E402

Work = Callable[[], object]


class Block(nn.Module):  # type: ignore[misc]
    """A residual block of ResNet18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.sum = nn.quantized.FloatFunctional()
        self.fused = [["conv1", "bn1", "relu1"], ["conv2", "bn2"]]

    def forward(self, x: Tensor) -> Tensor:
        """Apply two convolutions, add the shortcut, and return the ReLU of the sum."""
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.sum.add_relu(y, self.shortcut(x))


class Inverted(nn.Module):  # type: ignore[misc]
    """An inverted residual block of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, relu: type[nn.Module]) -> None:
        super().__init__()
        wide = inputs * expansion
        layers = [conv_bn_relu(inputs, wide, 1, relu)] if expansion != 1 else []
        layers.append(conv_bn_relu(wide, wide, 3, relu, stride, groups=wide))
        self.layers = nn.Sequential(*layers)
        self.project = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.sum = nn.quantized.FloatFunctional() if stride == 1 and inputs == outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """Expand the channels, convolve each one, and project the result."""
        y = self.project(self.layers(x))
        return self.sum.add(x, y) if self.sum else y


def conv_bn_relu(
    inputs: int, outputs: int, size: int, relu: type[nn.Module], stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return a convolution with batch normalisation and an activation."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), relu())


def resnet18() -> nn.Module:
    """Return ResNet18 (He et al., 2015)."""
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        nn.MaxPool2d(3, 2, 1),
    ]
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, outputs, stride), Block(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).eval()


def mobilenet_v2(relu: type[nn.Module] = nn.ReLU6) -> nn.Module:
    """Return MobileNetV2 (Sandler et al., 2018)."""
    layers: list[nn.Module] = [conv_bn_relu(3, 32, 3, relu, 2)]
    width = 32
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, outputs, count, stride in table:
        for number in range(count):
            layers.append(Inverted(width, outputs, stride if number == 0 else 1, expansion, relu))
            width = outputs
    layers += [conv_bn_relu(320, 1280, 1, relu), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers).eval()


def int8(network: nn.Module, example: Tensor) -> nn.Module:
    """Quantize the network statically, with the batch normalisations folded into the convolutions."""
    network = nn.Sequential(quantization.QuantStub(), network, quantization.DeQuantStub()).eval()
    for part in list(network.modules()):
        if isinstance(part, Block):
            quantization.fuse_modules(part, part.fused, inplace=True)
        elif isinstance(part, nn.Sequential):
            kinds = [type(layer) for layer in part]
            if kinds[:2] == [nn.Conv2d, nn.BatchNorm2d]:
                names = ["0", "1", "2"] if kinds[2:] == [nn.ReLU] else ["0", "1"]
                quantization.fuse_modules(part, names, inplace=True)
    network.qconfig = quantization.get_default_qconfig("qnnpack")
    quantization.prepare(network, inplace=True)
    network(example)
    return quantization.convert(network, inplace=True)


def of_product(size: int) -> Work:
    """Return a function that multiplies two square matrices."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    return lambda: torch.mm(a, b)


def of_layer(layer: nn.Module, *shape: int) -> Work:
    """Return a function that calls a layer or network."""
    layer.eval()
    x = torch.rand(*shape)
    return lambda: layer(x)


def of_int8_layer(layer: nn.Module, *shape: int) -> Work:
    """Return a function that calls a quantized layer or network."""
    x = torch.rand(*shape)
    quantized = int8(layer, x)
    return lambda: quantized(x)


def of_int8_linear() -> Work:
    """Return a function that calls a linear layer, quantized dynamically as in language models."""
    layer = quantization.quantize_dynamic(nn.Sequential(nn.Linear(1024, 1024)), {nn.Linear}, torch.qint8)
    x = torch.rand(1, 1024)
    return lambda: layer(x)


def of_attention() -> Work:
    """Return a function that computes attention with 4 heads of 64 features over 64 positions."""
    query, key, value = (torch.rand(1, 4, 64, 64) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(query, key, value)


def of_softmax() -> Work:
    """Return a function that computes the softmax of 1000 rows of 100 elements."""
    x = torch.rand(1000, 100)
    return lambda: torch.softmax(x, -1)


IMAGE = (1, 3, 224, 224)
PLANES = (1, 64, 56, 56)
WORKLOADS: dict[str, Callable[[], Work]] = {
    "mm 64³": lambda: of_product(64),
    "mm 256³": lambda: of_product(256),
    "mm 512³": lambda: of_product(512),
    "linear 1×1024×1024": lambda: of_layer(nn.Linear(1024, 1024), 1, 1024),
    "conv 3×3, 64→64 on 56×56": lambda: of_layer(nn.Conv2d(64, 64, 3, padding=1), *PLANES),
    "conv 1×1, 64→64 on 56×56": lambda: of_layer(nn.Conv2d(64, 64, 1), *PLANES),
    "depthwise 3×3, 64 on 56×56": lambda: of_layer(nn.Conv2d(64, 64, 3, padding=1, groups=64), *PLANES),
    "depthwise 7×7, 64 on 56×56": lambda: of_layer(nn.Conv2d(64, 64, 7, padding=3, groups=64), *PLANES),
    "LSTM 128, 16 steps": lambda: of_layer(nn.LSTM(128, 128), 16, 1, 128),
    "attention 4×64, 64 positions": of_attention,
    "softmax 1000×100": of_softmax,
    "MobileNetV2 224×224": lambda: of_layer(mobilenet_v2(), *IMAGE),
    "ResNet18 224×224": lambda: of_layer(resnet18(), *IMAGE),
}
# Quantized layers can include a ReLU but not a ReLU6, so MobileNetV2 is quantized with ReLU, as in torchvision.
INT8: dict[str, Callable[[], Work]] = {
    "linear 1×1024×1024, int8": of_int8_linear,
    "conv 3×3, 64→64 on 56×56, int8": lambda: of_int8_layer(nn.Conv2d(64, 64, 3, padding=1), *PLANES),
    "MobileNetV2 224×224, int8": lambda: of_int8_layer(mobilenet_v2(nn.ReLU), *IMAGE),
    "ResNet18 224×224, int8": lambda: of_int8_layer(resnet18(), *IMAGE),
}


def main(rows: str) -> None:
    """Run the workloads and write ``rows``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    has_int8 = "qnnpack" in torch.backends.quantized.supported_engines
    if has_int8:
        torch.backends.quantized.engine = "qnnpack"
    found: list[dict[str, Any]] = [{"name": "import torch", "region": 1, "reason": ""}]
    for name, make in {**WORKLOADS, **INT8}.items():
        if name in INT8 and not has_int8:
            found.append({"name": name, "region": 0, "reason": "no qnnpack"})
            continue
        print(name, flush=True)
        region = len(found) + 1
        count(make, region)
        found.append({"name": name, "region": region, "reason": ""})
    Path(rows).write_text(json.dumps(found))


def count(make: Callable[[], Work], region: int) -> None:
    """Call a workload twice and count the second call."""
    with torch.inference_mode():
        work = make()
        work()
        mark(region)
        work()
        mark(0)


if __name__ == "__main__":
    main(sys.argv[1])
