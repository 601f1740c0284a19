"""Classify a picture with a torchvision network on the Pi's CPU, in float32 and in int8.

    python3 classify.py --weights mobilenet_v2.pth photo.jpg
    python3 classify.py --weights resnet18.pth --model resnet18 --labels imagenet.txt photo.jpg
    python3 classify.py --weights mobilenet_v2.pth --camera 0        # one frame from a camera; requires OpenCV
    python3 classify.py --weights mobilenet_v2.pth --camera clip.mp4 # or from a video file or a stream's URL

The weights are a state dict like those that torchvision provides for its models. The script also quantises these
weights to create the int8 network. It determines the value ranges from the picture and the picture's mirror image.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
import time
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.nn import intrinsic
from torchvision.transforms.v2 import functional as pictures

MODELS = ("mobilenet_v2", "mobilenet_v3_large", "resnet18", "resnet50", "shufflenet_v2_x1_0")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The mean and standard deviation of ImageNet's pictures, by colour."""


def main() -> None:
    """Read a picture, run both networks and print the table."""
    options = arguments()
    picture = prepared(frame(options.camera) if options.camera is not None else opened(options.picture))
    exact = loaded(options.model, options.weights)
    coarse = in_int8(options.model, options.weights, [picture, picture.flip(3)])
    labels = options.labels.read_text().splitlines() if options.labels else []
    results = {name: run(model, picture, options.times) for name, model in (("float32", exact), ("int8", coarse))}
    for name, (shares, milliseconds) in results.items():
        print(f"{name}: {milliseconds:.0f} ms per picture, median of {options.times}")
        for share, number in zip(*(item.tolist() for item in shares.topk(min(5, len(shares)))), strict=True):
            print(f"  {share:6.1%}  {labels[number] if number < len(labels) else f'class {number}'}")


def arguments() -> argparse.Namespace:
    """Parse the command line. Ends the program with a message if a file does not exist."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, nargs="?", help="a JPEG or PNG file")
    parser.add_argument(
        "--camera", metavar="SOURCE", help="source of the picture: a camera's number, a video file or a URL"
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--weights", type=Path, required=True, help="the model's state dict")
    parser.add_argument("--labels", type=Path, help="a text file with one class name per line")
    parser.add_argument("--times", type=int, default=5, help="how many times each network is run (default: 5)")
    options = parser.parse_args()
    if (options.picture is None) == (options.camera is None):
        parser.error("give either a picture or --camera=SOURCE")
    if options.times < 1:
        parser.error(f"--times must be at least 1, not {options.times}")
    for path in (options.picture, options.weights, options.labels):
        if path is not None and not path.is_file():
            parser.error(f"{path} does not exist or is not a file")
    return options


def opened(path: Path) -> Tensor:
    """Read a picture from a file, or the first frame of an animation: 3 x height x width, values from 0 to 255."""
    try:
        picture = torchvision.io.decode_image(str(path), torchvision.io.ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError as fault:
        sys.exit(f"{path} cannot be read as a picture: {str(fault).splitlines()[0]}")
    # decode_image returns 4 dimensions for an animation, and values of 16 bits for some PNG files.
    return pictures.to_dtype(picture if picture.ndim == 3 else picture[0], torch.uint8, scale=True)


def frame(source: str) -> Tensor:
    """Read one frame from ``source``, and return it in the same format as ``opened``.

    ``source`` is the number of a camera, the path of a video file, or a URL.
    """
    try:
        import cv2
    except ImportError:
        sys.exit("--camera requires OpenCV: apt-get install python3-opencv")
    camera = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    taken, picture = camera.read()
    camera.release()
    if not taken:
        sys.exit(f"--camera={source} did not deliver a frame; list this machine's cameras with: ls /dev/video*")
    return torch.from_numpy(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)).permute(2, 0, 1).contiguous()


def prepared(picture: Tensor) -> Tensor:
    """Convert a picture to a batch like those used in training: 1 x 3 x 224 x 224, normalised."""
    small = pictures.center_crop(pictures.resize(picture, [256], antialias=True), [224, 224])
    return pictures.normalize(small / 255, list(MEAN), list(DEVIATION)).unsqueeze(0)


def in_int8(name: str, weights: Path, examples: list[Tensor]) -> nn.Module:
    """Return the model quantised to int8. Running the model on ``examples`` determines the value ranges."""
    # The default engine of upstream's torch for 64-bit ARM is oneDNN, with which int8 is slower than float32.
    torch.backends.quantized.engine = "qnnpack"
    model = loaded(f"quantized_{name}", weights, quantize=False)
    model.fuse_model()
    if name == "mobilenet_v2":
        # torchvision replaces ReLU6 by ReLU, which can be fused. With ReLU6 during calibration, the ranges end at 6,
        # and the fused int8 layers saturate there.
        for layer in model.modules():
            if isinstance(layer, intrinsic.ConvReLU2d):
                layer[1] = nn.ReLU6()
    model.qconfig = quantization.get_default_qconfig("qnnpack")
    quantization.prepare(model, inplace=True)
    with torch.inference_mode():
        for example in examples:
            model(example)
    return quantization.convert(model)


def loaded(name: str, weights: Path, **settings: bool) -> nn.Module:
    """Return a model of torchvision with the weights from a file. Ends the program with a message if they do not fit.

    The number of classes is the number of rows of the last matrix in the file, which belongs to the classifier.
    """
    try:
        state = torch.load(weights, weights_only=True, map_location="cpu")
        classes = [item for item in state.values() if item.ndim == 2][-1].shape[0]
    except Exception as fault:  # torch.load raises many types of errors for other files
        sys.exit(f"{weights} is not a file from torch.save(model.state_dict(), ...) ({type(fault).__name__})")
    model = torchvision.models.get_model(name, num_classes=classes, **settings)
    try:
        model.load_state_dict(state)
    except RuntimeError as fault:
        sys.exit(f"{weights} is not a state dict of {name}: {textwrap.shorten(str(fault), 200)}")
    return model.eval()


def run(model: nn.Module, picture: Tensor, times: int) -> tuple[Tensor, float]:
    """Return the probabilities of the classes, and the median duration of ``times`` calls of the model in milliseconds.

    The first call is not included in the median, because it packs the weights.
    """
    seconds = []
    with torch.inference_mode():
        shares = model(picture)[0].softmax(0)
        for _ in range(times):
            began = time.perf_counter()
            model(picture)
            seconds.append(time.perf_counter() - began)
    return shares, 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main()
