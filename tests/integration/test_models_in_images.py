"""Tests of models in images: in the PyTorch of the system image, and in a C program in the armv7 container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import docker
import numpy
import pytest
from test_models import QUICK, SUPPORT, needs_armv7

from device.remote import models
from engine.containers import run_in
from flow import main_job
from toolchain.config import Config
from toolchain.manifest import Manifest

pytestmark = pytest.mark.emulation

C_PROGRAM = """
cc -Wall -Werror main.c -o example -L. -lmodel -Wl,-rpath,'$ORIGIN'
./example model.params input0.bin output0.bin
"""


@pytest.fixture(scope="module")
def profiled(
    built: main_job.Built, product_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> tuple[models.ModelProfile, Path]:
    """Run a model in TVM and in the PyTorch of the image, and export it. Return the result and the exported folder."""
    needs_armv7()
    assert built.manifests
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))  # where the model's parameters are kept
        done = models.profile(
            product_config, model="remote_models:cnn", target="armv7", device="emulator", timing=QUICK, folder=SUPPORT,
            export=folder / "exported",
        )  # fmt: skip
    return done, folder / "exported"


def test_armv7_model_also_runs_in_the_images_torch(
    built: main_job.Built, profiled: tuple[models.ModelProfile, Path]
) -> None:
    done, _ = profiled
    torch = built.manifest("torch").facts
    if not torch["wheel"]:
        assert done.not_run[0].endswith(" has no torch")
        return
    assert done.not_run == []
    assert [item.torch for item in done.eager] == [torch["version"]] * 2


def test_exported_model_is_built_in_the_armv7_container(
    workbench: Mapping[str, Manifest],
    client: docker.DockerClient,
    product_config: Config,
    profiled: tuple[models.ModelProfile, Path],
) -> None:
    assert workbench
    _, folder = profiled
    run_in(
        client,
        product_config.image_reference("workbench"),
        ["sh", "-ec", C_PROGRAM],
        architecture=product_config.image.target,
        binds=[f"{folder}:/mnt:rw"],
        workdir="/mnt",
        limit_s=600,
    )
    found, expected = (numpy.fromfile(folder / name, "f4") for name in ("output0.bin", "expected0.bin"))
    assert numpy.allclose(found, expected, rtol=1e-4, atol=1e-4)
