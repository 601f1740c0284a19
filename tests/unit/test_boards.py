"""Tests of the state of boards that boot over the network, derived from dnsmasq's log."""

from __future__ import annotations

import ipaddress
import socket
import time

import pytest

from nfsroot.boards import STALLED_S, Board, Boards
from nfsroot.netboot import clients_of

SUBNET = ipaddress.IPv4Network("192.168.77.0/24")
MAC = "b8:27:eb:12:34:56"
FIRMWARE = "dnsmasq-dhcp[7]: 653460281 vendor class: PXEClient:Arch:00000:UNDI:002001"
ASKS = f"dnsmasq-dhcp[7]: 653460281 DHCPDISCOVER(eth1) {MAC}"
OFFERED = f"dnsmasq-dhcp[7]: 653460281 DHCPOFFER(eth1) 192.168.77.50 {MAC}"
HAS_ADDRESS = f"dnsmasq-dhcp[7]: 653460281 DHCPACK(eth1) 192.168.77.50 {MAC} pi"
OF_PROXY = f"dnsmasq-dhcp[7]: 653460281 PXE(eth1) {MAC} proxy"


def sent(name: str) -> str:
    return f"dnsmasq-tftp[7]: sent /tmp/pitorch-netboot.x/tftp/{name} to 192.168.77.50"


def absent(name: str) -> str:
    return f"dnsmasq-tftp[7]: file /tmp/pitorch-netboot.x/tftp/{name} not found for 192.168.77.50"


def recorded(*lines: str, mac: str = "") -> Boards:
    boards = Boards(lambda _address: mac, SUBNET)
    for second, line in enumerate(lines):
        boards.record(line, float(second))
    return boards


def the_only(boards: Boards) -> Board:
    (board,) = boards
    return board


def test_boot_proceeds_from_address_to_mounted_root() -> None:
    boards = recorded(ASKS, OFFERED, HAS_ADDRESS)
    board = the_only(boards)
    assert (board.mac, board.address, board.state) == (MAC, "192.168.77.50", "address")
    for name in ("config.txt", "bcm2710-rpi-3-b-plus.dtb", "vmlinuz"):
        assert boards.record(sent(name), 5.0) is board
    assert (board.state, board.file, board.model) == ("files", "vmlinuz", "3-b-plus")
    assert boards.mounted({"192.168.77.51": 0.0}, 6.0) == []
    assert boards.mounted({"192.168.77.50": 0.0}, 6.0) == [board]
    assert boards.mounted({"192.168.77.50": 0.0}, 7.0) == [], "a mount must be reported only once"
    boards.record(ASKS, 8.0)
    assert board.state == "mounted", "the initramfs requests an address again, which must not change the state"


def test_optional_folder_of_a_board_has_its_serial_number() -> None:
    board = the_only(recorded(HAS_ADDRESS, absent("0a1b2c3d/start.elf"), absent("recovery.elf"), sent("start.elf")))
    assert board.serial == "0a1b2c3d"
    assert board.absent == set()
    assert board.advice(0) == ""


@pytest.mark.parametrize(("folder", "serial"), [("9ffefdef", "9ffefdef"), ("dc-a6-32-01-36-c2", "")])
def test_pi_4_requests_files_in_its_own_folder_first(folder: str, serial: str) -> None:
    """If the board's own folder does not exist, the boot loader uses the common folder."""
    missed = [absent(f"{folder}/{name}") for name in ("start4.elf", "start.elf", "config.txt")]
    board = the_only(recorded(HAS_ADDRESS, *missed, sent("start4.elf"), sent("bcm2711-rpi-4-b.dtb")))
    assert (board.serial, board.absent, board.model, board.file) == (serial, set(), "4-b", "bcm2711-rpi-4-b.dtb")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("start.elf", "package raspi-firmware"),
        ("start4.elf", "package raspi-firmware"),
        ("bcm2711-rpi-4-b.dtb", "linux-image-arm64"),
        ("bcm2712-rpi-5-b.dtb", "linux-image-rpi-v8"),
        ("vmlinuz", "bootable profile"),
        ("x.dtb", "export"),
    ],
)
def test_an_absent_file_is_reported_at_once_with_its_fix(name: str, fix: str) -> None:
    boards = recorded(HAS_ADDRESS, absent(name))
    advice = the_only(boards).advice(1.0)
    assert f"{name} is not in the TFTP folder" in advice
    assert fix in advice
    boards.record(sent(name), 3.0)
    assert the_only(boards).advice(4.0) == ""


@pytest.mark.parametrize(
    ("lines", "advice"),
    [
        ([], "enable network boot"),
        ([FIRMWARE, HAS_ADDRESS], "allow UDP port 69"),
        ([ASKS, OFFERED], "without --alone"),
        ([sent("config.txt")], "it stopped after config.txt"),
        ([sent("vmlinuz")], "does not mount"),
        ([sent("vmlinuz"), "dnsmasq-tftp[7]: failed sending /tmp/x/vmlinuz to 192.168.77.50"], "transfer failed"),
    ],
)
def test_stalled_board_gets_advice(lines: list[str], advice: str) -> None:
    board = the_only(recorded(HAS_ADDRESS, *lines))
    assert board.advice(board.last + STALLED_S - 1) == ""
    assert advice in board.advice(board.last + STALLED_S)
    board.reach("mounted", 10.0)
    board.contact = 1000.0
    assert board.advice(1000.0) == ""


