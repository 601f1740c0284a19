"""Tests of torchvision and torchaudio: C++ operators, image formats, a network and audio filters."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy
import pytest
import torch

if TYPE_CHECKING:
    import torchaudio
    import torchvision
    from PIL import Image
else:
    torchvision = pytest.importorskip("torchvision", reason="the image does not have torchvision")
    torchaudio = pytest.importorskip("torchaudio", reason="the image does not have torchaudio")
    Image = pytest.importorskip("PIL.Image")


def boxes(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    corner, size = torch.rand(count, 2, generator=generator) * 20, torch.rand(count, 2, generator=generator) * 12 + 2
    return torch.cat([corner, corner + size], 1)


def overlap(box: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Compute the intersection over union between a box and each of the other boxes."""
    low, high = torch.maximum(box[:2], others[:, :2]), torch.minimum(box[2:], others[:, 2:])
    common = (high - low).clamp(min=0).prod(1)
    return common / ((box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common)


def test_versions_match_torch() -> None:
    release, *others = (item.__version__.partition("+")[0] for item in (torch, torchvision, torchaudio))
    assert tuple(others) == {"2.6.0": ("0.21.0", "2.6.0"), "2.9.1": ("0.24.1", "2.9.1")}[release]


@pytest.mark.parametrize("limit", [0.1, 0.5])
def test_nms_keeps_the_best_of_overlapping_boxes(limit: float) -> None:
    given, scores = boxes(60), torch.rand(60, generator=torch.Generator().manual_seed(4))
    wanted, left = [], scores.argsort(descending=True)
    while left.numel():
        wanted.append(int(left[0]))
        left = left[1:][overlap(given[left[0]], given[left[1:]]) <= limit]
    assert torchvision.ops.nms(given, scores, limit).tolist() == wanted
    assert 1 < len(wanted) < 60


def test_roi_align_samples_bilinearly() -> None:
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(5), requires_grad=True)
    region = torch.tensor([[0.0, 4.3, 6.1, 20.7, 25.9]])
    seen = torchvision.ops.roi_align(image, region, output_size=4, sampling_ratio=1, aligned=True)
    x, y = (
        region[0, 1 + axis] - 0.5 + (torch.arange(4) + 0.5) * (region[0, 3 + axis] - region[0, 1 + axis]) / 4
        for axis in (0, 1)
    )
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None] / 31 * 2 - 1
    wanted = torch.nn.functional.grid_sample(image, grid, align_corners=True)
    torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-4)
    weights = torch.randn(seen.shape, generator=torch.Generator().manual_seed(6))
    (ours,) = torch.autograd.grad((seen * weights).sum(), image, retain_graph=True)
    (theirs,) = torch.autograd.grad((wanted * weights).sum(), image)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_deform_conv2d_without_offsets_is_a_convolution() -> None:
    generator = torch.Generator().manual_seed(7)
    image, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 4, 10, 10), (6, 4, 3, 3)))
    seen = torchvision.ops.deform_conv2d(image, torch.zeros(1, 18, 10, 10), weight, padding=1)
    torch.testing.assert_close(seen, torch.nn.functional.conv2d(image, weight, padding=1), rtol=1e-4, atol=1e-4)


def picture() -> torch.Tensor:
    """Return a smooth colour gradient, which JPEG compression hardly changes."""
    y, x = torch.meshgrid(torch.arange(40), torch.arange(56), indexing="ij")
    return torch.stack([x * 4, y * 6, (x + y) * 2]).to(torch.uint8)


def written(kind: str) -> torch.Tensor:
    stream = io.BytesIO()
    Image.fromarray(picture().permute(1, 2, 0).numpy()).save(
        stream, kind, **({"quality": 95} if kind == "JPEG" else {})
    )
    return torch.from_numpy(numpy.frombuffer(stream.getvalue(), dtype=numpy.uint8).copy())


