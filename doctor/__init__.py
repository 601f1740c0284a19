"""Check whether this machine can build images, and report a fix for each problem."""
