"""What we build and boot in: root filesystems, the engine, Dockerfile templates, the registry."""
