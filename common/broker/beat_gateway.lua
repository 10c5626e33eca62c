-- A gateway's heartbeat. Behind the prelude's arguments: gateway, then (tenant, tokens) per correction of what its
-- tenants were charged. Answers the jobs and the tokens that wait, and how the waiting set emptied lately: ms in which
-- somebody waited, tokens and jobs that left it for a worker.

keep_pulse()
renew_lease(ARGV[ARG + 1])
redis.call('ZREMRANGEBYSCORE', GATEWAYS, '-inf', now - 10 * GATEWAY_TTL)
sweep()
mend()
for first = ARG + 2, #ARGV, 2 do
  local share, floor = share_of(ARGV[first])
  set_share(ARGV[first], math.max(1, share + ARGV[first + 1] / weight_of(ARGV[first])), floor)
end
local rate = load_rate()
return {
  redis.call('ZCARD', WAITING), tonumber(redis.call('HGET', BACKLOG, ALL) or 0),
  math.floor(rate.busy), math.floor(rate.tokens), math.floor(rate.jobs),
}
