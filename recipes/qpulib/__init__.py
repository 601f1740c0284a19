"""Upstream QPULib, built in the usual way and used instead of libqpu."""
