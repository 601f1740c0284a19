"""torch for the target: where its wheel comes from."""
