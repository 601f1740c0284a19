"""Build upstream QPULib as upstream builds it, for use instead of libqpu."""
