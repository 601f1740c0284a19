"""Fixtures for tests that share one real build, separate from the user's build."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
from container_builds import made_workbench
from machine import needs_the_machine
from ordinary_user import open_checkout
from xdist.scheduler import LoadScopeScheduling

from engine.connect import connect
from engine.dockerd import Daemon
from engine.start import ensure_running
from engine.stop import stop_daemon
from flow import main_job, pipelines
from flow.context import Context
from toolchain import files, progress
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import InUse
from toolchain.manifest import Manifest

SETTINGS: dict[str, dict[str, Any]] = {
    # The image name is unique to each checkout, because the checkouts on a machine share an engine.
    "image": {"name": f"pitorch-test-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"},
    "build": {"folder": "build/test"},
    # Test the wheel in the repository, not one in the caller's wheelhouse.
    "torch": {"wheelhouse": []},
    # On a busy PC, the virtual CPUs of one machine wait for each other and waste CPU time (docs/walkthrough.md).
    "device": {"cpus": 1},
}
__all__ = ["open_checkout"]
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

# A shell starts background jobs with SIGINT ignored, and child processes inherit this. Some tests depend on SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP in the same way. With a handler that does nothing, the tests continue after the terminal is
# closed, and child processes start with the default action.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# Without byte code, each process would rewrite the assertions of all tests, and each child process would compile the
# project. pytest-xdist's processes inherit the environment.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# The files of a lane run in one process. The first lane changes the shared build. The second one changes, serves or
# boots the exported tree.
_LANES = {
    "build": ("test_any_wheel.py", "test_build_tools.py", "test_qpu_ops_incremental.py"),
    "tree": (
        *("test_device_on_board.py", "test_qemu.py", "test_main_job.py", "test_netboot.py", "test_sd_image.py"),
        *("test_lab_boards.py", "test_serve.py", "test_whole_images.py", "test_arm64_image.py"),
    ),
}
_LANE_OF = {name: lane for lane, names in _LANES.items() for name in names}
# The order in which lanes and files start: the longest first, so that no process is still running a long file when the
# others have finished. While the first process makes the shared build, the others run files that do not need it.
_ORDER = (
    *_LANES["build"],
    # test_libqpu_native.py sets CMake's options; with other options, its objects would be compiled again.
    *("test_libqpu_native.py", "test_lab_network.py"),
    *_LANES["tree"],
    *("test_qpu_ops_native.py", "test_models.py", "test_torch_wheel.py", "test_lab.py", "test_cuda_ops.py"),
    *("test_wrapper.py", "test_registry_lies.py", "test_rootfs.py", "test_profile_remote.py", "test_companions.py"),
    *("test_model_parameters.py", "test_phone.py", "test_raspbian.py", "test_opencl.py", "test_loader.py"),
    *("test_engine.py", "test_remote_ssh.py", "test_registry_faults.py", "test_qpulib_recipe.py", "test_doctor.py"),
    *("test_export.py", "test_mirrors.py", "test_opencl_ssh.py", "test_registry.py", "test_share_internet.py"),
    *("test_cli.py", "test_models_in_images.py", "test_device_drive.py", "test_shell.py", "test_torch_compile.py"),
    *("test_process.py", "test_audit_wheel.py", "test_enter_nfsroot.py", "test_pitorch_tvm.py", "test_tvm_ffi.py"),
    *("test_apt.py", "test_torch_prepare.py", "test_wheels.py", "test_ml_packages.py"),
)
_SHARED = frozenset({"built", "exported_config", "workbench"})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject a file that uses the shared build but is missing from _LANES or _ORDER.

    Under pytest-xdist, sort tests by _ORDER.
    """
    for item in items:
        used, name = _SHARED & set(getattr(item, "fixturenames", ())), item.path.name
        allowed = _LANES["tree"] if "exported_config" in used else _ORDER
        if used and name not in allowed:
            raise pytest.UsageError(f"{name} uses {', '.join(sorted(used))}: name it in {Path(__file__).name}")
    if hasattr(config, "workerinput"):
        order = {name: place for place, name in enumerate(_ORDER)}
        items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Under pytest-xdist, let one process collect first, so that the others use its byte code."""
    with contextlib.ExitStack() as collecting:
        if hasattr(session.config, "workerinput"):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                folder = ROOT / SETTINGS["build"]["folder"]
                lock = collecting.enter_context((folder / "collection.lock").open("a"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """Exclude the objects of the collected tests and modules from garbage collections, which would visit them again."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Run each file in one process, and all files of a lane in the same process (``./inv test --lanes``)."""

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).name
            return _LANE_OF.get(name, name)

    return Lanes(config, log)


