"""Tests of internet sharing, in network namespaces with real packets: board - gateway (this PC) - outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from toolchain.config import ROOT

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (package iproute2)"),
    pytest.mark.skipif(shutil.which("nft", path="/usr/sbin:/usr/bin") is None, reason="needs nft (package nftables)"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]

SUBNET = "192.168.77.0/24"

CALL = """
import json, sys
from pathlib import Path
from nfsroot import share_internet
from toolchain.config import load_config
from toolchain.errors import UserError
action, state, subnet = sys.argv[1:]
try:
    made = getattr(share_internet, action)(load_config({"nfs": {"subnet": subnet}}), state=Path(state))
    print(json.dumps({**made.__dict__, "lines": made.lines()}))
except UserError as fault:
    print(json.dumps({"error": type(fault).__name__, "text": str(fault)}))
"""


@dataclass
class Net:
    """Three connected network namespaces."""

    pi: str
    gateway: str
    outside: str
    state: Path

    def run(self, where: str, *words: str, check: bool = True) -> str:
        """Run a command in a namespace and return its standard output."""
        done = subprocess.run(["ip", "netns", "exec", where, *words], capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise AssertionError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def share(self, action: str, subnet: str = SUBNET, *, before: str = "") -> dict[str, Any]:
        """Run an action ("on", "off" or "status") in the gateway's namespace, after the script ``before``, if any."""
        script = [sys.executable, "-c", CALL, action, str(self.state), subnet]
        script = ["unshare", "--mount", "sh", "-euc", before + '\nexec "$@"', "sh", *script] if before else script
        done = subprocess.run(["ip", "netns", "exec", self.gateway, *script], cwd=ROOT, capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def fetch(self) -> str:
        """Return the outside server's response to the board; empty if there is none."""
        # Only the kernels are involved in connecting, which is fast. The program that then responds may be slow.
        limits = ("--connect-timeout", "3", "-m", "60")
        return self.run(self.pi, "curl", "-s", *limits, "http://203.0.113.2:8080/hello", check=False)

    def ruleset(self) -> str:
        """Return all nftables rules in the gateway's namespace."""
        return self.run(self.gateway, "nft", "list", "ruleset")

    def forward(self) -> str:
        """Return the value of ip_forward in the gateway's namespace."""
        return self.run(self.gateway, "cat", "/proc/sys/net/ipv4/ip_forward").strip()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    tag = f"{os.getpid()}"
    made = Net(f"pi{tag}", f"gw{tag}", f"out{tag}", tmp_path / "run" / "state.json")
    names = (made.pi, made.gateway, made.outside)
    server = None
    stack = contextlib.ExitStack()
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        for left, right, ends in (
            (made.pi, made.gateway, ("192.168.77.50/24", "192.168.77.1/24")),
            (made.gateway, made.outside, ("203.0.113.1/24", "203.0.113.2/24")),
        ):
            devices = (f"to{right[:2]}", f"to{left[:2]}")
            subprocess.run(
                ["ip", "link", "add", devices[0], "netns", left, "type", "veth",
                 "peer", "name", devices[1], "netns", right],
                check=True,
            )  # fmt: skip
            for where, device, address in zip((left, right), devices, ends, strict=True):
                subprocess.run(["ip", "-n", where, "addr", "add", address, "dev", device], check=True)
                subprocess.run(["ip", "-n", where, "link", "set", device, "up"], check=True)
        made.run(made.pi, "ip", "route", "add", "default", "via", "192.168.77.1")
        made.run(made.gateway, "ip", "route", "add", "default", "via", "203.0.113.2")
        made.run(made.gateway, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")
        log = stack.enter_context((tmp_path / "server.log").open("w"))
        (tmp_path / "www").mkdir()
        (tmp_path / "www" / "hello").write_text("hello, board")
        server = subprocess.Popen(
            ["ip", "netns", "exec", made.outside, sys.executable, "-m", "http.server", "8080", "--bind", "203.0.113.2"],
            cwd=tmp_path / "www", stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
        url = "http://203.0.113.2:8080/hello"
        eventually(lambda: made.run(made.gateway, "curl", "-s", "-m", "1", url, check=False))
        yield made
    finally:
        if server is not None:
            server.kill()
            server.wait()
        stack.close()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def test_boards_reach_the_outside_only_while_on(net: Net, tmp_path: Path) -> None:
    assert net.fetch() == ""
    made = net.share("on")
    assert made["on"]
    assert made["uplink"] == "toou"
    assert made["gateway"] == "192.168.77.1"
    assert made["problems"] == []
    assert "    ip route replace default via 192.168.77.1" in made["lines"]
    assert net.fetch() == "hello, board"
    assert net.share("status")["packets"] >= 1
    # External hosts receive packets from the gateway's address, not the board's.
    assert "203.0.113.1 - -" in (tmp_path / "server.log").read_text()
    assert "192.168.77" not in (tmp_path / "server.log").read_text()
    made = net.share("off")
    assert not made["on"]
    assert net.fetch() == ""


def test_off_removes_everything(net: Net) -> None:
    before = (net.ruleset(), net.forward())
    net.share("on")
    assert net.forward() == "1"
    net.share("off")
    assert (net.ruleset(), net.forward()) == before
    assert not net.state.exists()
    assert net.share("off")["problems"] == []


@pytest.mark.parametrize("earlier", ["0", "1"])
def test_off_restores_ip_forward_after_repeated_on(net: Net, earlier: str) -> None:
    net.run(net.gateway, "sh", "-c", f"echo {earlier} > /proc/sys/net/ipv4/ip_forward")
    net.share("on")
    rules = net.ruleset()
    net.share("on")
    assert net.ruleset() == rules
    net.share("off")
    assert net.forward() == earlier


def test_off_leaves_ip_forward_on_for_the_docker_engine(net: Net) -> None:
    """An engine that starts while sharing is on finds ip_forward already set, and relies on it."""
    net.share("on")
    net.run(net.gateway, "ip", "link", "add", "docker0", "type", "bridge")
    net.share("off")
    assert net.forward() == "1"


def test_a_drop_policy_is_opened_and_restored(net: Net) -> None:
    # Like the Docker engine's rules: a forward chain with rules and policy drop.
    net.run(net.gateway, "nft", "add table ip filter")
    net.run(net.gateway, "nft", "add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }")
    net.run(net.gateway, "nft", 'add rule ip filter FORWARD iifname "docker0" accept comment "theirs"')
    before = net.ruleset()
    made = net.share("on")
    assert made["opened"] == ["ip filter FORWARD"]
    assert net.fetch() == "hello, board"
    # The outside cannot open a connection to the board.
    net.run(net.outside, "ip", "route", "add", "192.168.77.0/24", "via", "203.0.113.1")
    back = net.run(net.outside, "curl", "-s", "-m", "2", "-w", "%{exitcode}", "http://192.168.77.50:22/", check=False)
    assert back.endswith("28"), "expected a timeout: the packets are dropped, not refused"
    net.share("off")
    assert net.ruleset() == before


# Like firewalld's rules: a final reject in the default zone's chain.
FIREWALLD = """
table inet firewalld {
  chain filter_FORWARD {
    type filter hook forward priority filter + 10; policy accept;
    ct state { established, related } accept
    ct state invalid drop
    jump filter_FORWARD_ZONES
    REJECT
  }
  chain filter_FORWARD_ZONES {
    iifname "docker0" goto filter_FWD_trusted
    GOTO
  }
  chain filter_FWD_trusted { accept; }
  chain filter_FWD_public { counter log prefix "refused" reject with icmpx type admin-prohibited; }
}
"""


@pytest.mark.parametrize(
    ("refusal", "zone"),
    [("reject with icmpx type admin-prohibited", ""), ("counter drop", ""), ("", "goto filter_FWD_public")],
    ids=["reject", "drop", "goto"],
)
def test_a_chain_with_a_final_reject_is_reported(net: Net, refusal: str, zone: str) -> None:
    table = FIREWALLD.replace("REJECT", refusal).replace("GOTO", zone)
    subprocess.run(["ip", "netns", "exec", net.gateway, "nft", "-f", "-"], input=table, text=True, check=True)
    made = net.share("on")
    assert net.fetch() == ""
    (problem,) = made["problems"]
    assert "the chain inet firewalld filter_FORWARD rejects" in problem
    assert f"accept {SUBNET}" in problem
    assert made["opened"] == [], "another program's chain must not change"
    net.run(net.gateway, "nft", f"insert rule inet firewalld filter_FORWARD_ZONES ip saddr {SUBNET} accept")
    assert net.fetch() == "hello, board"


def test_a_chain_that_rejects_some_packets_is_accepted(net: Net) -> None:
    table = FIREWALLD.replace("REJECT", "").replace("GOTO", "")
    subprocess.run(["ip", "netns", "exec", net.gateway, "nft", "-f", "-"], input=table, text=True, check=True)
    assert net.share("on")["problems"] == []
    assert net.fetch() == "hello, board"


def test_a_flushed_table_is_reported_and_restored(net: Net) -> None:
    net.share("on")
    net.run(net.gateway, "nft", "flush", "ruleset")
    found = net.share("status")
    assert not found["on"]
    assert any("is missing" in problem for problem in found["problems"])
    assert net.share("on")["on"]
    assert net.fetch() == "hello, board"
    net.share("off")
    assert net.forward() == "0"


def test_another_subnet_replaces_the_first(net: Net) -> None:
    net.share("on", "192.168.99.0/24")
    found = net.share("on")
    assert "192.168.99" not in net.ruleset()
    assert found["subnet"] == SUBNET
    net.share("off")
    assert net.forward() == "0"


def test_no_uplink_is_an_error_and_changes_nothing(net: Net) -> None:
    net.run(net.gateway, "ip", "route", "del", "default")
    before = net.ruleset()
    made = net.share("on")
    assert made["error"] == "UserError"
    assert "a default route" in made["text"]
    assert net.ruleset() == before
    assert net.forward() == "0"
    assert not net.state.exists()


READ_ONLY = """
place=/proc/sys/net/ipv4/ip_forward
mount --bind "$place" "$place"
mount -o remount,bind,ro "$place"
"""


@pytest.mark.parametrize("again", [False, True])
def test_a_read_only_ip_forward_changes_nothing(net: Net, again: bool) -> None:
    """The gateway resembles a container with a read-only /proc/sys."""
    net.run(net.gateway, "nft", "add table ip filter")
    net.run(net.gateway, "nft", "add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }")
    before = net.ruleset()
    if again:
        net.share("on")
        net.run(net.gateway, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")
    made = net.share("on", before=READ_ONLY)
    assert made["error"] == "UserError"
    assert "net.ipv4.ip_forward cannot be set to 1" in made["text"]
    assert "Read-only file system" in made["text"]
    assert net.ruleset() == before
    assert not net.state.exists()
    assert net.share("on")["on"], "sharing must succeed when /proc/sys is writable"


def test_a_failed_revert_is_reported_and_retried(net: Net) -> None:
    before = net.ruleset()
    net.share("on")
    made = net.share("off", before=READ_ONLY)
    assert "net.ipv4.ip_forward cannot be set to 0" in made["text"]
    assert net.state.exists(), "the state file must keep the previous value"
    net.share("off")
    assert (net.ruleset(), net.forward(), net.state.exists()) == (before, "0", False)


def test_rules_are_added_to_all_chains_or_none(net: Net) -> None:
    """A process owns the table of the second chain, so other processes cannot change the chain."""
    net.run(net.gateway, "nft", "add table ip filter")
    net.run(net.gateway, "nft", "add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }")
    with subprocess.Popen(
        ["ip", "netns", "exec", net.gateway, "nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as owner:
        try:
            assert owner.stdin is not None
            owner.stdin.write("add table ip owned { flags owner; }\n")
            owner.stdin.write("add chain ip owned forward { type filter hook forward priority 0; policy drop; }\n")
            owner.stdin.flush()
            eventually(
                lambda: "hook forward" in net.ruleset().partition("table ip owned")[2],
                "the test requires nft 0.9.9, in which a process can own a table",
            )
            before = net.ruleset()
            made = net.share("on")
            assert made["error"] == "UserError"
            assert "not permitted" in made["text"]
            assert net.ruleset() == before
            assert net.forward() == "0"
            assert not net.state.exists()
        finally:
            owner.kill()


def test_rules_without_a_state_file_are_removed(net: Net) -> None:
    net.run(net.gateway, "nft", "add table ip filter")
    net.run(net.gateway, "nft", "add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }")
    before = net.ruleset()
    net.share("on", "192.168.99.0/24")
    net.state.write_text("{")
    assert net.share("on")["on"]
    assert "192.168.99" not in net.ruleset()
    assert net.fetch() == "hello, board"
    net.state.write_text("{")
    net.share("off")
    assert net.ruleset() == before
    assert not net.state.exists()


def test_the_uplinks_subnet_is_refused(net: Net) -> None:
    made = net.share("on", "203.0.113.0/24")
    assert made["error"] == "UserError"
    assert "no address translation" in made["text"]


def test_a_missing_gateway_address_is_reported(net: Net) -> None:
    made = net.share("on", "10.99.0.0/24")
    assert made["on"]
    assert any("ip address add 10.99.0.1/24" in problem for problem in made["problems"])
    net.share("off", "10.99.0.0/24")
