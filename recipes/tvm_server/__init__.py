"""TVM's RPC server for a board's image, installed from wheels for the board's architecture."""
