"""TVM's RPC server for a board's image, from the wheels of its architecture."""
