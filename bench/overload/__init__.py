"""Far more work than a cluster can do, from several tenants at once: who is served, how fast, and how fast others are
refused."""
