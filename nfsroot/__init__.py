"""Export, audit and serve the root filesystem that boards boot from, and boot it in a QEMU virtual machine."""
