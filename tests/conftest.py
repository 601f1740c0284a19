"""What the tests of the whole flow share: one real build, made once and kept apart from the user's own."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
from machine import needs_the_machine
from ordinary_user import open_checkout
from xdist.scheduler import LoadScopeScheduling

from engine import daemon as engine
from engine.daemon import connect
from flow import main_job, pipelines
from flow.context import Context
from toolchain import files
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import InUse
from toolchain.manifest import Manifest

SETTINGS: dict[str, dict[str, Any]] = {
    # Of this checkout: two of them on one machine share an engine.
    "image": {"name": f"pitorch-test-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"},
    "build": {"folder": "build/test"},
    # The wheel that is tested is the one that the repository keeps, whatever the caller's wheelhouse holds.
    "torch": {"wheelhouse": []},
}
__all__ = ["open_checkout"]
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

# A shell starts its background jobs deaf to Ctrl-C, and their children inherit that: tests of it need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests that change what the build left, or share a port that is fixed: one process runs them, before any others.
_OF_THE_BUILD = (
    *("test_any_wheel.py", "test_build_tools.py", "test_deploy.py", "test_device_on_board.py", "test_main_job.py"),
    *("test_qemu.py", "test_qpu_ops_incremental.py", "test_serve.py", "test_whole_images.py"),
)
# The long ones of the others come first, so that no process waits for one of them at the end; then those that want the
# build, which is there by then.
_FIRST = (
    *("test_libqpu_native.py", "test_qpu_ops_native.py", "test_cuda_ops.py"),
    *("test_torch_wheel.py", "test_rootfs.py", "test_torch_prepare.py", "test_wheels.py"),
    *("test_pitorch_tvm.py", "test_qpulib_recipe.py", "test_torch_compile.py", "test_tvm_ffi.py"),
)
_SHARED = frozenset({"built", "exported_config", "workbench"})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whoever asks for what all share is named above: it has its place in the order."""
    for item in items:
        if _SHARED & set(getattr(item, "fixturenames", ())) and item.path.name not in (*_OF_THE_BUILD, *_FIRST):
            raise pytest.UsageError(f"{item.path.name} shares the build: name it in {Path(__file__).name}")
    if hasattr(config, "workerinput"):
        order = {name: place for place, name in enumerate((*_OF_THE_BUILD, *_FIRST))}
        items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """For ``./inv test --lanes=2``: a file's tests stay together, and those of all files that share the build."""

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).name
            return "the build" if name in _OF_THE_BUILD else name

    return Lanes(config, log)


@pytest.fixture(autouse=True)
def engine_for_those_who_ask(request: pytest.FixtureRequest) -> None:
    """Tests that are marked with ``engine`` find one, whichever of them comes first."""
    if request.node.get_closest_marker("engine") and os.geteuid() == 0 and shutil.which("dockerd", path=_PATH):
        request.getfixturevalue("engine_runs")


@pytest.fixture(scope="session")
def engine_runs() -> None:
    """The engine that answers, or one of the tests' own."""
    engine.ensure_running(load_config(SETTINGS))


_SESSION = contextlib.ExitStack()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Others see that this one runs; whoever cannot write there starts no engine either."""
    if not hasattr(session.config, "workerinput"):
        folder = ROOT / SETTINGS["build"]["folder"]
        with contextlib.suppress(PermissionError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = _SESSION.enter_context((folder / "sessions.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_SH)  # one that ends the engine just now is waited for


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The engine that a test started ends with the last session; ./inv down does not look in the tests' folder."""
    if not hasattr(session.config, "workerinput"):
        _SESSION.close()
        lock = ROOT / SETTINGS["build"]["folder"] / "sessions.lock"
        others = InUse("other tests of this checkout run", expected="none", found="a lock", fix="wait for them")
        with contextlib.ExitStack() as alone:
            try:
                alone.enter_context(files.held(lock, others))
            except (OSError, InUse):
                return
            engine.down(load_config(SETTINGS))


@pytest.fixture(scope="session")
def product_config() -> Config:
    """The configuration of the build that the tests share."""
    return load_config(SETTINGS)


@pytest.fixture
def client(built: main_job.Built) -> Iterator[docker.DockerClient]:
    """The engine that built."""
    assert built.manifests
    with contextlib.closing(connect()) as made:
        yield made


@pytest.fixture(scope="session")
def workbench(built: main_job.Built, product_config: Config) -> Mapping[str, Manifest]:
    """The development root and the image that shells are opened in, beside what was built: all manifests by step."""
    with files.locked(product_config.build_root / "for-the-tests"):
        main_job.ready_workbench(product_config)
    with Context(product_config) as context:
        decisions = pipelines.main_job(context, with_workbench=True).plan()
    found = {item.step.name: item.previous for item in decisions if item.previous is not None and not item.runs}
    assert {"dev", "workbench", *(item.step for item in built.manifests)} <= set(found)
    return found


@pytest.fixture(scope="session")
def built(product_config: Config) -> main_job.Built:
    """The system image, built for real: from the mirror to the image that was seen working.

    Whichever process asks first builds it; the other waits, and takes it as it stands: two builds refuse each other.
    """
    needs_the_machine()
    engine.ensure_running(product_config)
    with files.locked(product_config.build_root / "for-the-tests"):
        with Context(product_config) as context:
            decisions = pipelines.main_job(context).plan()
        found = tuple(item.previous for item in decisions if item.previous is not None and not item.runs)
        if len(found) == len(decisions):
            return main_job.Built(found, frozenset(), 0.0)
        return main_job.build_image(product_config)


@pytest.fixture
def no_other_build(product_config: Config, built: main_job.Built) -> Iterator[None]:
    """For tests that build where all do: another process waits, whose build would be refused, or refuse this one."""
    assert built.manifests
    with files.locked(product_config.build_root / "for-the-tests"):
        yield


@pytest.fixture(scope="session")
def exported_config(product_config: Config, built: main_job.Built) -> Config:
    """The configuration, with its root filesystem exported."""
    from nfsroot.export import export

    assert built.manifest("system").facts["image"]
    export(product_config)
    return product_config


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_the_caller() -> None:
    """INVOKE_* variables of whoever runs the tests do not reach them."""
    for name in [name for name in os.environ if name.startswith("INVOKE_")]:
        del os.environ[name]
