"""Python wheels: find, audit, build, cache and serve them."""
