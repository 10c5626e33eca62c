"""gRPC between the processes of one cluster: authenticated listeners, cached channels, errors in our own terms."""
