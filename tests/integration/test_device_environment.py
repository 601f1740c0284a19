"""Tests of a board's labgrid environment, board addresses, host keys, and login errors."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from exports import HOST_KEY, exported_in
from labgrid import Environment
from labgrid.driver import ExecutionError
from labgrid.strategy import StrategyError

from device import labgrid_environment, suite
from device.labgrid_environment import RemoteBoard
from device.remote import loader_session, targets
from device.remote.address import parse
from device.strategy import BoardStrategy, Status, cause_of
from device.suite_result import Paths
from nfsroot import access
from nfsroot.layout import Layout
from toolchain.config import Config
from toolchain.errors import AccessDenied, ArtefactMissing, BoardSilent, RootNeeded, UserError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return exported_in(tmp_path)


def environment(config: Config, **how: Any) -> Any:
    paths = Paths(folder=config.target_root / "report")
    labgrid_environment.prepare(config, paths, **{"host": None, "chroot": False, "timing": False, **how})
    return Environment(str(paths.environment))


def test_virtual_board_has_server_machine_and_pinned_ssh(config: Config) -> None:
    made = environment(config)
    assert made.config.data["options"]["private_network"] is True
    strategy = made.get_target("main").get_driver("Strategy", activate=False)
    assert isinstance(strategy, BoardStrategy)
    assert strategy.status is Status.off
    assert strategy.server.tree.folder == str(Layout.of(config).tree)
    assert strategy.board.init == "lean"
    pinned = Path(strategy.ssh.access.known_hosts)
    assert pinned.read_text() == f"{access.ALIAS} {HOST_KEY}\n"
    assert strategy.ssh.access.key == Layout.of(config).client_key


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: exports belong to root")
def test_tree_is_entered_from_itself_without_a_bare_system(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = replace(config, image=replace(config.image, name="pitorch-nowhere"))
    made = environment(nowhere, chroot=True)
    strategy = made.get_target("main").get_driver("Strategy", activate=False)
    assert strategy.server.second_folder == ""
    assert strategy.ssh.access.key == Layout.of(config).client_key
    assert made.config.data["options"]["chroot"] == "served"
    assert "image pitorch-nowhere/rootfs:trixie-armhf not found" in " ".join(capsys.readouterr().err.split())


def test_real_board_is_not_booted(config: Config) -> None:
    strategy = (
        environment(config, host="pi@192.168.77.50:2222").get_target("main").get_driver("Strategy", activate=False)
    )
    assert strategy.board is None
    assert strategy.server is None
    assert str(strategy.ssh.access) == "pi@192.168.77.50:2222"
    assert strategy.ssh.access.known_hosts is not None
    strategy.transition("booted")
    assert strategy.status is Status.booted, "states without a driver need no action"
    strategy.abandon()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become an ordinary user")
def test_ordinary_user_cannot_use_the_key_of_the_export() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = exported_in(Path(folder))
        Layout.of(made).client_key.chmod(0o600)
        for place in (Path(folder), made.build_root):
            place.mkdir(exist_ok=True)
            place.chmod(0o777)
        local = targets.load("local")
        os.seteuid(65534)
        try:
            with pytest.raises(RootNeeded, match="read the login key") as caught:
                environment(made, host="root@127.0.0.1:1")
            assert caught.value.fix == "sudo ./inv test-on-pi --host=root@127.0.0.1:1"
            with pytest.raises(RootNeeded, match="read the login key"):
                loader_session._access(made, local, parse("tree://root@127.0.0.1:1"))
        finally:
            os.seteuid(0)


@pytest.mark.parametrize(("boots", "limit_s"), [(True, 1200.0), (False, labgrid_environment.LOGIN_LIMIT_S)])
def test_board_that_boots_may_use_the_whole_boot_timeout(config: Config, boots: bool, limit_s: float) -> None:
    slow = replace(config, device=replace(config.device, boot_timeout_s=1200.0))
    place = RemoteBoard(name="pi3", coordinator="127.0.0.1:1", resources=(), boots=boots)
    paths = Paths(folder=config.target_root / "report")
    labgrid_environment.prepare(slow, paths, host=None, chroot=False, timing=False, place=place)
    written = yaml.safe_load(paths.environment.read_text())
    assert written["targets"]["main"]["drivers"]["PinnedSSHDriver"]["connection_timeout"] == limit_s


def test_host_key_of_a_new_board_is_accepted_at_login(config: Config) -> None:
    """A board with nfs.overlay stores its host key at its first boot, after the environment was written."""
    ssh = environment(config, host="root@127.0.0.1:1").get_target("main").get_driver("PinnedSSHDriver", activate=False)
    keys = Layout.of(config).boards / "00000001/host-keys"
    keys.mkdir(parents=True)
    (keys / "ssh_host_ed25519_key.pub").write_text("ssh-ed25519 AAAAC3Nz root@pi\n")
    ssh.ssh_prefix = []
    with pytest.raises(ExecutionError):
        ssh._start_own_master_once(10)
    assert Path(ssh.known_hosts).read_text() == f"{access.ALIAS} {HOST_KEY}\n{access.ALIAS} ssh-ed25519 AAAAC3Nz\n"


@pytest.mark.parametrize("name", ["100%zip", "o'brien", 'a"b', "a\\\\b"])
def test_ssh_does_not_interpret_characters_in_paths(tmp_path: Path, name: str) -> None:
    made = environment(exported_in(tmp_path / name), host="root@127.0.0.1:1")
    ssh = made.get_target("main").get_driver("PinnedSSHDriver", activate=False)
    ssh.connection_timeout = 0.0
    with pytest.raises(BoardSilent) as caught:
        ssh.on_activate()
    assert caught.value.found == "ssh: connect to host 127.0.0.1 port 1: Connection refused"


def test_board_with_its_own_system_uses_the_users_known_hosts(config: Config) -> None:
    made = environment(config, host="pi@127.0.0.1", chroot=True)
    strategy = made.get_target("main").get_driver("Strategy", activate=False)
    assert strategy.ssh.access.known_hosts is None
    assert strategy.ssh.access.key is None
    assert strategy.server.port == config.nfs.port
    assert "127.0.0.1" in strategy.server.allowed.split()
    assert made.config.data["options"]["chroot"] == "served"
    assert made.config.data["options"]["chroot_address"] == "127.0.0.1"


def test_missing_export_error_names_the_task(config: Config) -> None:
    Layout.of(config).manifest.unlink()
    with pytest.raises(ArtefactMissing, match="export-nfsroot"):
        suite.test_on_pi(config)


def test_export_without_host_key_is_refused(config: Config) -> None:
    Layout.of(config).known_hosts.write_text("")
    with pytest.raises(ArtefactMissing, match="host key"):
        suite.test_on_pi(config)


def test_board_and_virtual_machine_exclude_each_other(config: Config) -> None:
    with pytest.raises(UserError, match="are mutually exclusive"):
        suite.test_on_pi(config, host="pi", qemu=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become an ordinary user")
@pytest.mark.parametrize(
    ("how", "fix"),
    [
        ({}, "sudo ./inv test-on-pi"),
        ({"chroot": True}, "sudo ./inv test-on-pi --chroot"),
        ({"host": "pi@127.0.0.1", "chroot": True}, "sudo ./inv test-on-pi --host=pi@127.0.0.1 --chroot"),
    ],
)
def test_fix_for_an_ordinary_user_is_sudo(how: dict[str, Any], fix: str) -> None:
    """Serving the tree requires root, so the fix is a command with sudo."""
    with tempfile.TemporaryDirectory() as folder:
        config = exported_in(Path(folder))
        for path in (Path(folder), *Path(folder).rglob("*")):
            os.chown(path, 65534, 65534)
        os.seteuid(65534)
        try:
            with pytest.raises(RootNeeded) as caught:
                environment(config, **how)
        finally:
            os.seteuid(0)
    assert caught.value.fix == fix


def test_unknown_init_is_refused(config: Config) -> None:
    with pytest.raises(UserError, match="busybox"):
        suite.test_on_pi(config, init="busybox")


@pytest.mark.parametrize(
    ("keyword", "found"),
    [
        ("and", "got and"),
        ("ops or", "got end of input"),
        ("(ops", "expected right parenthesis"),
        ("a b", "got identifier"),
    ],
)
def test_invalid_selection_is_refused_before_the_run(config: Config, keyword: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        suite.test_on_pi(config, keyword=keyword)
    assert repr(keyword) in caught.value.summary
    assert "at column" in caught.value.found
    assert found in caught.value.found
    assert "--select=" in caught.value.fix
    assert not (config.target_root / "report").exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("pi", ("root", "pi", 22)),
        ("pi@raspberry.local", ("pi", "raspberry.local", 22)),
        ("root@192.168.77.50:2222", ("root", "192.168.77.50", 2222)),
        ("[fe80::1]:2222", ("root", "fe80::1", 2222)),
    ],
)
def test_board_address_has_user_host_and_port(text: str, parts: tuple[str, str, int]) -> None:
    assert access.parse_host(text) == parts


@pytest.mark.parametrize("text", ["root@pi", "pi@pi:2222", "root@[fe80::1]", "root@[fe80::1]:2222"])
def test_messages_contain_the_address_as_it_was_given(text: str) -> None:
    user, host, port = access.parse_host(text)
    assert str(access.SshAccess(user=user, host=host, port=port)) == text


@pytest.mark.parametrize(
    "text", ["", "@pi", "pi:0", "pi:70000", f"pi:{'9' * 5000}", "pi:ssh", "a b", "-oProxyCommand=x", "pi@-oX"]
)
def test_invalid_board_address_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a valid board address") as caught:
        access.parse_host(text)
    assert "--host" not in caught.value.fix, "the address may come from lab.boards or --device"


def test_changed_host_key_is_an_untrusted_board() -> None:
    pinned = access.SshAccess(host="pi", known_hosts=Path("k"), key=Path("id"))
    own = access.SshAccess(host="pi", user="pi")
    changed = "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed."
    assert isinstance(access.diagnose(pinned, changed), AccessDenied)
    unknown = access.diagnose(own, "No ED25519 host key is known for pi and you have requested strict checking.")
    assert isinstance(unknown, AccessDenied)
    assert "ssh pi@pi" in unknown.fix
    denied = access.diagnose(pinned, "root@pi: Permission denied (publickey).")
    assert isinstance(denied, AccessDenied)
    assert "Permission denied" in denied.found
    assert access.diagnose(pinned, "ssh: connect to host pi port 22: Connection refused") is None


@pytest.mark.parametrize(
    ("user", "port", "before", "after"),
    [("", 22, "", "pi@pi"), ("", 2222, "", "-p 2222 pi@pi"), ("alice", 2222, "sudo ", "-p 2222 pi@pi")],
)
def test_ssh_commands_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, user: str, port: int, before: str, after: str
) -> None:
    """Under sudo, ssh uses the keys and known_hosts of root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", user)
    own = access.SshAccess(host="pi", user="pi", port=port)
    unknown = access.diagnose(own, "No ED25519 host key is known for pi and you have requested strict checking.")
    denied = access.diagnose(own, "pi@pi: Permission denied (publickey).")
    assert unknown is not None
    assert unknown.fix.startswith(f"run {before}ssh {after}, and accept")
    assert denied is not None
    assert denied.fix == f"run {before}ssh-copy-id {after}"


