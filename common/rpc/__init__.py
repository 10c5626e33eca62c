"""gRPC between the processes of one cluster: authenticated listeners and cached channels. Loads no tensors."""
