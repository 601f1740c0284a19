"""Image registries: push, pull, mirror, a local registry, OCI artefacts."""
