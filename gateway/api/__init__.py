"""The HTTP handlers, one file per resource; they only translate between HTTP and the rest of the gateway."""