def test_ssh_options_pin_the_key_and_disable_prompts() -> None:
    words = access.SshAccess(host="pi", known_hosts=Path("/o'brien/known"), key=Path("/50% k")).options()
    assert "StrictHostKeyChecking=yes" in words
    assert 'UserKnownHostsFile="/o\'brien/known"' in words
    assert 'IdentityFile="/50%% k"' in words
    words = access.SshAccess(host="pi", key=Path(r'/a"b\c\\d')).options()
    found = subprocess.run(["ssh", "-G", *words, "pi"], check=True, capture_output=True, text=True).stdout
    assert r'identityfile /a"b\c\\d' in found.splitlines()
    assert "BatchMode=yes" in words
    assert "UserKnownHostsFile" not in " ".join(access.SshAccess(host="pi").options())


def test_a_path_with_a_variable_for_ssh_is_reported() -> None:
    with pytest.raises(UserError, match="ssh cannot use the files") as caught:
        access.SshAccess(host="pi", key=Path("/${HOME}/key")).options()
    assert caught.value.found == "/${HOME}/key"


def test_cause_of_a_broken_strategy_is_the_user_error() -> None:
    fixed = UserError("the first fault")
    outer = StrategyError("broken")
    outer.__cause__ = fixed
    fixed.__cause__ = OSError("its cause")
    assert cause_of(outer) is fixed
