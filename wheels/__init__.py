"""Find, audit, build, cache and serve Python wheels."""
