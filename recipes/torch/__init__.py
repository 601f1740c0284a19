"""Build, find and audit the torch wheel for the target."""
