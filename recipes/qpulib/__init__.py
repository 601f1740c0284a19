"""Upstream QPULib, compiled as upstream compiles it and used instead of libqpu."""
