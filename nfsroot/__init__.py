"""Export, audit and serve the root filesystem that a board boots, and boot it in a QEMU machine."""
