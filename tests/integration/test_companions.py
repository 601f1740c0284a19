"""Tests of torchvision and torchaudio for the image: source, key, audit, step and build."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
from wheel_parts import FOR_OTHER_MACHINES, make_wheel, torch_wheel

from engine.containers import run_in
from flow import main_job, pipelines
from flow import share_artefacts as share
from flow.context import Context
from flow.serve_wheels import Offer
from flow.steps import companions
from images import apt
from images.flavour import load_suite
from images.recorded_sources import record_of, sources_of
from recipes import recipe
from recipes.companions import build, locate
from toolchain import files
from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactDamaged, ConfigError, SourceUnavailable, WheelUnusable
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import Made
from wheels import artefacts

TRIXIE = load_suite("trixie")
ARMHF = ARCHITECTURES["armhf"]
DATA = recipe.load(build.NAME)


def archive_at(uri: str) -> apt.Source:
    (main, *_) = apt.sources_for(load_config({}), Path())
    return dataclasses.replace(main, uri=uri)


@pytest.mark.parametrize("scheme", ["copy", "file"])
def test_a_source_archive_is_fetched_and_verified_once(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "pool").mkdir()
    there = tmp_path / "pool" / "a.orig.tar.gz"
    there.write_bytes(b"source")
    place, log = tmp_path / "sources" / "a.orig.tar.gz", tmp_path / "log"
    mirror, digest = archive_at(f"{scheme}:{tmp_path}"), hashlib.sha256(b"source").hexdigest()
    apt.fetch_file(mirror, "pool/a.orig.tar.gz", digest, place, log)
    assert place.read_bytes() == b"source"
    there.write_bytes(b"other")
    apt.fetch_file(mirror, "pool/a.orig.tar.gz", digest, place, log)
    place.write_bytes(b"damaged")
    with pytest.raises(SourceUnavailable) as caught:
        apt.fetch_file(mirror, "pool/a.orig.tar.gz", digest, place, log)
    assert digest in caught.value.expected
    there.unlink()
    with pytest.raises(SourceUnavailable, match="cannot be fetched"):
        apt.fetch_file(mirror, "pool/a.orig.tar.gz", digest, place, log)
    assert [path.name for path in place.parent.iterdir()] == [place.name], "partial files were left"


@pytest.mark.parametrize(
    ("version", "reason"),
    [("2.6.0", ""), ("2.6.1+local", ""), ("2.60.0", "they require torch 2.6"), ("", "no torch wheel")],
)
def test_companions_are_built_for_one_release_of_torch(version: str, reason: str) -> None:
    found = build.unfit(version)
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_key_depends_on_recipe_target_and_torch() -> None:
    keys = {
        build.recipe_key(DATA, ARMHF, TRIXIE, "1"),
        build.recipe_key(DATA, ARMHF, TRIXIE, "2"),
        build.recipe_key(DATA, ARCHITECTURES["arm64"], TRIXIE, "1"),
        build.recipe_key(DATA, ARMHF, load_suite("bookworm"), "1"),
    }
    assert len(keys) == 4


@pytest.mark.parametrize("wanted", [True, False])
def test_pull_artefacts_requests_matching_companions(tmp_path: Path, wanted: bool) -> None:
    wheel = torch_wheel(tmp_path / "w")
    config = load_config(
        {
            "build": {"folder": str(tmp_path / "build")},
            "torch": {"wheelhouse": [str(tmp_path / "w")]},
            "image": {"companions": wanted},
        }
    )
    mine = (build.NAME, build.recipe_key(DATA, ARMHF, TRIXIE, files.sha256_of(wheel)), False)
    assert (mine in share.wanted(config)) == wanted
    wheel.write_bytes(b"damaged")
    assert mine not in share.wanted(config)


def test_companions_are_requested_for_the_torch_that_was_pulled(tmp_path: Path) -> None:
    wheelhouse = tmp_path / "wheelhouse"
    wheelhouse.mkdir()
    config = load_config({"build": {"folder": str(tmp_path / "build")}, "torch": {"wheelhouse": [str(wheelhouse)]}})
    items = share.wanted(config)
    assert next(items)[0] == "torch"
    pulled = torch_wheel(wheelhouse)
    assert (build.NAME, build.recipe_key(DATA, ARMHF, TRIXIE, files.sha256_of(pulled)), False) in items


@pytest.mark.parametrize("wanted", [True, False])
def test_a_setting_removes_companions_from_the_main_job(tmp_path: Path, wanted: bool) -> None:
    image = {} if wanted else {"companions": False}
    with Context(load_config({"image": image, "build": {"folder": str(tmp_path)}})) as context:
        steps = {step.name: step for step in pipelines.main_job(context).steps}
    assert ("companions" in steps) == wanted
    assert ("companions" in steps["system"].needs) == wanted
    assert ("python3-pil" in steps["rootfs"].inputs["packages"].split()) == wanted


@pytest.mark.parametrize("value", ["maybe", 2, ["torchvision"], None])
def test_a_wrong_value_of_the_setting_is_an_error(value: object) -> None:
    with pytest.raises(ConfigError, match=r"image\.companions: expected true or false"):
        load_config({"image": {"companions": value}})


@pytest.mark.parametrize(("contents", "tag", "kind", "message"), FOR_OTHER_MACHINES)
def test_a_wheel_for_another_machine_is_rejected(
    tmp_path: Path, contents: dict[str, bytes], tag: str, kind: type[Exception], message: str
) -> None:
    wheel = make_wheel(tmp_path, contents, name="torchvision", tag=tag)
    with pytest.raises(kind) as caught:
        build.examine(wheel, tmp_path / "torch-site", ARMHF, TRIXIE)
    assert message in str(caught.value)


@pytest.mark.skipif(shutil.which("arm-linux-gnueabihf-gcc") is None, reason="no cross compiler for armhf")
@pytest.mark.parametrize(("symbol", "is_there"), [("of_torch", True), ("of_another_torch", False)])
def test_torch_must_define_every_symbol_in_use(tmp_path: Path, symbol: str, is_there: bool) -> None:
    there = tmp_path / "usr/local/lib/python3.13/dist-packages/torch/lib/libtorch_cpu.so"
    there.parent.mkdir(parents=True)
    ours, text = tmp_path / "_C.so", tmp_path / "a.c"
    for path, source, linked in (
        (there, "int of_torch(void) { return 1; }", []),
        (ours, f"int {symbol}(void); int use(void) {{ return {symbol}(); }}", [f"-L{there.parent}", "-ltorch_cpu"]),
    ):
        text.write_text(source)
        command = ["arm-linux-gnueabihf-gcc", "-shared", "-fPIC", "-s", f"-Wl,-soname,{path.name}"]
        subprocess.run([*command, text, *linked, "-o", path], check=True)
    wheel = make_wheel(tmp_path, {"torchvision/_C.so": ours.read_bytes()}, name="torchvision")
    if is_there:
        assert build.examine(wheel, tmp_path, ARMHF, TRIXIE).elf_files == 1
        return
    with pytest.raises(WheelUnusable, match=f"requires the symbol {symbol}"):
        build.examine(wheel, tmp_path, ARMHF, TRIXIE)


def needs_of(tmp_path: Path, uri: str, *, version: str) -> dict[str, Manifest]:
    """Return manifests for the preceding steps, with a mirror at ``uri``."""
    tar = tmp_path / "builder.tar"
    tar.write_bytes(b"builder")
    wheel = torch_wheel(tmp_path / "torch") if version else Path()
    torch = {"wheel": str(wheel), "version": version, "sha256": files.sha256_of(wheel) if version else ""}
    facts: Mapping[str, Mapping[str, Any]] = {
        "mirror": {"sources": [record_of(archive_at(uri))]},
        "builder": {"image": "sha256:0"},
        "torch": torch,
        "torch-site": {"version": version},
    }
    made = {"builder": (Artefact.of(tar),)}
    return {
        name: Manifest(step=name, key="", inputs={}, artefacts=made.get(name, ()), facts=facts[name]) for name in facts
    }


def run_step(tmp_path: Path, needs: Mapping[str, Manifest]) -> tuple[Made, str]:
    """Run the step; return its product, and the reason to run the step again, or "" if there is none."""
    with Context(load_config({"build": {"folder": str(tmp_path / "build")}})) as context:
        step = companions.step(context)
        made = step.action(needs)
        manifest = Manifest(step=step.name, key="", inputs={}, facts=made.facts)
        return made, step.missing(manifest)


@pytest.mark.parametrize(
    ("version", "message", "is_tried_again"),
    [
        ("", "there is no torch wheel", False),
        ("2.5.1", "they require torch 2.6", False),
        ("2.6.0", "orig.tar.gz", True),
    ],
)
def test_companions_require_torch_and_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, message: str, is_tried_again: bool
) -> None:
    made, again = run_step(tmp_path, needs_of(tmp_path, f"copy:{tmp_path}/empty", version=version))
    assert made.artefacts == ()
    assert made.facts["wheels"] == []
    (warning,) = made.warnings
    assert "NOT in the image" in warning
    assert message in warning
    assert "NOT in the image" in " ".join(capsys.readouterr().err.split())
    assert bool(again) == is_tried_again, "the step must run again only if a mirror may have the source later"


def test_main_job_uses_the_prebuilt_companions(product_config: Config, built: main_job.Built) -> None:
    made, torch = built.manifest("companions"), built.manifest("torch")
    assert build.unfit(torch.facts["version"]) == ""
    wheels = [item.path for item in made.artefacts if item.path.suffix == ".whl"]
    assert [path.name.partition("-")[0] for path in wheels] == ["torchaudio", "torchvision"]
    assert made.facts["elf files"] == 4
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            name, version = wheel.name.split("-")[:2]
            assert f"{name}/__init__.py" in names
            assert f"{name}-{version}.dist-info/licenses/LICENSE" in names
            assert version == DATA.tables["package"][name]["version"]
            assert {path.partition("/")[0] for path in names} - {name, f"{name}-{version}.dist-info"} <= {"torio"}
    kept = artefacts.prebuilt(build.PREBUILT, build.NAME, made.facts["key"])
    assert {path.name: files.sha256_of(path) for path in kept} == {path.name: files.sha256_of(path) for path in wheels}
    listed = {item["name"] for item in built.manifest("system").facts["wheels"]}
    assert {path.name for path in wheels} <= listed


def test_prebuilt_wheels_need_the_same_key_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    wheel = make_wheel(tmp_path, {"torchvision/a.py": "x = 1\n"}, name="torchvision")
    (stored,) = artefacts.put(config, build.NAME, "f" * 64, [wheel], recipe="1" * 64)
    monkeypatch.setattr(build, "PREBUILT", shutil.copytree(stored.parent, tmp_path / "prebuilt"))
    assert build.finished(config, "1" * 64) == ((stored,), "from the artefact cache")
    shutil.rmtree(stored.parent)
    kept = build.PREBUILT / wheel.name
    assert build.finished(config, "1" * 64) == ((kept,), "the wheel in this repository")
    assert build.finished(config, "2" * 64)[0] == ()
    kept.chmod(0o644)
    for damage in (lambda: kept.write_bytes(b"damaged"), kept.unlink):
        damage()
        with pytest.raises(ArtefactDamaged, match="in this repository is damaged") as caught:
            build.finished(config, "1" * 64)
        assert caught.value.fix == f"run git checkout -- {build.PREBUILT}"


def test_serve_wheels_offers_the_images_companions(tmp_path: Path) -> None:
    torch = torch_wheel(tmp_path / "house")
    config = load_config(
        {"build": {"folder": str(tmp_path / "build")}, "torch": {"wheelhouse": [str(tmp_path / "house")]}}
    )
    offer = Offer(config)
    assert set(offer()) == {torch.name}
    wheel = make_wheel(tmp_path, {"torchvision/a.py": "x = 1\n"}, name="torchvision")
    artefacts.put(config, build.NAME, "f" * 64, [wheel], recipe="1" * 64)
    assert set(offer()) == {torch.name}, "a wheel for another torch must not be offered"
    (stored,) = artefacts.put(config, build.NAME, "e" * 64, [wheel], recipe=locate.key(config))
    assert offer() == {torch.name: torch, wheel.name: stored}


CLASSIFY = """
import functools, sys, torch, torchvision
from pathlib import Path
from PIL import Image
sys.path.insert(0, "/usr/src/examples")
import classify
torch.backends.quantized.engine = "none"  # as on arm64, the default engine is not the one that the example requires
torch.manual_seed(1)
torchvision.models.get_model = functools.partial(torchvision.models.get_model, width_mult=0.25)  # to save time
network = torchvision.models.get_model("mobilenet_v2", num_classes=3)
for layer in network.features[17:].modules():  # more layers would make the search for value ranges slow
    if isinstance(layer, torch.nn.BatchNorm2d):
        torch.nn.init.constant_(layer.bias, 4)  # many activations exceed the limit of ReLU6
