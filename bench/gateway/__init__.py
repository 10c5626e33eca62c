"""How fast the gateway is, beside other routers: `python -m bench.gateway`."""
