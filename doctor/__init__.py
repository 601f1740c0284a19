"""Checks of this machine, each with its fix."""
