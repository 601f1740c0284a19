"""The project's kernels, one per file. docs/remote.md describes the format."""
