"""Upstream QPULib, built the way its users know, in our libqpu's place."""
