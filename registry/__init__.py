"""Use image registries: push and pull images and OCI artefacts, configure mirrors, and run a local registry."""
