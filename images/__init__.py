"""Build the root filesystem and the image: flavours, apt, mmdebstrap, native tools and the Dockerfile."""
