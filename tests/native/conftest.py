"""Broad tests, which run only on the PC, because they would take hours on an emulated machine."""
