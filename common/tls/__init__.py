"""TLS at the edge of a cluster: the files that it needs, checked, for servers and for clients."""
