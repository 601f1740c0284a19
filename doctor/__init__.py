"""Checks whether this machine can build, and reports a fix for each problem."""
