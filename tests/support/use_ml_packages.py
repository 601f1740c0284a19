"""Tests that use each package in ``image.ml_packages`` once, together with torch. pytest runs them in the image."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import cv2
import numpy
import onnxruntime
import pandas
import pytest
import torch
import torchvision
from matplotlib.figure import Figure
from PIL import Image
from scipy import linalg, optimize
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

FLOAT = 1
"""TensorProto.DataType."""


def message(**fields: int | str | bytes | list[bytes] | list[int]) -> bytes:
    """Encode a Protocol Buffers message. The keyword ``f1`` sets field 1, and so on; a list repeats the field."""
    encoded = b""
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            number = int(name[1:]) << 3
            if isinstance(value, int):
                encoded += varint(number) + varint(value)
            else:
                content = value.encode() if isinstance(value, str) else value
                encoded += varint(number | 2) + varint(len(content)) + content
    return encoded


def varint(value: int) -> bytes:
    more = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(part | 128 for part in more[:-1]), more[-1]])


def tensor(name: str, *shape: int) -> bytes:
    """Encode a float tensor's ValueInfoProto."""
    sizes = message(f1=[message(f1=size) for size in shape])
    return message(f1=name, f2=message(f1=message(f1=FLOAT, f2=sizes)))


def test_onnxruntime_runs_a_model() -> None:
    """The model, a linear layer and ReLU, is encoded as ModelProto without the package onnx."""
    weights = numpy.random.default_rng(1).standard_normal((8, 5)).astype(numpy.float32)
    nodes = [message(f1=[b"x", b"w"], f2="h", f4="MatMul"), message(f1="h", f2="y", f4="Relu")]
    constant = message(f1=[*weights.shape], f2=FLOAT, f8="w", f9=weights.tobytes())
    graph = message(f1=nodes, f2="layer", f5=constant, f11=tensor("x", 3, 8), f12=tensor("y", 3, 5))
    model = message(f1=8, f8=message(f1="", f2=13), f7=graph)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    x = numpy.random.default_rng(2).standard_normal((3, 8)).astype(numpy.float32)
    (seen,) = session.run(None, {"x": x})
    wanted = torch.relu(torch.from_numpy(x) @ torch.from_numpy(weights))
    torch.testing.assert_close(torch.from_numpy(seen), wanted)
    assert 0 < (seen == 0).sum() < seen.size


def test_onnxruntime_refuses_invalid_models() -> None:
    with pytest.raises(Exception, match=r"(?i)protobuf"):
        onnxruntime.InferenceSession(b"\xff\xff", providers=["CPUExecutionProvider"])


def test_opencv_resizes_and_encodes() -> None:
    ramp = numpy.repeat(numpy.arange(0, 256, 4, dtype=numpy.uint8)[None], 32, 0)
    small = cv2.resize(ramp, (32, 16), interpolation=cv2.INTER_AREA)
    wanted = torch.nn.functional.avg_pool2d(torch.from_numpy(ramp)[None].float(), 2)[0]
    assert numpy.abs(small - wanted.numpy()).max() <= 1
    done, encoded = cv2.imencode(".png", small)
    assert done
    assert (cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE) == small).all()


def test_scipy_solves_and_minimises() -> None:
    matrix = numpy.random.default_rng(3).standard_normal((20, 20))
    wanted = numpy.arange(20.0)
    assert numpy.allclose(linalg.solve(matrix, matrix @ wanted), wanted)
    assert optimize.minimize_scalar(lambda x: (x - 2) ** 2).x == pytest.approx(2)


def test_pandas_groups() -> None:
    table = pandas.read_csv(io.StringIO("board,ms\npi2,4\npi3,2\npi2,6\n"))
    assert table.groupby("board")["ms"].mean().to_dict() == {"pi2": 5.0, "pi3": 2.0}


def test_scikit_learn_fits() -> None:
    """The test uses the data set of digits that the package includes."""
    x, y = load_digits(return_X_y=True)
    known, other, labels, wanted = train_test_split(x / 16, y, test_size=0.5, random_state=1)
    model = LogisticRegression(max_iter=200).fit(known, labels)
    assert model.score(other, wanted) > 0.9


def test_matplotlib_draws_a_png_that_pillow_decodes() -> None:
    figure = Figure(figsize=(4, 3), dpi=50)
    figure.add_axes((0, 0, 1, 1)).axhspan(0.5, 1, color="red")
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    with Image.open(stream) as picture:
        assert picture.size == (200, 150)
        pixels = numpy.asarray(picture.convert("RGB"))
    assert pixels[20, 100].tolist() == [255, 0, 0]


def test_the_example_classifies_a_frame_of_opencv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenCV reads a video file in the same way as a camera."""
    monkeypatch.syspath_prepend("/usr/src/examples")
    import classify

    clip, weights = tmp_path / "clip.avi", tmp_path / "weights.pth"
    writer = cv2.VideoWriter(str(clip), cv2.VideoWriter.fourcc(*"MJPG"), 10, (320, 240))
    for _ in range(3):
        writer.write(numpy.full((240, 320, 3), (200, 100, 50), numpy.uint8))
    writer.release()
    frame = classify.frame(str(clip))
    assert frame.shape == (3, 240, 320)
    assert (frame.float().mean((1, 2)) - torch.tensor([50.0, 100.0, 200.0])).abs().max() < 8, "red, green, blue"
    torch.save(torchvision.models.mobilenet_v2().state_dict(), weights)
    monkeypatch.setattr(sys, "argv", ["classify.py", "--times=1", f"--weights={weights}", f"--camera={clip}"])
    classify.main()
    assert capsys.readouterr().out.count("ms per picture") == 2
    for absent in ("99", str(tmp_path / "absent.avi")):
        with pytest.raises(SystemExit, match="did not deliver a frame"):
            classify.frame(absent)
