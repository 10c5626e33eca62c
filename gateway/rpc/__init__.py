"""gRPC for clients: the servicers behind `--rpc-port`, and their listener."""
