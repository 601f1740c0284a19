"""The root filesystem that the Pi boots: export, audit, chroot helper, servers, and a QEMU machine that boots it."""
