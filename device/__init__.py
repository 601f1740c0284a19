"""Boards: the labgrid target that boots a board or connects to it, the device suite, and the reports of the suite."""
