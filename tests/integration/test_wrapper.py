"""Tests of ./inv itself: the first run, errors, and the overhead of later runs.

Each test has a separate checkout with the real script and package list, and a project of a few lines with its own build
backend, so pip needs no network. The tests do not install anything on this machine: those that would install packages
lack the privileges.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import OWN_BINFMT, in_user_namespace
from waiting import eventually

from toolchain.config import ROOT

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "1"
"""

# A backend for PEP 517 and PEP 660. Its wheel contains the module that the wrapper calls, and the script.
BACKEND = '''\
import os, pathlib, time, zipfile

MODULE = """import os, sys
def main():
    print("called", os.getcwd(), os.environ["PITORCH_CALLER_CWD"], *sys.argv[1:], sep="|")
if __name__ == "__main__":
    main()
"""

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    pathlib.Path("building").touch()
    while os.environ.get("HOLD") and pathlib.Path("hold").exists():
        time.sleep(0.05)
    requires = os.environ.get("TINY_REQUIRES", "")
    info = "tiny-1.dist-info"
    metadata = "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\nProvides-Extra: dev\\n"
    files = {
        "toolchain/cli.py": MODULE,
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: backend\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        f"{info}/entry_points.txt": "[console_scripts]\\ninv = toolchain.cli:main\\n",
    }
    record = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
    name = "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)
    return name
'''


