-- A gateway's heartbeat. Behind the prelude's arguments: gateway.

keep_pulse()
renew_lease(ARGV[ARG + 1])
redis.call('ZREMRANGEBYSCORE', GATEWAYS, '-inf', now - 10 * GATEWAY_TTL)
sweep()
return 1
