"""The root filesystem and the image: flavours, apt, mmdebstrap, native tools, Dockerfile."""
