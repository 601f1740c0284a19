"""Run the workloads of the benchmark ``cpu``, and mark the start and end of each for the emulator's plugin.

The target's Python runs this script, with ``benchmarks/models/networks.py`` in the same folder:

    python3 workloads.py ROWS.json

Instructions are counted only during ``import torch`` and during the second call to each workload. The first call is not
counted, because it also allocates memory, packs weights and chooses kernels. The script writes ROWS.json, a list of
objects with ``name``, ``region`` (the region's number, or 0 if the workload was not run) and ``reason``.
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
    """Mark the start of a region, or the end of the current one if ``region`` is 0.

    The mark is an invalid system call, which the emulator's plugin detects.
    """
    with contextlib.suppress(OSError):
        os.close(MARK + region)


mark(1)
import torch  # noqa: E402

mark(0)

from networks import unsettled_mobilenet_v2, unsettled_resnet18  # type: ignore[import-not-found] # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.ao import quantization  # noqa: E402
from torch.nn import functional  # noqa: E402

Work = Callable[[], object]


def int8(network: nn.Module, example: Tensor) -> nn.Module:
    """Quantize the network statically, with the batch normalisations folded into the convolutions."""
    network = nn.Sequential(quantization.QuantStub(), network, quantization.DeQuantStub()).eval()
    for part in list(network.modules()):
        if isinstance(part, nn.Sequential):
            kinds = [type(layer) for layer in part]
            for start in range(len(kinds)):
                if kinds[start : start + 2] == [nn.Conv2d, nn.BatchNorm2d]:
                    end = start + (3 if kinds[start + 2 : start + 3] == [nn.ReLU] else 2)
                    quantization.fuse_modules(part, [str(number) for number in range(start, end)], inplace=True)
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
    """Return a function that calls a linear layer that is quantized dynamically, as is usual in language models."""
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
    "MobileNetV2 224×224": lambda: of_layer(unsettled_mobilenet_v2(), *IMAGE),
    "ResNet18 224×224": lambda: of_layer(unsettled_resnet18(), *IMAGE),
}
# Quantized layers can include a ReLU but not a ReLU6, so MobileNetV2 is quantized with ReLU, as in torchvision.
INT8: dict[str, Callable[[], Work]] = {
    "linear 1×1024×1024, int8": of_int8_linear,
    "conv 3×3, 64→64 on 56×56, int8": lambda: of_int8_layer(nn.Conv2d(64, 64, 3, padding=1), *PLANES),
    "MobileNetV2 224×224, int8": lambda: of_int8_layer(unsettled_mobilenet_v2(nn.ReLU), *IMAGE),
    "ResNet18 224×224, int8": lambda: of_int8_layer(unsettled_resnet18(), *IMAGE),
}


def main(rows: str) -> None:
    """Run the workloads, and list them with their regions in the JSON file ``rows``."""
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
    """Call a workload twice. Mark only the second call as a region, so that only its instructions are counted."""
    with torch.inference_mode():
        work = make()
        work()
        mark(region)
        work()
        mark(0)


if __name__ == "__main__":
    main(sys.argv[1])
