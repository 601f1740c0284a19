"""Build a flavour's root filesystem and image with apt, mmdebstrap, native tools and a Dockerfile."""
