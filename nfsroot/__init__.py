"""Where the Pi boots from: export, audit, chroot helper, servers, and a QEMU machine that boots it."""
