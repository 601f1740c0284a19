"""Kernels that come with the project; each file is one, as docs/remote.md describes."""