torch.save(network.state_dict(), "weights.pth")
torch.save({"fc.weight": torch.zeros(3, 512)}, "resnet.pth")
torchvision.io.write_jpeg(torch.randint(256, (3, 300, 400), dtype=torch.uint8), "picture.jpg")

def in_int8(name, weights, examples, original=classify.in_int8):
    global error
    exact, coarse = classify.loaded(name, weights), original(name, weights, examples)
    with torch.inference_mode():
        error = ((coarse(examples[0]) - exact(examples[0])).norm() / exact(examples[0]).norm()).item()
    return coarse

classify.in_int8 = in_int8
Path("labels.txt").write_text("tench\\ngoldfish\\n")
for weights in ("weights.pth", "picture.jpg", "labels.txt", "resnet.pth"):
    sys.argv = ["classify.py", "--times=1", "--weights", weights, "picture.jpg"]
    try:
        classify.main()
    except SystemExit as end:
        print(end)
try:
    classify.opened(Path("weights.pth"))
except SystemExit as end:
    print(end)
turned = Image.Exif()
turned[0x112] = 6  # the orientation: rotate the picture by 90 degrees
Image.new("RGB", (40, 30), "red").save("turned.jpg", exif=turned)
Image.new("I;16", (40, 30), 0x8000).save("deep.png")
Image.new("RGB", (40, 30), "red").save("moving.gif", save_all=True, append_images=[Image.new("RGB", (40, 30), "blue")])
for name in ("turned.jpg", "deep.png", "moving.gif"):
    picture = classify.opened(Path(name))
    print(name, *picture.shape, picture.dtype, *picture[:, 5, 5].tolist())