class Checkout:
    """A checkout of the small project."""

    first_run: subprocess.CompletedProcess[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "toolchain").mkdir(parents=True)
        # Other users can read the copies, even if they cannot read the files of this checkout.
        shutil.copyfile(ROOT / "inv", folder / "inv")
        (folder / "inv").chmod(0o755)
        shutil.copyfile(ROOT / "toolchain/hostpackages.txt", self.packages)
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "backend.py").write_text(BACKEND)

    @property
    def packages(self) -> Path:
        """The list of host packages."""
        return self.folder / "toolchain/hostpackages.txt"

    @property
    def stamp(self) -> Path:
        """The path of the file that records that the first run is complete."""
        return self.folder / ".venv/pitorch-stamp"

    def start(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Start ./inv; host packages are skipped by default."""
        settings = {"PITORCH_SKIP_APT": "1", **env}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PITORCH_", "PIP_"))}
        return subprocess.Popen(
            [self.folder / "inv", *words],
            cwd=cwd or self.folder,
            env={**clean, "PIP_NO_INDEX": "1", **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ./inv and wait for it."""
        process = self.start(*words, cwd=cwd, **env)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


@pytest.fixture(scope="module")
def ready() -> Iterator[Checkout]:
    """Make a checkout in a public place and complete its first run. Tests do not change the checkout."""
    with tempfile.TemporaryDirectory(prefix="pitorch-wrapper-") as folder:
        Path(folder).chmod(0o755)
        made = Checkout(Path(folder, "ready checkout"))
        made.first_run = made.run("build-image", "--plan")
        assert made.first_run.returncode == 0, made.first_run.stderr
        yield made


def copy_or_link(source: str, target: str) -> None:
    """Copy a file. A file of pip, which no test changes, becomes a hard link, because pip consists of many files."""
    if "/site-packages/pip/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


@pytest.fixture
def installed(ready: Checkout) -> Iterator[Checkout]:
    """Provide the same checkout, at the same path, for a test that changes it; restore it afterwards."""
    original = ready.folder.with_name("original")
    shutil.copytree(ready.folder, original, symlinks=True, copy_function=copy_or_link)
    yield ready
    shutil.rmtree(ready.folder, ignore_errors=True)
    original.rename(ready.folder)


def test_script_is_posix_sh() -> None:
    assert (ROOT / "inv").read_text().startswith("#!/bin/sh\n")
    assert os.access(ROOT / "inv", os.X_OK)
    subprocess.run(["sh", "-n", ROOT / "inv"], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    ended = subprocess.run(["shellcheck", ROOT / "inv"], capture_output=True, text=True, check=False)
    assert ended.stdout == ""


# ------------------------------------------------------------------------------------------------ first run


def test_first_run_creates_venv_and_runs_the_task(ready: Checkout) -> None:
    assert ready.first_run.stdout == f"called|{ready.folder}|{ready.folder}|build-image|--plan\n"
    assert "create .venv" in ready.first_run.stderr
    assert not (ready.folder / "build/venv.part").exists()
    script = (ready.folder / ".venv/bin/inv").read_text()
    assert "venv.part" not in script


def test_second_run_installs_nothing(ready: Checkout) -> None:
    before = ready.stamp.stat().st_mtime_ns
    ended = ready.run("again")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("|again\n")
    assert ready.stamp.stat().st_mtime_ns == before


def test_runs_from_another_folder_and_through_a_link(ready: Checkout, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    ended = ready.run("x y", "*", cwd=elsewhere)
    assert ended.stdout == f"called|{ready.folder}|{elsewhere}|x y|*\n"
    link = tmp_path / "linked-inv"
    link.symlink_to(ready.folder / "inv")
    through = subprocess.run(
        [link], cwd=elsewhere, env={**os.environ, "PITORCH_SKIP_APT": "1"}, capture_output=True, text=True, check=True
    )
    assert through.stdout == f"called|{ready.folder}|{elsewhere}\n"


def test_exit_code_of_the_task_is_returned(installed: Checkout) -> None:
    (module,) = installed.folder.glob(".venv/lib/python3*/site-packages/toolchain/cli.py")
    module.write_text(module.read_text().replace('sep="|")', 'sep="|")\n    sys.exit(42)'))
    assert installed.run().returncode == 42


def test_overhead_of_a_later_run_is_small(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """The test prints the measurement. The bound is generous, because the machine may be busy."""
    took: dict[str, list[float]] = {"./inv": [], ".venv/bin/inv": []}
    env = {**os.environ, "PITORCH_SKIP_APT": "1", "PITORCH_CALLER_CWD": ""}
    for _ in range(7):
        for name, seconds in took.items():
            began = time.monotonic()
            subprocess.run([ready.folder / name], env=env, stdout=subprocess.DEVNULL, check=True)
            seconds.append(time.monotonic() - began)
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    overhead = medians["./inv"] - medians[".venv/bin/inv"]
    with capsys.disabled():
        print(f" [./inv adds {1000 * overhead:.0f} ms to the {1000 * medians['.venv/bin/inv']:.0f} ms of its program]")
    assert overhead < 0.5


def test_changed_pyproject_is_installed_into_same_venv(installed: Checkout) -> None:
    marker = installed.folder / ".venv/marker"
    marker.touch()
    before = installed.stamp.read_text()
    with (installed.folder / "pyproject.toml").open("a") as stream:
        stream.write("# changed\n")
    ended = installed.run("after")
    assert ended.stdout.endswith("|after\n"), ended.stderr
    assert "install the project" in ended.stderr
    assert marker.exists()
    assert installed.stamp.read_text() != before


def test_set_up_repeats_the_installation(installed: Checkout) -> None:
    ended = installed.run("--set-up", "then")
    assert "install the project" in ended.stderr
    assert ended.stdout.endswith("|then\n")


def test_skipped_packages_are_checked_by_the_next_full_run(installed: Checkout) -> None:
    """The full run checks only the packages, and does not create the environment again."""
    needs_dpkg()
    installed.packages.write_text("dpkg   sometimes   is everywhere\n")  # the first row of this list is invalid
    assert installed.run("first").returncode == 0, "the list must not be read"
    again = installed.run("again")
    assert (again.returncode, again.stderr) == (0, "")
    installed.packages.write_text("pitorch-no-such-package   sometimes   is required by a test\n")
    assert installed.run("third").returncode == 0
    refused = installed.run("fourth", PITORCH_SKIP_APT="")
    assert refused.returncode == 10, refused.stderr
    assert parts_of(refused.stderr)["found"] == "sometimes"
    again = installed.run("fifth")
    assert (again.returncode, again.stderr) == (0, "")
    installed.packages.write_text("dpkg   always   is everywhere\n")
    installed.run("sixth")
    skipped = installed.stamp.read_text()
    ended = installed.run("seventh", PITORCH_SKIP_APT="")
    assert (ended.returncode, ended.stderr) == (0, ""), "no package is missing, so none must be installed"
    assert installed.stamp.read_text().split() == skipped.split()[:2]
    again = installed.run("eighth")
    assert (again.returncode, again.stderr) == (0, "")


def test_read_only_checkout_skips_the_package_check(installed: Checkout) -> None:
    """If root has set up a checkout in a public place, every user can use it, even if packages are missing."""
    needs_dpkg()
    if os.geteuid() != 0:
        pytest.skip("only root can create a checkout of another user")
    installed.packages.write_text("pitorch-no-such-package   sometimes   is required by a test\n")
    assert installed.run("first").returncode == 0
    ended = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", installed.folder / "inv", "task"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("|task\n")


def test_moved_checkout_gets_a_new_environment(installed: Checkout, tmp_path: Path) -> None:
    moved = Checkout.__new__(Checkout)
    moved.folder = installed.folder.rename(tmp_path / "moved")
    ended = moved.run("here")
    assert ended.stdout == f"called|{moved.folder}|{moved.folder}|here\n", ended.stderr


def test_completion_installs_nothing(checkout: Checkout) -> None:
    ended = checkout.run("--complete", "--", "./inv", "bu")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not (checkout.folder / "build").exists()


# ---------------------------------------------------------------------------------- interrupted and parallel runs


def held(checkout: Checkout, **env: str) -> subprocess.Popen[str]:
    """Start a run that waits while pip is running, and return its process."""
    (checkout.folder / "hold").touch()
    process = checkout.start("held", cwd=None, HOLD="1", **env)
    eventually((checkout.folder / "building").exists, "pip did not start the build", limit_s=120, task=process)
    return process


def kill(process: subprocess.Popen[str], sign: signal.Signals) -> None:
    os.killpg(process.pid, sign)
    process.communicate(timeout=60)
    assert process.returncode != 0


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=lambda sign: sign.name)
def test_interrupted_first_run_leaves_no_environment(checkout: Checkout, sign: signal.Signals) -> None:
    """Only the lock file and the logs, which the next run uses again, are left."""
    kill(held(checkout), sign)
    assert not (checkout.folder / ".venv").exists(), "an incomplete environment would be used"
    assert {path.name for path in (checkout.folder / "build").iterdir()} == {"inv.lock", "pip.log", "venv.log"}


def test_interrupted_update_is_repeated_by_the_next(installed: Checkout) -> None:
    with (installed.folder / "pyproject.toml").open("a") as stream:
        stream.write("# changed\n")
    (installed.folder / "building").unlink()
    kill(held(installed), signal.SIGKILL)
    assert not installed.stamp.exists()
    (installed.folder / "hold").unlink()
    ended = installed.run("next")
    assert "create .venv" in ended.stderr
    assert ended.stdout.endswith("|next\n")


def test_killed_first_run_is_repeated_by_only_one_of_the_next(checkout: Checkout) -> None:
    """The second of the next runs waits for the first."""
    kill(held(checkout), signal.SIGKILL)
    assert not (checkout.folder / ".venv").exists(), "an incomplete environment would be used"
    (checkout.folder / "building").unlink()
    first = held(checkout)
    second = checkout.start("second")
    assert second.stderr is not None
    printed = ""
    while "waiting for another ./inv" not in printed:
        line = second.stderr.readline()
        assert line, f"it did not wait: {printed}"
        printed += line
    (checkout.folder / "hold").unlink()
    (first_out, first_err), (second_out, second_err) = first.communicate(timeout=120), second.communicate(timeout=120)
    assert first_out.endswith("|held\n"), first_err
    assert second_out.endswith("|second\n"), second_err
    assert "create .venv" not in printed + second_err


# ------------------------------------------------------------------------------------------------ errors


def parts_of(error: str) -> dict[str, str]:
    return dict(re.findall(r"^ {2}(expected|found|fix): +(.*)$", error, re.MULTILINE))


def folder_of_programs(folder: Path, *, without: tuple[str, ...]) -> Path:
    """Make a folder of links to this machine's programs, except those in ``without``."""
    folder.mkdir()
    for place in ("/usr/bin", "/usr/sbin"):
        for program in Path(place).iterdir():
            if program.name not in without and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return folder


def test_system_without_apt_gets_a_list_of_packages(checkout: Checkout, tmp_path: Path) -> None:
    if Path("/usr/sbin/apt-get").exists():
        pytest.skip("apt-get is in /usr/sbin, where the script searches too")
    programs = folder_of_programs(tmp_path / "bin", without=("apt-get", "dpkg-query"))
    ended = checkout.run("task", PATH=str(programs), PITORCH_SKIP_APT="")
    assert ended.returncode == 13
    assert "PITORCH_SKIP_APT=1" in parts_of(ended.stderr)["fix"]
    for name in ("mmdebstrap", "qemu-user-static", "docker.io", "gcc-arm-linux-gnueabihf"):
        assert re.search(rf"^    {re.escape(name)} +\w", ended.stderr, re.MULTILINE), name
    assert not (checkout.folder / ".venv").exists()


@contextlib.contextmanager
def as_nobody(checkout: Checkout) -> Iterator[dict[str, str]]:
    """Make an ordinary user the owner of the checkout, and make it accessible to that user."""
    if os.geteuid() != 0:
        yield {}
        return
    user = pwd.getpwnam("nobody")
    for path in [checkout.folder, *checkout.folder.rglob("*")]:
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
    for parent in checkout.folder.parents:
        if parent != Path("/") and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    yield {"id": str(user.pw_uid)}


@pytest.fixture
def public_checkout() -> Iterator[Checkout]:
    folder = Path(tempfile.mkdtemp(prefix="pitorch-wrapper-"))
    yield Checkout(folder / "checkout")
    shutil.rmtree(folder)


def run_unprivileged(checkout: Checkout, path: str, packages: str) -> subprocess.CompletedProcess[str]:
    checkout.packages.write_text(packages)
    with as_nobody(checkout) as user:
        drop = ["setpriv", "--reuid", user["id"], "--regid", user["id"], "--clear-groups"] if user else []
        return subprocess.run(
            [*drop, checkout.folder / "inv", "task"],
            cwd=checkout.folder,
            env={"PATH": path, "HOME": str(checkout.folder), "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
        )


NOT_INSTALLED = "pitorch-no-such-package   always   is required by a test\n"


def needs_dpkg() -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg is not installed")


@pytest.fixture(scope="module")
def without_sudo() -> Iterator[str]:
    """Make a folder of links to this machine's programs, except sudo, in a place that an ordinary user can access."""
    needs_dpkg()
    with tempfile.TemporaryDirectory(prefix="pitorch-wrapper-") as folder:
        Path(folder).chmod(0o755)
        yield str(folder_of_programs(Path(folder, "bin"), without=("sudo",)))


@pytest.fixture(scope="module")
def hello_can_be_installed() -> None:
    """Skip the test unless the package hello is in the archive, but not installed on this machine."""
    needs_dpkg()
    asked = subprocess.run(["apt-cache", "policy", "hello"], capture_output=True, text=True, check=False).stdout
    if not re.search(r"Installed: \(none\)\n +Candidate: [^(]", asked):
        pytest.skip("needs apt's lists, and the package hello not to be installed")


@pytest.mark.usefixtures("hello_can_be_installed")
def test_missing_privileges_are_reported_with_the_reason(public_checkout: Checkout, without_sudo: str) -> None:
    ended = run_unprivileged(public_checkout, without_sudo, "hello   always   is required by a test\n")
    assert ended.returncode == 10, ended.stderr
    assert re.search(r"hello +is required by a test", ended.stderr)
    assert "root privileges are required to install these host packages" in ended.stderr
    assert "install sudo" in parts_of(ended.stderr)["fix"]


@pytest.mark.usefixtures("hello_can_be_installed")
def test_output_of_apt_is_parsed_in_any_language(public_checkout: Checkout, without_sudo: str) -> None:
    """If translated output were not parsed, packages in the archive would be reported as missing."""
    programs = public_checkout.folder.parent / "bin"
    programs.mkdir()
    translating = programs / "apt-cache"
    translating.write_text(
        '#!/bin/sh\n[ "${LC_ALL-}" = C ] && exec /usr/bin/apt-cache "$@"\n'
        "/usr/bin/apt-cache \"$@\" | sed 's/Candidate:/Installationskandidat:/; s/Installed:/Installiert:/'\n"
    )
    translating.chmod(0o755)
    ended = run_unprivileged(public_checkout, f"{programs}:{without_sudo}", "hello   always   is required by a test\n")
    assert "root privileges are required to install these host packages" in ended.stderr


def test_missing_privileges_for_the_lists_are_reported(public_checkout: Checkout, without_sudo: str) -> None:
    ended = run_unprivileged(public_checkout, without_sudo, NOT_INSTALLED)
    assert ended.returncode == 10, ended.stderr
    assert "root privileges are required to fetch the package lists" in ended.stderr


def test_checkout_of_another_user_is_reported(public_checkout: Checkout) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can create a checkout of another user")
    public_checkout.folder.parent.chmod(0o755)
    ended = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", public_checkout.folder / "inv", "task"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 10
    assert parts_of(ended.stderr)["found"].startswith("owner root, mode drwx")
    assert "chown" in parts_of(ended.stderr)["fix"]


def test_installed_packages_need_no_privileges(public_checkout: Checkout) -> None:
    needs_dpkg()
    ended = run_unprivileged(public_checkout, os.environ["PATH"], "dpkg   always   is everywhere\n")
    assert "root privileges" not in ended.stderr
    assert ended.stdout.endswith("|task\n"), ended.stderr


def run_without_lists(checkout: Checkout, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run ./inv as on a machine without package lists; this machine's lists do not change."""
    needs_dpkg()
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("hiding apt's lists needs root and unshare")
    lists = "/var/lib/apt/lists"
    script = f'mount -t tmpfs tmpfs {lists} && mkdir {lists}/partial && exec "$0" task'
    return subprocess.run(
        ["unshare", "--mount", *flags, "sh", "-ec", script, checkout.folder / "inv"],
        env={key: value for key, value in os.environ.items() if not key.startswith("PITORCH_")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_package_missing_in_the_archive_is_reported(checkout: Checkout) -> None:
    checkout.packages.write_text(NOT_INSTALLED)
    ended = run_without_lists(checkout)
    assert "==> apt-get update" in ended.stderr
    if ended.returncode == 20:
        pytest.skip("the apt mirrors are unreachable: " + parts_of(ended.stderr)["found"])
    assert ended.returncode == 13, ended.stderr
    assert "packages not in the archive: pitorch-no-such-package" in ended.stderr
    assert "component" in parts_of(ended.stderr)["fix"]


@pytest.mark.usefixtures("apt_without_delays")
@pytest.mark.network_namespaces
def test_unreachable_mirrors_are_reported(checkout: Checkout) -> None:
    checkout.packages.write_text(NOT_INSTALLED)
    ended = run_without_lists(checkout, "--net")
    assert ended.returncode == 20, ended.stderr
    assert "the package lists cannot be fetched" in ended.stderr
    assert re.match(r"(E|W|Err):", parts_of(ended.stderr)["found"])
    assert "http_proxy" in parts_of(ended.stderr)["fix"]


@pytest.mark.network_namespaces
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_apt_uses_all_proxy(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    """In an empty network namespace, apt reports that the proxy is unreachable, not that the mirrors are."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("all_proxy", proxy)
    checkout.packages.write_text(NOT_INSTALLED)
    ended = run_without_lists(checkout, "--net")
    assert ended.returncode == 20, ended.stderr
    assert "127.0.0.1:9" in ended.stderr
    assert "Unsupported proxy" not in ended.stderr


def test_services_of_packages_are_not_started(checkout: Checkout, tmp_path: Path) -> None:
    """A real package, which apt installs into overlays over this machine, calls policy-rc.d as invoke-rc.d would."""
    needs_dpkg()
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("overlays over /usr, /etc and /var need root and unshare")
    package = tmp_path / "package"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN/control").write_text(
        "Package: pitorch-test\nVersion: 1\nArchitecture: all\nMaintainer: T <t@example.org>\nDescription: asks\n"
    )
    postinst = package / "DEBIAN/postinst"
    postinst.write_text(
        "#!/bin/sh\nfor service in nfs-ganesha docker.service ssh; do\n"
        "    /usr/sbin/policy-rc.d $service start && code=$? || code=$?\n"
        '    echo "asked: $service $code"\ndone\n'
    )
    postinst.chmod(0o755)
    subprocess.run(["dpkg-deb", "--build", package, tmp_path / "test.deb"], check=True, capture_output=True)
    with tempfile.TemporaryDirectory(prefix="pitorch-overlay-", dir="/dev/shm") as shm:
        script = "\n".join(
            [
                f"mount -t tmpfs tmpfs {shm}",
                f"cp {tmp_path}/test.deb {shm}/",
                f"mkdir -p {shm}/checkout/build && cp -R toolchain inv {shm}/checkout/",
                *(
                    f"cd {shm} && mkdir {name} {name}.work && "
                    f"mount -t overlay overlay -o lowerdir=/{name},upperdir={name},workdir={name}.work /{name}"
                    for name in ("usr", "etc", "var")
                ),
                "rm -f /usr/sbin/policy-rc.d",
                f"{shm}/checkout/inv --install-as-root {shm}/test.deb",
                "dpkg-query -W pitorch-test",
                "test ! -e /usr/sbin/policy-rc.d",
            ]
        )
        ended = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script],
            cwd=checkout.folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if "overlay" in ended.stderr and "mount:" in ended.stderr:
        pytest.skip("an overlay over /usr cannot be mounted here: " + ended.stderr.strip().splitlines()[-1])
    assert ended.returncode == 0, ended.stderr
    assert "prevents these services from starting: docker" in ended.stderr
    assert re.findall(r"^asked: (.*)$", ended.stderr, re.MULTILINE) == [
        "nfs-ganesha 101",
        "docker.service 101",
        "ssh 0",
    ]
    assert subprocess.run(["dpkg-query", "-W", "pitorch-test"], capture_output=True, check=False).returncode != 0


def test_invalid_line_of_the_list_is_reported(checkout: Checkout) -> None:
    needs_dpkg()
    checkout.packages.write_text("pitorch-no-such-package   sometimes   is required by a test\n")
    ended = checkout.run("task", PITORCH_SKIP_APT="")
    assert ended.returncode == 10
    assert parts_of(ended.stderr)["found"] == "sometimes"


def test_old_python_is_reported(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 9, 2)\nimport platform\n"
        'platform.python_version = lambda: "3.9.2"\nexec(sys.argv[2])\n'
    )
    old.chmod(0o755)
    ended = checkout.run("task", PITORCH_PYTHON=str(old))
    assert ended.returncode == 13
    assert parts_of(ended.stderr)["found"] == f"3.9.2 at {old}"
    assert "3.11" in parts_of(ended.stderr)["expected"]


def test_missing_python_is_reported(checkout: Checkout) -> None:
    ended = checkout.run("task", PITORCH_PYTHON="/nowhere/python3")
    assert ended.returncode == 13
    assert parts_of(ended.stderr)["found"] == "no Python at /nowhere/python3"


def test_unreachable_package_index_is_reported(checkout: Checkout) -> None:
    ended = checkout.run(
        "task",
        TINY_REQUIRES="pitorch-no-such-package",
        PIP_NO_INDEX="0",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert ended.returncode == 20, ended.stderr
    assert "PyPI is unreachable" in ended.stderr
    assert "https_proxy" in parts_of(ended.stderr)["fix"]
    assert not (checkout.folder / ".venv").exists()
    assert not (checkout.folder / "build/venv.part").exists()


def test_unknown_requirement_is_reported(installed: Checkout) -> None:
    ended = installed.run("--set-up", TINY_REQUIRES="pitorch-no-such-package", PIP_CONFIG_FILE=os.devnull)
    assert ended.returncode == 14, ended.stderr
    assert "pitorch-no-such-package" in ended.stderr
    assert not installed.stamp.exists(), "the next run must repeat the installation"


# ------------------------------------------------------------------------------------------------ binfmt


@pytest.mark.emulation
@pytest.mark.parametrize("state", ["absent", "without F", "unmounted"])
def test_missing_emulator_is_registered(ready: Checkout, qemu_conf: Path, state: str) -> None:
    register = f"sed -e 's|:[A-Z]*$|:P|' {qemu_conf} >/proc/sys/fs/binfmt_misc/register"
    before = {
        "absent": OWN_BINFMT,
        "without F": f"{OWN_BINFMT}\n{register}",
        # The mount point is an empty folder, as in a plain container.
        "unmounted": "mount -t proc proc /proc 2>/dev/null || mount -t tmpfs tmpfs /proc/sys/fs/binfmt_misc",
    }[state]
    script = f'{before}\n"$0" task && cd /proc/sys/fs/binfmt_misc && cat qemu-arm qemu-aarch64'
    ended = in_user_namespace(script, ready.folder / "inv", PITORCH_SKIP_APT="1")
    assert ended.returncode == 0, ended.stderr
    assert "register the emulator" in ended.stderr
    flags = re.findall(r"^flags: (\w+)$", ended.stdout, re.MULTILINE)
    assert len(flags) == 2, "emulators for 32-bit and 64-bit ARM must be registered"
    assert all("F" in item for item in flags)
    assert "|task\n" in ended.stdout


def test_task_runs_if_registration_fails(ready: Checkout, qemu_conf: Path) -> None:
    before = "mount -t tmpfs -o ro tmpfs /proc/sys/fs/binfmt_misc"
    script = (
        f'{before}\n{{ umount /sys/kernel/debug; }} 2>/dev/null || true\nexec setpriv --bounding-set -all "$0" task'
    )
    ended = in_user_namespace(script, ready.folder / "inv", PITORCH_SKIP_APT="1")
    assert ended.returncode == 0, ended.stderr
    assert "WARNING some ARM programs cannot be executed on this machine" in ended.stderr
    assert ended.stdout.endswith("|task\n")


# ------------------------------------------------------------------------------------------------ the list


def rows() -> list[tuple[str, str, str]]:
    lines = [line.split(None, 2) for line in (ROOT / "toolchain/hostpackages.txt").read_text().splitlines()]
    return [(line[0], line[1], line[2]) for line in lines if line and not line[0].startswith("#")]


def test_every_package_has_a_condition_and_a_reason() -> None:
    names = [name for name, _, _ in rows()]
    assert len(names) == len(set(names))
    for name, when, why in rows():
        assert re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name)
        assert when in ("always", "no-engine", "no-docker-cli", "static-qemu", "split-qemu")
        assert len(why) > 5


def test_every_package_is_in_the_archive_of_this_machine() -> None:
    if shutil.which("apt-cache") is None:
        pytest.skip("apt is not installed")
    required = [name for name, when, _ in rows() if when == "always"]
    listed = subprocess.run(["apt-cache", "policy", *required], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: [^(]", listed, re.MULTILINE))
    if not found:
        pytest.skip("apt has no package lists: apt-get update")
    assert set(required) - found == set()


@pytest.mark.usefixtures("apt_without_delays")
@pytest.mark.parametrize("listens", [True, False], ids=["an engine listens", "a stale socket"])
def test_engine_package_is_needed_if_no_engine_listens(installed: Checkout, listens: bool) -> None:
    """On a machine without dockerd, a stale socket does not count as an engine."""
    needs_dpkg()
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("another /var/run/docker.sock needs root and unshare")
    installed.packages.write_text("pitorch-no-such-package   no-engine   is required by a test\n")
    serve = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind('/run/docker.sock'); s.listen(); "
        "print(flush=True); time.sleep(600)"
    )
    script = "\n".join(
        [
            "mount -t tmpfs tmpfs /run && mkdir /run/lock",
            "mount --bind /dev/null /usr/sbin/dockerd || [ ! -e /usr/sbin/dockerd ]",
            f'exec 3<<END\n$({sys.executable} -c "$2" >/run/up 2>&1 & echo $!)\nEND',
            "read -r server <&3",
            "until [ -s /run/up ]; do sleep 0.05; done",
            "" if listens else "kill $server; while kill -0 $server 2>/dev/null; do sleep 0.05; done",
            '"$1" task && code=0 || code=$?',
            "kill $server 2>/dev/null || true",
            "exit $code",
        ]
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PITORCH_") and key != "DOCKER_HOST"}
    ended = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-ec", script, "sh", installed.folder / "inv", serve],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if listens:
        assert ended.returncode == 0, ended.stderr
        assert "apt-get" not in ended.stderr
    else:
        assert ended.returncode == 20, ended.stderr
        assert "==> apt-get update" in ended.stderr


def test_tasks_use_utf_8_in_every_locale(ready: Checkout, tmp_path: Path) -> None:
    (tmp_path / "toolchain").mkdir()
    (tmp_path / "toolchain" / "__init__.py").touch()
    (tmp_path / "toolchain" / "cli.py").write_text("import sys\nprint('→', open(__file__).encoding, *sys.argv[1:])\n")
    process = ready.start("tâche", PYTHONPATH=str(tmp_path), LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.casefold(), err) == (0, "→ utf-8 tâche\n", "")


def test_passwords_reach_only_the_task(installed: Checkout, tmp_path: Path) -> None:
    """The test records the environment of the programs that ./inv starts, including those of an installation."""
    with (installed.folder / "pyproject.toml").open("a") as stream:
        stream.write("# changed\n")
    programs, seen = tmp_path / "programs", tmp_path / "seen"
    programs.mkdir()
    seen.mkdir()
    for name in ("id", "uname", "cat", "readlink", "sha256sum", "cut", "mkdir", "flock", "dpkg-query"):
        real = shutil.which(name)
        assert real is not None
        (programs / name).write_text(f'#!/bin/sh\n/bin/cat /proc/self/environ >{seen}/{name}.$$\nexec {real} "$@"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "toolchain").mkdir()
    (tmp_path / "toolchain" / "__init__.py").touch()
    names = ("PITORCH_REGISTRY_PASSWORD", "PITORCH_SIGNING_PASSWORD")
    module = f"import os\nprint(*(os.environ.get(name, 'none') for name in {names}), sep='|')\n"
    (tmp_path / "toolchain" / "cli.py").write_text(module)
    path, tasks = f"{programs}:{os.environ['PATH']}", str(tmp_path)
    for passwords in (("a secret 'with' $signs", "a secret"), ("", "")):
        given = dict(zip(names, passwords, strict=True))
        ended = installed.run("task", cwd=None, PATH=path, PYTHONPATH=tasks, **given)
        shown = "|".join(password or "none" for password in passwords)
        assert (ended.returncode, ended.stdout) == (0, f"{shown}\n"), ended.stderr
    environments = [file.read_bytes() for file in seen.iterdir()]
    assert len(environments) > 5
    assert any(seen.glob("flock.*")), "the project was not installed"
    assert not any(word.encode() in text for text in environments for word in (*names, "a secret"))
