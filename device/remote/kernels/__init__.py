"""The kernels of the project, one per file; docs/remote.md describes the format."""