def test_jpeg_of_pillow_is_decoded() -> None:
    data = written("JPEG")
    seen = torchvision.io.decode_jpeg(data)
    pillow = torch.from_numpy(numpy.array(Image.open(io.BytesIO(data.numpy().tobytes())))).permute(2, 0, 1)
    assert (seen.int() - pillow.int()).abs().max() <= 2, "torchvision and Pillow both use libjpeg-turbo"
    assert (seen.int() - picture().int()).abs().float().mean() < 2


def test_png_of_pillow_is_decoded_exactly() -> None:
    assert torch.equal(torchvision.io.decode_png(written("PNG")), picture())


def test_encoded_images_are_decoded_again() -> None:
    assert torch.equal(torchvision.io.decode_image(torchvision.io.encode_png(picture())), picture())
    seen = torchvision.io.decode_image(torchvision.io.encode_jpeg(picture(), quality=95))
    assert (seen.int() - picture().int()).abs().float().mean() < 2


def test_truncated_image_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        torchvision.io.decode_png(written("PNG")[:100])


def test_resnet18_and_its_transforms_run() -> None:
    torch.manual_seed(8)
    network = torchvision.models.resnet18(weights=None).eval()
    prepare = torchvision.transforms.Compose(
        [torchvision.transforms.Resize(72), torchvision.transforms.CenterCrop(64), torchvision.transforms.ToTensor()]
    )
    image = prepare(Image.fromarray(picture().permute(1, 2, 0).numpy()))[None]
    with torch.inference_mode():
        scores = network(image)
        torch.testing.assert_close(network(torch.cat([image, image]))[1:], scores, rtol=1e-3, atol=1e-3)
    assert scores.shape == (1, 1000)
    assert scores.isfinite().all()


def test_lfilter_matches_its_recurrence() -> None:
    wave = torch.randn(2, 64, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    a, b = torch.tensor([1.0, -0.6, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.3, 0.1], dtype=torch.float64)
    wanted = torch.zeros_like(wave)
    for n in range(64):
        for k in range(min(n, 2) + 1):
            wanted[:, n] += b[k] * wave[:, n - k] - (a[k] * wanted[:, n - k] if k else 0)
    torch.testing.assert_close(torchaudio.functional.lfilter(wave, a, b, clamp=False), wanted)


def test_overdrive_runs_the_compiled_loop() -> None:
    wave = torch.sin(torch.arange(400) / 7.0).repeat(2, 1)
    seen = torchaudio.functional.overdrive(wave, gain=20, colour=20)
    assert seen.shape == wave.shape
    assert torch.equal(seen[0], seen[1])
    assert seen.abs().max() <= 1


def test_rnnt_loss_of_uniform_scores() -> None:
    """With 2 frames, 1 label and 2 equally likely classes, there are 2 paths of 3 steps: the loss is -log(2 / 2**3)."""
    lengths = [torch.tensor([value], dtype=torch.int32) for value in (2, 1)]
    loss = torchaudio.functional.rnnt_loss(
        torch.zeros(1, 2, 2, 2), torch.tensor([[1]], dtype=torch.int32), *lengths, blank=0
    )
    torch.testing.assert_close(loss, torch.tensor(4.0).log())


def test_resample_keeps_a_tone() -> None:
    rate, wanted = 16000, 8000
    seen = torchaudio.functional.resample(torch.sin(torch.arange(rate) * (2 * torch.pi * 440 / rate)), rate, wanted)
    tone = torch.sin(torch.arange(wanted) * (2 * torch.pi * 440 / wanted))
    assert (seen - tone)[100:-100].abs().max() < 0.02


def test_mel_spectrogram_finds_the_tone() -> None:
    wave = torch.sin(torch.arange(8000) * (2 * torch.pi * 1000 / 8000))
    transform = torchaudio.transforms.MelSpectrogram(sample_rate=8000, n_fft=400, n_mels=40)
    frames = transform(wave)
    centres = torchaudio.functional.melscale_fbanks(201, 0.0, 4000.0, 40, 8000).argmax(0) * 4000 / 200
    assert (centres[frames.mean(1).argmax()] - 1000).abs() < 150
