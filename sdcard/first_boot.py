"""Prepare an exported root for a card: write the files that it needs, and cloud-init's settings for the first boot.

cloud-init reads ``user-data`` and ``meta-data`` from the boot partition, which it finds by the label ``LABEL``.
Raspberry Pi Imager replaces ``user-data``, ``meta-data`` and ``network-config``. At the first boot, cloud-init also
generates the host keys and enlarges the root's file system.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nfsroot.audit import Audit
from nfsroot.tree import inside
from toolchain.config import SdConfig
from toolchain.errors import ConfigError

LABEL = "CIDATA"
"""The label of the boot partition; cloud-init's data source NoCloud looks for it."""

BOOT = "/boot/firmware"
"""The mount point of the boot partition."""

_CLOUD = """\
# The data source NoCloud: files on the boot partition. ifupdown configures the network. cloud-init cannot configure
# Wi-Fi for it, so wifi-from-card reads the file network-config instead.
datasource_list: [NoCloud]
network: {config: disabled}
apt: {preserve_sources_list: true}
bootcmd: [[/usr/local/sbin/wifi-from-card]]
ssh_genkeytypes: [ed25519, ecdsa]
"""


def fit_for_card(tree: Audit, disk_id: str) -> None:
    """Write the files that a root needs on a card. ``disk_id`` identifies the card's partition table (8 hex digits)."""
    tree.write(
        "/etc/fstab",
        f"PARTUUID={disk_id}-02 / ext4 defaults,noatime 0 1\n"
        # Only root may read the password's hash in user-data.
        f"PARTUUID={disk_id}-01 {BOOT} vfat umask=0077,nofail 0 2\n",
    )
    place = inside(tree.root, BOOT)
    place.mkdir(exist_ok=True)
    tree.touched.append(str(place.relative_to(tree.root)))
    tree.write("/etc/network/interfaces.d/eth0", "allow-hotplug eth0\niface eth0 inet dhcp\n")
    tree.write("/etc/cloud/cloud.cfg.d/99-card.cfg", _CLOUD)
    host_keys = tree.listing("/etc/ssh", "ssh_host_*")
    for path in ("/etc/resolv.conf", "/etc/cloud/cloud-init.disabled", *host_keys):
        if tree.has(path):
            tree.remove(path)


def require_complete(sd: SdConfig) -> None:
    """Raise ConfigError if the settings for the first boot are incomplete."""
    if (sd.ssh_keys or sd.password_hash) and not sd.user:
        raise ConfigError(["sd.user: expected the name of the user that sd.ssh_keys and sd.password_hash are for"])
    if bool(sd.wifi_name) != bool(sd.wifi_country) or (sd.wifi_psk and not sd.wifi_name):
        raise ConfigError(["sd.wifi_name, sd.wifi_country: expected both for a wireless network, or neither"])


def login_warnings(sd: SdConfig) -> tuple[str, ...]:
    """Return a warning if the settings allow nobody to log in."""
    if sd.user and (sd.ssh_keys or sd.password_hash):
        return ()
    return (
        "nobody can log in to a board with this card, unless Raspberry Pi Imager adds a user: set sd.user, and "
        "sd.ssh_keys or sd.password_hash",
    )


def user_data(sd: SdConfig, hostname: str) -> str:
    """Return the content of ``user-data``: cloud-config as JSON, which is also valid YAML.

    If the settings name no user, nobody can log in, because no default password exists.
    """
    data: dict[str, Any] = {"hostname": hostname, "manage_etc_hosts": True, "users": [], "ssh_pwauth": False}
    if sd.user:
        data["users"] = [_user(sd)]
        data["ssh_pwauth"] = bool(sd.password_hash)
    if sd.locale:
        data["locale"] = sd.locale
    return "#cloud-config\n" + json.dumps(data, indent=2) + "\n"


def _user(sd: SdConfig) -> Mapping[str, Any]:
    password = {"lock_passwd": False, "passwd": sd.password_hash} if sd.password_hash else {"lock_passwd": True}
    return {
        "name": sd.user,
        "groups": "sudo,video",
        "shell": "/bin/bash",
        # Without a password, the user could not authenticate to sudo.
        "sudo": "ALL=(ALL:ALL) ALL" if sd.password_hash else "ALL=(ALL:ALL) NOPASSWD:ALL",
        "ssh_authorized_keys": list(sd.ssh_keys),
        **password,
    }


def network_config(sd: SdConfig) -> str:
    """Return the content of ``network-config`` in the form that Raspberry Pi Imager uses.

    The content is empty if the settings name no Wi-Fi network.
    """
    if not sd.wifi_name:
        return ""
    point = {"password": sd.wifi_psk} if sd.wifi_psk else {}
    wlan = {"dhcp4": True, "regulatory-domain": sd.wifi_country, "access-points": {sd.wifi_name: point}}
    return json.dumps({"network": {"version": 2, "wifis": {"wlan0": wlan}}}, indent=2) + "\n"


def meta_data(identifier: str) -> str:
    """Return the content of ``meta-data``. cloud-init applies the settings once for each ``identifier``."""
    return f"instance-id: pitorch-{identifier}\n"