@pytest.fixture(autouse=True)
def engine_for_marked_tests(request: pytest.FixtureRequest) -> None:
    """Start the engine for tests that are marked with ``engine``, if this user can start it."""
    if request.node.get_closest_marker("engine"):
        request.getfixturevalue("engine_if_root")


@pytest.fixture(scope="session")
def engine_if_root(request: pytest.FixtureRequest) -> None:
    """Start the engine if none is running and this user can start it.

    A module-scoped or session-scoped fixture that connects to the engine must request this fixture, because such
    fixtures are set up before ``engine_for_marked_tests``.
    """
    if os.geteuid() == 0 and shutil.which("dockerd", path=_PATH):
        request.getfixturevalue("engine_runs")


@pytest.fixture(scope="session")
def engine_runs() -> None:
    """Start the engine if none is running."""
    ensure_running(load_config(SETTINGS))


_SESSION = contextlib.ExitStack()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Hold a shared lock while the session runs. A user without write access starts no engine and needs no lock."""
    if not hasattr(session.config, "workerinput"):
        folder = ROOT / SETTINGS["build"]["folder"]
        with contextlib.suppress(PermissionError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = _SESSION.enter_context((folder / "sessions.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_SH)  # blocks while another session stops the engine


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the engine that tests started, unless another session is still running."""
    if not hasattr(session.config, "workerinput"):
        _SESSION.close()
        lock = ROOT / SETTINGS["build"]["folder"] / "sessions.lock"
        others = InUse("other tests of this checkout are running", expected="none", found="a lock", fix="wait for them")
        with contextlib.ExitStack() as alone:
            try:
                alone.enter_context(files.held(lock, others))
            except (OSError, InUse):
                return
            stop_daemon(Daemon.of(load_config(SETTINGS)))


@pytest.fixture(scope="session")
def product_config() -> Config:
    """Return the configuration of the shared build."""
    return load_config(SETTINGS)


@pytest.fixture
def client(built: main_job.Built) -> Iterator[docker.DockerClient]:
    """Connect to the engine, which has the images of the shared build."""
    assert built.manifests
    with contextlib.closing(connect()) as made:
        yield made


@pytest.fixture(scope="session")
def workbench(built: main_job.Built, product_config: Config) -> Mapping[str, Manifest]:
    """Build the development root and the workbench image in the shared build; return all manifests by step."""
    found = made_workbench(product_config)
    assert {"dev", "workbench", *(item.step for item in built.manifests)} <= set(found)
    return found


@pytest.fixture(scope="session")
def built(product_config: Config) -> main_job.Built:
    """Build and check the system image, unless the existing one is up to date.

    The first process builds the image; others wait and reuse it, because a second simultaneous build would be refused.
    A process does not wait for tests that build something else in the shared folder and hold another lock for minutes.
    """
    needs_the_machine()
    ensure_running(product_config)
    with files.locked(product_config.build_root / "image-for-the-tests"):
        with Context(product_config) as context:
            decisions = pipelines.main_job(context).plan()
        found = tuple(item.previous for item in decisions if item.previous is not None and not item.runs)
        if len(found) == len(decisions):
            return main_job.Built(found, frozenset(), 0.0)
        with files.locked(product_config.build_root / "for-the-tests"):
            return main_job.build_image(product_config)


@pytest.fixture
def no_other_build(product_config: Config, built: main_job.Built) -> Iterator[None]:
    """Hold a lock, so that other test processes wait while this test builds in the shared folder."""
    assert built.manifests
    with files.locked(product_config.build_root / "for-the-tests"):
        yield


@pytest.fixture(scope="session")
def exported_config(product_config: Config, built: main_job.Built) -> Config:
    """Export the root filesystem, and return the configuration."""
    from nfsroot.export import export

    assert built.manifest("system").facts["image"]
    export(product_config)
    return product_config


@pytest.fixture
def isolated_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip ignore its configuration on this PC, and retry a failed connection only once."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "1")


@pytest.fixture
def unreachable_index(isolated_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip use only an index that does not respond."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


@pytest.fixture
def apt_without_delays(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make apt retry failed requests immediately, for tests with hosts that do not respond.

    The default delays of apt are 1, 2 and 4 s.
    """
    config = tmp_path_factory.mktemp("apt") / "apt.conf"
    config.write_text('Acquire::Retries::Delay "false";\n')
    monkeypatch.setenv("APT_CONFIG", str(config))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the printed warnings."""
    shown: list[str] = []
    monkeypatch.setattr(progress, "warn", shown.append)
    return shown


@pytest.fixture(scope="session", autouse=True)
def without_the_callers_settings() -> None:
    """Remove the caller's INVOKE_* variables, and use the umask of ./inv instead of the caller's."""
    os.umask(0o022)
    for name in [name for name in os.environ if name.startswith("INVOKE_")]:
        del os.environ[name]