@pytest.mark.parametrize("state", ["mounted", "up"])
def test_a_board_that_was_switched_off_gets_advice(state: str) -> None:
    boards = recorded(HAS_ADDRESS, sent("vmlinuz"))
    board = the_only(boards)
    boards.mounted({"192.168.77.50": 0.0}, 10.0)
    board.reach(state, 11.0)
    boards.mounted({"192.168.77.50": 9 + STALLED_S}, 20.0 + STALLED_S)
    assert board.advice(10.0 + STALLED_S) == "", "an idle board renews its lease every 40 s"
    assert "has received nothing from it since" in board.advice(11.0 + STALLED_S)
    boards.mounted({"192.168.77.50": 0.0}, 300.0)
    assert board.advice(301.0) == ""


@pytest.mark.parametrize("asks", [[FIRMWARE, ASKS], [OF_PROXY]], ids=["alone", "with a router"])
def test_a_firmware_request_of_a_mounted_board_is_a_boot(asks: list[str]) -> None:
    """The server still has a connection of the previous boot, on which it receives nothing."""
    boards = recorded(HAS_ADDRESS, sent("vmlinuz"))
    boards.mounted({"192.168.77.50": 0.0}, 10.0)
    for line in asks:
        boards.record(line, 30.0)
    board = the_only(boards)
    assert (board.state, board.began) == ("address", 30.0)
    assert boards.mounted({"192.168.77.50": 21.0}, 31.0) == []
    assert boards.mounted({"192.168.77.50": 1.0}, 40.0) == [board]


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        ("Access not", "set nfs.subnet to a subnet with 192.168.77.50"),
        ("Non-reserved Port 60790 is not", "without noresvport"),
    ],
)
def test_reason_of_an_nfs_refusal_is_shown(cause: str, fix: str) -> None:
    boards = recorded(HAS_ADDRESS, sent("vmlinuz"))
    board = the_only(boards)
    assert boards.mounted({"192.168.77.50": 0.0}, 4.0) == [board], "a refused board is connected for a moment"
    line = f"nfs4_export_check_access :NFS4 :INFO :{cause} allowed on Export_Id 1 /x y for client ::ffff:192.168.77.50"
    assert boards.record(line, 5.0) is board
    assert fix in board.advice(6.0)
    assert boards.mounted({"192.168.77.50": 0.0}, 7.0) == []


def test_an_address_outside_the_subnet_is_reported_at_once() -> None:
    board = the_only(recorded(sent("config.txt").replace("77.50", "1.50"), mac=MAC))
    assert "192.168.1.50 is not in nfs.subnet (192.168.77.0/24)" in board.advice(1.0)


def test_address_behind_a_router_comes_from_the_first_file() -> None:
    boards = recorded(OF_PROXY, sent("config.txt"), mac=MAC)
    board = the_only(boards)
    assert (board.address, board.state, board.file) == ("192.168.77.50", "files", "config.txt")
    unknown = recorded(sent("config.txt"))
    assert list(unknown) == [], "a client without a hardware address must be ignored"


def test_a_board_with_a_card_appears_when_it_mounts() -> None:
    boards = recorded(mac=MAC)
    assert [board.mac for board in boards.mounted({"192.168.77.50": 0.0}, 1.0)] == [MAC]
    assert list(recorded().mounted({"127.0.0.1": 0.0}, 1.0)) == [], "the loopback address is not a board's"


@pytest.mark.parametrize("asks", [ASKS, OF_PROXY], ids=["alone", "with a router"])
def test_new_request_of_a_running_board_is_a_restart(asks: str) -> None:
    boards = recorded(HAS_ADDRESS, sent("vmlinuz"))
    board = the_only(boards)
    board.reach("up", 30.0)
    boards.record(asks, 31.0)
    assert the_only(boards).state == "up", "a renewed lease must not change the state"
    boards.record(asks, 32.0 + 2 * STALLED_S)
    again = the_only(boards)
    assert (again.state, again.began, again.address) == ("address", 32.0 + 2 * STALLED_S, "192.168.77.50")


def test_a_board_may_connect_before_its_requests_are_read() -> None:
    boards = Boards(lambda _address: MAC, SUBNET)
    boards.record(sent("vmlinuz"), 5.0)
    assert boards.mounted({"192.168.77.50": 3.0}, 6.0) == [the_only(boards)]


def test_clients_have_the_time_since_their_last_data() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert clients_of(port) == {}
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            for pause in (1.0, 0.0):
                began = time.monotonic()
                client.send(b"x")
                time.sleep(pause)
                ((address, seconds),) = clients_of(port).items()
                assert address == "127.0.0.1"
                assert pause - 0.1 < seconds <= time.monotonic() - began + 0.1


@pytest.mark.parametrize("line", ["", "dnsmasq[7]: started, version 2.90", "dnsmasq-tftp[7]: TFTP root is /x"])
def test_other_lines_are_ignored(line: str) -> None:
    assert list(recorded(line, mac=MAC)) == []
