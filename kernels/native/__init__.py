"""What all native CPU kernels share: vectors, a team of threads, the build and the loaded library."""
