"""``build-torch`` around the compiler: what is placed and when, what the statement says, what verify finds out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import pytest
from test_torch_wheel import a_wheel
from wheel_parts import make_wheel

from images import probe
from recipes import artefacts
from recipes.torch import build as building
from recipes.torch import job, provenance, resolve
from toolchain.config import load_config
from toolchain.errors import ArtefactDamaged, WheelUnusable
from toolchain.manifest import Manifest
from toolchain.steps import Made


class StandIn:
    """Makes the files of a build in a moment: the job's order is tested, not the compiler."""

    def __init__(self, members: dict[str, str | bytes]) -> None:
        self.members = members
        self.built = 0

    def versions(self) -> dict[str, str]:
        """Of a builder image."""
        return {"g++-14-arm-linux-gnueabihf:amd64": "14.2.0-19cross1", "compiler": "g++ 14.2.0"}

    def build(self, folder: Path) -> building.Built:
        """A wheel with the members, and what goes with it."""
        self.built += 1
        wheel = make_wheel(folder, self.members, name="torch", version="2.6.0", tag="cp313-cp313-linux_armv7l")
        symbols = folder / "torch-2.6.0-cp313-cp313-linux_armv7l.symbols.tar.xz"
        symbols.write_bytes(b"symbols")
        return building.Built(
            wheel=wheel, symbols=symbols, vendored=[], cache_hits=3, cache_calls=4, seconds={"compile": 1.5}
        )


class StandInFlow(job.TorchFlow):
    """The flow with that builder, as if the steps before the wheel had run."""

    def __init__(self, folder: Path, builder: StandIn) -> None:
        super().__init__(load_config({"build": {"folder": str(folder)}}))
        self.stand_in = builder

    def _builder_of(self, *_: object, **__: object) -> building.Builder:
        return cast("building.Builder", self.stand_in)

    def run(self) -> Made:
        """Only the last step."""
        facts = {"kind": "archive", "folder": "pytorch-1", "identity": "archive pytorch 1", "files": {}}
        needs = {
            "torch-builder": Manifest(step="torch-builder", key="", inputs={}, facts={"image": "sha256:1"}),
            "torch-source": Manifest(step="torch-source", key="", inputs={}, facts=facts),
        }
        return self._torch_wheel().action(needs)

    @property
    def there(self) -> dict[str, bytes]:
        """What lies where others look, by name."""
        return {path.name: path.read_bytes() for path in sorted(self.products.glob("*"))}

    @property
    def kept(self) -> tuple[str, ...]:
        """Keys in the artefact cache."""
        return artefacts.kept_of_recipe(self.config, "torch", resolve.key(self.config))


FIT: dict[str, str | bytes] = {"torch/version.py": "version = '2.6.0'\n"}
UNFIT: dict[str, str | bytes] = {"torch/lib/probe.so": probe.elf()}


def test_a_wheel_is_placed_with_its_statement_and_kept(tmp_path: Path) -> None:
    builder = StandIn(FIT)
    made = StandInFlow(tmp_path, builder)
    done = made.run()
    assert [path.parent for path in done.artefacts] == [made.products] * 3
    wheel = made.products / "torch-2.6.0-cp313-cp313-linux_armv7l.whl"
    assert provenance.read(provenance.beside(wheel), wheel)["recipeKey"] == resolve.key(made.config)
    assert len(made.kept) == 1
    before = made.there
    again = made.run()
    assert builder.built == 1, "the second time it comes from the artefact cache"
    assert (again.artefacts, made.there) == (tuple(sorted(done.artefacts)), before)
    assert [path.name for path in made.root.iterdir() if path.name.startswith(".")] == []


def test_a_refused_wheel_reaches_nobody(tmp_path: Path) -> None:
    made = StandInFlow(tmp_path, StandIn(UNFIT))
    with pytest.raises(WheelUnusable, match="is not fit to be used"):
        made.run()
    assert (made.there, made.kept) == ({}, ())
    assert [path.name for path in made.root.iterdir()] == [], "nothing is left beside either"


def test_a_refused_wheel_leaves_the_earlier_one_with_its_statement(tmp_path: Path) -> None:
    StandInFlow(tmp_path, StandIn(FIT)).run()
    made = StandInFlow(tmp_path, StandIn(UNFIT))
    before = made.there
    shutil.rmtree(made.config.build_root / "artefacts")
    with pytest.raises(WheelUnusable):
        made.run()
    assert made.there == before
    assert len(before) == 3


@pytest.mark.parametrize("moved", range(3))
def test_no_statement_lies_beside_another_wheel_wherever_the_placing_ends(tmp_path: Path, moved: int) -> None:
    folder = tmp_path / "products"
    folder.mkdir()
    old_wheel, old_statement = a_wheel(folder, "0" * 64)
    (tmp_path / "new").mkdir()
    wheel, statement = a_wheel(tmp_path / "new", "1" * 64)
    symbols = tmp_path / "new" / "torch.symbols.tar.xz"
    symbols.write_bytes(b"symbols")
    [wheel, symbols, statement][moved].unlink()
    with pytest.raises(FileNotFoundError):
        job.place([statement, wheel, symbols], folder)
    assert old_wheel.is_file()
    assert not old_statement.exists()


def test_a_kept_wheel_whose_statement_speaks_of_another_recipe_is_refused(tmp_path: Path) -> None:
    made = StandInFlow(tmp_path, StandIn(FIT))
    made.run()
    (whole,) = made.kept
    (wheel, statement) = a_wheel(tmp_path, "0" * 64)
    artefacts.put(made.config, "torch", whole, [wheel, statement], recipe=resolve.key(made.config))
    before = made.there
    with pytest.raises(ArtefactDamaged, match="speaks of another recipe") as caught:
        made.run()
    assert caught.value.found == "0" * 64
    assert whole in caught.value.mend
    artefacts.put(made.config, "torch", whole, [wheel], recipe=resolve.key(made.config))
    with pytest.raises(ArtefactDamaged, match="no provenance statement"):
        made.run()
    assert made.there == before