print("error in int8:", error)
"""


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
def test_the_example_classifies_a_picture_in_float32_and_int8(
    product_config: Config, built: main_job.Built, client: docker.DockerClient, tmp_path: Path
) -> None:
    """The example runs with random weights for 3 classes, and reports unsuitable weights and files.

    It applies a photo's orientation, converts values of 16 bits, and uses the first frame of an animation. The int8
    network limits activations as the float32 network does.
    """
    assert built.manifest("companions").facts["wheels"]
    done = run_in(
        client,
        product_config.image_reference("system"),
        ["python3", "-W", "ignore", "-c", CLASSIFY],
        architecture=product_config.image.target,
        binds=[f"{ROOT / 'examples'}:/usr/src/examples:ro", f"{tmp_path}:/root/work:rw"],
        workdir="/root/work",
    )
    lines = [line for line in done.output.splitlines() if line.strip()]
    assert [line.split(":")[0] for line in lines if " ms per picture" in line] == ["float32", "int8"]
    assert sum("  class " in line for line in lines) == 6
    saved = "is not a file from torch.save(model.state_dict(), ...)"
    assert {f"picture.jpg {saved} (UnpicklingError)", f"labels.txt {saved} (IndexError)"} <= set(lines)
    assert any("resnet.pth is not a state dict of mobilenet_v2: " in line and "Missing key" in line for line in lines)
    assert "turned.jpg 3 40 30 torch.uint8 254 0 0" in lines
    assert "deep.png 3 30 40 torch.uint8 128 128 128" in lines
    assert "moving.gif 3 30 40 torch.uint8 255 0 0" in lines
    assert any(line.startswith("weights.pth cannot be read as a picture: ") for line in lines)
    (error,) = (float(line.removeprefix("error in int8:")) for line in lines if line.startswith("error in int8:"))
    assert error < 0.1


@pytest.mark.expensive
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_second_build_produces_the_same_bytes(product_config: Config, built: main_job.Built, tmp_path: Path) -> None:
    before = built.manifest("companions")
    assert before.facts["wheels"]
    (main,) = (item for item in sources_of(built.manifest("mirror")) if item.pocket.name == "main")
    archives = build.fetch(DATA, main, product_config.build_root / "sources", tmp_path / "log")
    with Context(product_config) as context:
        reference = product_config.image_reference("builder")
        made = build.build(
            context.client,
            reference,
            DATA,
            product_config,
            TRIXIE,
            archives,
            context.torch_site,
            tmp_path,
            tmp_path / "log",
        )
    known = {item.path.name: item.sha256 for item in before.artefacts if item.path.suffix == ".whl"}
    assert {path.name: files.sha256_of(path) for path in made} == known
