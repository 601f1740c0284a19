"""Broad tests that run only on the PC, because they would take hours on an emulated machine."""
