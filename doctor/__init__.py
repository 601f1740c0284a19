"""Check whether this machine can build, and report a fix for each problem."""
