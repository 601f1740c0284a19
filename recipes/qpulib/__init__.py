"""Upstream QPULib, compiled as upstream does and used instead of libqpu."""
