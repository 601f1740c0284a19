"""./inv itself: its first run, its faults, and what it costs when there is nothing to do.

Each test has a checkout of its own: the real script and list, and a project of a few lines that builds itself, so
that pip needs no network. Nothing is installed on this machine: where packages would be, the rights are missing.
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

# PEP 517 and PEP 660: a wheel with the module that the wrapper calls, and a script of the same.
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
    """A checkout of the tiny project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "toolchain").mkdir(parents=True)
        shutil.copy(ROOT / "inv", folder / "inv")
        shutil.copy(ROOT / "toolchain/hostpackages.txt", self.packages)
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "backend.py").write_text(BACKEND)

    @property
    def packages(self) -> Path:
        """The list of host packages."""
        return self.folder / "toolchain/hostpackages.txt"

    @property
    def stamp(self) -> Path:
        """What tells that nothing is to be done."""
        return self.folder / ".venv/pitorch-stamp"

    def start(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Start ./inv, with the host packages left alone unless told otherwise."""
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
        """Run ./inv to its end."""
        process = self.start(*words, cwd=cwd, **env)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose first run is over. Tests leave it as it is."""
    made = Checkout(tmp_path_factory.mktemp("ready") / "ready checkout")
    ended = made.run("first")
    assert ended.returncode == 0, ended.stderr
    return made


def test_it_is_posix_sh() -> None:
    assert (ROOT / "inv").read_text().startswith("#!/bin/sh\n")
    assert os.access(ROOT / "inv", os.X_OK)
    subprocess.run(["sh", "-n", ROOT / "inv"], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    ended = subprocess.run(["shellcheck", ROOT / "inv"], capture_output=True, text=True, check=False)
    assert ended.stdout == ""


# ------------------------------------------------------------------------------------------------ first run


def test_the_first_run_makes_the_environment_and_runs_the_task(checkout: Checkout) -> None:
    ended = checkout.run("build-image", "--plan")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"called|{checkout.folder}|{checkout.folder}|build-image|--plan\n"
    assert "make .venv" in ended.stderr
    assert not (checkout.folder / "build/venv.part").exists()
    script = (checkout.folder / ".venv/bin/inv").read_text()
    assert "venv.part" not in script


def test_the_next_run_does_nothing_of_that(ready: Checkout) -> None:
    before = ready.stamp.stat().st_mtime_ns
    ended = ready.run("again")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("|again\n")
    assert ready.stamp.stat().st_mtime_ns == before


def test_it_works_from_another_folder_and_through_a_link(ready: Checkout, tmp_path: Path) -> None:
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


def test_the_tasks_exit_code_is_handed_on(checkout: Checkout) -> None:
    backend = checkout.folder / "backend.py"
    backend.write_text(backend.read_text().replace('sep="|")', 'sep="|")\n    sys.exit(42)'))
    assert checkout.run().returncode == 42


def test_nothing_to_do_costs_little(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """A measurement, printed; the machine may be busy, so the bound is the issue's own, not a tight one."""
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


def test_a_changed_pyproject_is_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.run()
    kept = checkout.folder / ".venv/kept"
    kept.touch()
    before = checkout.stamp.read_text()
    with (checkout.folder / "pyproject.toml").open("a") as stream:
        stream.write("# changed\n")
    ended = checkout.run("after")
    assert ended.stdout.endswith("|after\n"), ended.stderr
    assert "install the project" in ended.stderr
    assert kept.exists()
    assert checkout.stamp.read_text() != before


def test_set_up_does_it_again(checkout: Checkout) -> None:
    checkout.run()
    ended = checkout.run("--set-up", "then")
    assert "install the project" in ended.stderr
    assert ended.stdout.endswith("|then\n")


def test_packages_that_were_someone_elses_care_are_looked_after_when_that_is_said_no_more(checkout: Checkout) -> None:
    """By the packages' list alone: the environment is there."""
    needs_dpkg()
    checkout.packages.write_text("dpkg   sometimes   is everywhere\n")  # a list of which the first row is refused
    assert checkout.run("first").returncode == 0, "the list is not looked at"
    again = checkout.run("again")
    assert (again.returncode, again.stderr) == (0, "")
    checkout.packages.write_text("pitorch-no-such-package   sometimes   is asked for by a test\n")
    assert checkout.run("third").returncode == 0
    refused = checkout.run("fourth", PITORCH_SKIP_APT="")
    assert refused.returncode == 10, refused.stderr
    assert parts_of(refused.stderr)["found"] == "sometimes"
    again = checkout.run("fifth")
    assert (again.returncode, again.stderr) == (0, "")
    checkout.packages.write_text("dpkg   always   is everywhere\n")
    checkout.run("sixth")
    skipped = checkout.stamp.read_text()
    ended = checkout.run("seventh", PITORCH_SKIP_APT="")
    assert (ended.returncode, ended.stderr) == (0, ""), "nothing is missing, and pip has nothing to do"
    assert checkout.stamp.read_text().split() == skipped.split()[:2]
    again = checkout.run("eighth")
    assert (again.returncode, again.stderr) == (0, "")


def test_who_may_not_write_there_is_not_asked_to_look_after_packages(public_checkout: Checkout) -> None:
    """What root set up in a place for everybody, packages apart, is used by everybody."""
    needs_dpkg()
    if os.geteuid() != 0:
        pytest.skip("only root can make a checkout that belongs to someone else")
    public_checkout.packages.write_text("pitorch-no-such-package   sometimes   is asked for by a test\n")
    assert public_checkout.run("first").returncode == 0
    public_checkout.folder.parent.chmod(0o755)
    ended = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", public_checkout.folder / "inv", "task"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("|task\n")


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    moved = Checkout.__new__(Checkout)
    moved.folder = checkout.folder.rename(tmp_path / "moved")
    ended = moved.run("here")
    assert ended.stdout == f"called|{moved.folder}|{moved.folder}|here\n", ended.stderr


def test_completion_starts_no_installation(checkout: Checkout) -> None:
    ended = checkout.run("--complete", "--", "./inv", "bu")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not (checkout.folder / "build").exists()


# ------------------------------------------------------------------------------------------ cut short, at once


def held(checkout: Checkout, **env: str) -> subprocess.Popen[str]:
    """A first run that waits in the middle of pip."""
    (checkout.folder / "hold").touch()
    process = checkout.start("held", cwd=None, HOLD="1", **env)
    deadline = time.monotonic() + 120
    while not (checkout.folder / "building").exists():
        assert time.monotonic() < deadline, "pip never got there"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sign: sign.name)
def test_an_interrupted_first_run_is_fixed_by_the_next(checkout: Checkout, sign: signal.Signals) -> None:
    process = held(checkout)
    os.killpg(process.pid, sign)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not (checkout.folder / ".venv").exists(), "half an environment would be taken for a whole one"
    if sign != signal.SIGKILL:
        assert not (checkout.folder / "build/venv.part").exists()
    (checkout.folder / "hold").unlink()
    ended = checkout.run("next")
    assert ended.stdout.endswith("|next\n"), ended.stderr


def test_an_interrupted_change_is_fixed_by_the_next(checkout: Checkout) -> None:
    checkout.run()
    with (checkout.folder / "pyproject.toml").open("a") as stream:
        stream.write("# changed\n")
    (checkout.folder / "building").unlink()
    process = held(checkout)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not checkout.stamp.exists()
    (checkout.folder / "hold").unlink()
    ended = checkout.run("next")
    assert "make .venv" in ended.stderr
    assert ended.stdout.endswith("|next\n")


def test_two_first_runs_at_once(checkout: Checkout) -> None:
    first = held(checkout)
    second = checkout.start("second")
    assert second.stderr is not None
    said = ""
    while "waiting for it" not in said:
        line = second.stderr.readline()
        assert line, f"it did not wait: {said}"
        said += line
    (checkout.folder / "hold").unlink()
    (first_out, first_err), (second_out, second_err) = first.communicate(timeout=120), second.communicate(timeout=120)
    assert first_out.endswith("|held\n"), first_err
    assert second_out.endswith("|second\n"), second_err
    assert "make .venv" not in said + second_err


# ------------------------------------------------------------------------------------------------ faults


def parts_of(error: str) -> dict[str, str]:
    return dict(re.findall(r"^ {2}(expected|found|fix): +(.*)$", error, re.MULTILINE))


def folder_of_programs(folder: Path, *, without: tuple[str, ...]) -> Path:
    """This machine's programs, save some."""
    folder.mkdir()
    for place in ("/usr/bin", "/usr/sbin"):
        for program in Path(place).iterdir():
            if program.name not in without and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return folder


def test_a_system_without_apt_is_told_what_to_install(checkout: Checkout, tmp_path: Path) -> None:
    if Path("/usr/sbin/apt-get").exists():
        pytest.skip("apt-get is in /usr/sbin, which the script looks into too")
    programs = folder_of_programs(tmp_path / "bin", without=("apt-get", "dpkg-query"))
    ended = checkout.run("task", PATH=str(programs), PITORCH_SKIP_APT="")
    assert ended.returncode == 13
    said = parts_of(ended.stderr)
    assert "PITORCH_SKIP_APT=1" in said["fix"]
    for name in ("mmdebstrap", "qemu-user-static", "docker.io", "gcc-arm-linux-gnueabihf"):
        assert re.search(rf"^    {re.escape(name)} +\w", ended.stderr, re.MULTILINE), name
    assert not (checkout.folder / ".venv").exists()


@contextlib.contextmanager
def as_nobody(checkout: Checkout) -> Iterator[dict[str, str]]:
    """The checkout belongs to an ordinary user, and may be reached by one."""
    if os.geteuid() != 0:
        yield {}
        return
    user = pwd.getpwnam("nobody")
    for path in [checkout.folder, *checkout.folder.rglob("*")]:
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
    for parent in checkout.folder.parents:
        if parent != Path("/") and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    yield {"drop": str(user.pw_uid)}


@pytest.fixture
def public_checkout() -> Iterator[Checkout]:
    folder = Path(tempfile.mkdtemp(prefix="pitorch-wrapper-"))
    yield Checkout(folder / "checkout")
    shutil.rmtree(folder)


def run_unprivileged(checkout: Checkout, path: str, packages: str) -> subprocess.CompletedProcess[str]:
    checkout.packages.write_text(packages)
    with as_nobody(checkout) as who:
        drop = ["setpriv", "--reuid", who["drop"], "--regid", who["drop"], "--clear-groups"] if who else []
        return subprocess.run(
            [*drop, checkout.folder / "inv", "task"],
            cwd=checkout.folder,
            env={"PATH": path, "HOME": str(checkout.folder), "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
        )


NOT_INSTALLED = "pitorch-no-such-package   always   is asked for by a test\n"


def needs_dpkg() -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg is not installed")


def folder_for_everyone(folder: Path, *, without: tuple[str, ...]) -> Path:
    """``folder_of_programs``, where an ordinary user can reach it."""
    programs = folder_of_programs(folder / "bin", without=without)
    folder.chmod(0o755)
    return programs


def test_without_root_and_sudo_it_says_what_for(public_checkout: Checkout) -> None:
    """A package that the archive has and this machine has not; without rights it stays so."""
    needs_dpkg()
    asked = subprocess.run(["apt-cache", "policy", "hello"], capture_output=True, text=True, check=False).stdout
    if not re.search(r"Installed: \(none\)\n +Candidate: [^(]", asked):
        pytest.skip("needs apt's lists, and the package hello not to be installed")
    programs = folder_for_everyone(public_checkout.folder.parent, without=("sudo",))
    ended = run_unprivileged(public_checkout, str(programs), "hello   always   is asked for by a test\n")
    assert ended.returncode == 10, ended.stderr
    assert re.search(r"hello +is asked for by a test", ended.stderr)
    assert "root's rights are needed to install these host packages" in ended.stderr
    assert "install sudo" in parts_of(ended.stderr)["fix"]


def test_apts_words_are_understood_where_users_have_another_language(public_checkout: Checkout) -> None:
    """What the archive has was thought absent, and the first run ended there."""
    needs_dpkg()
    programs = folder_for_everyone(public_checkout.folder.parent, without=("sudo", "apt-cache"))
    translating = programs / "apt-cache"
    translating.write_text(
        '#!/bin/sh\n[ "${LC_ALL-}" = C ] && exec /usr/bin/apt-cache "$@"\n'
        "/usr/bin/apt-cache \"$@\" | sed 's/Candidate:/Installationskandidat:/; s/Installed:/Installiert:/'\n"
    )
    translating.chmod(0o755)
    asked = subprocess.run(["apt-cache", "policy", "hello"], capture_output=True, text=True, check=False).stdout
    if not re.search(r"Installed: \(none\)\n +Candidate: [^(]", asked):
        pytest.skip("needs apt's lists, and the package hello not to be installed")
    ended = run_unprivileged(public_checkout, str(programs), "hello   always   is asked for by a test\n")
    assert "root's rights are needed to install these host packages" in ended.stderr


def test_without_rights_for_the_lists_it_says_so_too(public_checkout: Checkout) -> None:
    needs_dpkg()
    programs = folder_for_everyone(public_checkout.folder.parent, without=("sudo",))
    ended = run_unprivileged(public_checkout, str(programs), NOT_INSTALLED)
    assert ended.returncode == 10, ended.stderr
    assert "root's rights are needed to fetch the package lists" in ended.stderr


def test_a_checkout_of_someone_else_is_told(public_checkout: Checkout) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a checkout that belongs to someone else")
    public_checkout.folder.parent.chmod(0o755)
    ended = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", public_checkout.folder / "inv", "task"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 10
    assert parts_of(ended.stderr)["found"].startswith("it belongs to root, mode drwx")
    assert "chown" in parts_of(ended.stderr)["fix"]


def test_packages_that_are_there_need_no_rights(public_checkout: Checkout) -> None:
    needs_dpkg()
    ended = run_unprivileged(public_checkout, os.environ["PATH"], "dpkg   always   is everywhere\n")
    assert "root's rights" not in ended.stderr
    assert ended.stdout.endswith("|task\n"), ended.stderr


def run_without_lists(checkout: Checkout, *flags: str) -> subprocess.CompletedProcess[str]:
    """As on a machine on which nobody has called apt-get update yet; this one's lists are not touched."""
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


def test_a_package_that_the_archive_does_not_have(checkout: Checkout) -> None:
    checkout.packages.write_text(NOT_INSTALLED)
    ended = run_without_lists(checkout)
    assert "==> apt-get update" in ended.stderr
    if ended.returncode == 20:
        pytest.skip("the apt mirrors do not answer: " + parts_of(ended.stderr)["found"])
    assert ended.returncode == 13, ended.stderr
    assert "the archive does not have: pitorch-no-such-package" in ended.stderr
    assert "component" in parts_of(ended.stderr)["fix"]


@pytest.mark.network_namespaces
def test_without_a_network_the_lists_cannot_be_fetched(checkout: Checkout) -> None:
    checkout.packages.write_text(NOT_INSTALLED)
    ended = run_without_lists(checkout, "--net")
    assert ended.returncode == 20, ended.stderr
    assert "the package lists cannot be fetched" in ended.stderr
    assert re.match(r"(E|W|Err):", parts_of(ended.stderr)["found"])
    assert "http_proxy" in parts_of(ended.stderr)["fix"]


@pytest.mark.network_namespaces
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_apt_goes_through_the_proxy_for_all(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    """In a network with nothing in it apt complains of the proxy, not of its mirrors."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("all_proxy", proxy)
    checkout.packages.write_text(NOT_INSTALLED)
    ended = run_without_lists(checkout, "--net")
    assert ended.returncode == 20, ended.stderr
    assert "127.0.0.1:9" in ended.stderr
    assert "Unsupported proxy" not in ended.stderr


def test_services_are_kept_from_starting_and_that_is_undone(checkout: Checkout, tmp_path: Path) -> None:
    """A real package asks policy-rc.d, as invoke-rc.d does, while apt installs it: into overlays over this machine."""
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
    assert "keeps these services from starting: docker" in ended.stderr
    assert re.findall(r"^asked: (.*)$", ended.stderr, re.MULTILINE) == [
        "nfs-ganesha 101",
        "docker.service 101",
        "ssh 0",
    ]
    assert subprocess.run(["dpkg-query", "-W", "pitorch-test"], capture_output=True, check=False).returncode != 0


def test_a_line_that_cannot_be_read_is_told(checkout: Checkout) -> None:
    needs_dpkg()
    checkout.packages.write_text("pitorch-no-such-package   sometimes   is asked for by a test\n")
    ended = checkout.run("task", PITORCH_SKIP_APT="")
    assert ended.returncode == 10
    assert parts_of(ended.stderr)["found"] == "sometimes"


def test_a_python_that_is_too_old(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "python-of-another-time"
    old.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 9, 2)\nimport platform\n"
        'platform.python_version = lambda: "3.9.2"\nexec(sys.argv[2])\n'
    )
    old.chmod(0o755)
    ended = checkout.run("task", PITORCH_PYTHON=str(old))
    assert ended.returncode == 13
    assert parts_of(ended.stderr)["found"] == f"3.9.2 at {old}"
    assert "3.11" in parts_of(ended.stderr)["expected"]


def test_no_python_at_all(checkout: Checkout) -> None:
    ended = checkout.run("task", PITORCH_PYTHON="/nowhere/python3")
    assert ended.returncode == 13
    assert parts_of(ended.stderr)["found"] == "no Python at /nowhere/python3"


def test_a_package_index_that_does_not_answer(checkout: Checkout) -> None:
    ended = checkout.run(
        "task",
        TINY_REQUIRES="pitorch-no-such-package",
        PIP_NO_INDEX="0",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert ended.returncode == 20, ended.stderr
    assert "PyPI does not answer" in ended.stderr
    assert "https_proxy" in parts_of(ended.stderr)["fix"]
    assert not (checkout.folder / ".venv").exists()
    assert checkout.run("later").stdout.endswith("|later\n")


def test_a_requirement_that_does_not_exist(checkout: Checkout) -> None:
    ended = checkout.run("task", TINY_REQUIRES="pitorch-no-such-package", PIP_CONFIG_FILE=os.devnull)
    assert ended.returncode == 14, ended.stderr
    assert "pitorch-no-such-package" in ended.stderr


# ------------------------------------------------------------------------------------------------ binfmt


def in_user_namespace(checkout: Checkout, before: str) -> subprocess.CompletedProcess[str]:
    script = f'{before}\n"$0" task && cd /proc/sys/fs/binfmt_misc && cat qemu-arm qemu-aarch64'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, checkout.folder / "inv"],
        env={**os.environ, "PITORCH_SKIP_APT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def own_binfmt() -> str:
    """A user namespace has a binfmt_misc of its own, and nothing is registered in it (Linux 6.7 and newer)."""
    mount = "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc"
    script = f"{mount} && ls /proc/sys/fs/binfmt_misc"
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        check=False,
        capture_output=True,
        text=True,
    )
    if ended.returncode or "qemu-arm" in ended.stdout or not Path("/usr/lib/binfmt.d/qemu-arm.conf").is_file():
        pytest.skip("needs Linux 6.7, user namespaces, and qemu-user-static (or qemu-user-binfmt)")
    return mount


@pytest.mark.emulation
@pytest.mark.parametrize("state", ["absent", "without F", "unmounted"])
def test_the_emulator_is_registered_where_it_is_not(ready: Checkout, own_binfmt: str, state: str) -> None:
    register = "sed -e 's|:[A-Z]*$|:P|' /usr/lib/binfmt.d/qemu-arm.conf >/proc/sys/fs/binfmt_misc/register"
    before = {
        "absent": own_binfmt,
        "without F": f"{own_binfmt}\n{register}",
        # An empty folder in its place, as in a container that nobody prepared.
        "unmounted": "mount -t proc proc /proc 2>/dev/null || mount -t tmpfs tmpfs /proc/sys/fs/binfmt_misc",
    }[state]
    ended = in_user_namespace(ready, before)
    assert ended.returncode == 0, ended.stderr
    assert "register the emulator" in ended.stderr
    flags = re.findall(r"^flags: (\w+)$", ended.stdout, re.MULTILINE)
    assert len(flags) == 2, "32-bit and 64-bit"
    assert all("F" in item for item in flags)
    assert "|task\n" in ended.stdout


def test_the_task_runs_even_where_it_cannot_be_registered(ready: Checkout, own_binfmt: str) -> None:
    before = "mount -t tmpfs -o ro tmpfs /proc/sys/fs/binfmt_misc"
    script = (
        f'{before}\n{{ umount /sys/kernel/debug; }} 2>/dev/null || true\nexec setpriv --bounding-set -all "$0" task'
    )
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, ready.folder / "inv"],
        env={**os.environ, "PITORCH_SKIP_APT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "WARNING ARM programs cannot all be executed here yet" in ended.stderr
    assert ended.stdout.endswith("|task\n")


# ------------------------------------------------------------------------------------------------ the list


def rows() -> list[tuple[str, str, str]]:
    lines = [line.split(None, 2) for line in (ROOT / "toolchain/hostpackages.txt").read_text().splitlines()]
    return [(line[0], line[1], line[2]) for line in lines if line and not line[0].startswith("#")]


def test_every_package_says_when_and_why() -> None:
    names = [name for name, _, _ in rows()]
    assert len(names) == len(set(names))
    for name, when, why in rows():
        assert re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name)
        assert when in ("always", "no-engine", "no-docker-cli", "static-qemu", "split-qemu")
        assert len(why) > 5


def test_every_package_is_in_this_machines_archive() -> None:
    if shutil.which("apt-cache") is None:
        pytest.skip("apt is not installed")
    wanted = [name for name, when, _ in rows() if when == "always"]
    listed = subprocess.run(["apt-cache", "policy", *wanted], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: [^(]", listed, re.MULTILINE))
    if not found:
        pytest.skip("apt has no package lists: apt-get update")
    assert set(wanted) - found == set()


@pytest.mark.parametrize("listens", [True, False], ids=["an engine listens", "a socket is left"])
def test_an_engine_is_known_by_its_answer(checkout: Checkout, listens: bool) -> None:
    """Without dockerd on this machine, the package is wanted only where nobody answers at the socket."""
    needs_dpkg()
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("another /var/run/docker.sock needs root and unshare")
    checkout.packages.write_text("pitorch-no-such-package   no-engine   is asked for by a test\n")
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
        ["unshare", "--mount", "--net", "sh", "-ec", script, "sh", checkout.folder / "inv", serve],
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


def test_tasks_read_and_write_utf_8_whatever_the_locale_is(ready: Checkout, tmp_path: Path) -> None:
    (tmp_path / "toolchain").mkdir()
    (tmp_path / "toolchain" / "__init__.py").touch()
    (tmp_path / "toolchain" / "cli.py").write_text("import sys\nprint('→', open(__file__).encoding, *sys.argv[1:])\n")
    process = ready.start("tâche", PYTHONPATH=str(tmp_path), LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.casefold(), err) == (0, "→ utf-8 tâche\n", "")


def test_the_registry_password_reaches_the_task_alone(checkout: Checkout, tmp_path: Path) -> None:
    """Every program that ./inv starts on its way is watched, the set-up's too."""
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
    module = "import os\nprint(os.environ.get('PITORCH_REGISTRY_PASSWORD', 'none'))\n"
    (tmp_path / "toolchain" / "cli.py").write_text(module)
    path, tasks = f"{programs}:{os.environ['PATH']}", str(tmp_path)
    for password in ("a secret 'with' $signs", ""):
        ended = checkout.run("task", PATH=path, PYTHONPATH=tasks, PITORCH_REGISTRY_PASSWORD=password)
        assert (ended.returncode, ended.stdout) == (0, f"{password or 'none'}\n"), ended.stderr
    environments = [file.read_bytes() for file in seen.iterdir()]
    assert len(environments) > 5
    assert not any(b"PITORCH_REGISTRY_PASSWORD" in text or b"a secret" in text for text in environments)
