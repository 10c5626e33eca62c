-- Charge the tokens that a request really wants in place of those of its reservation. Behind the prelude's arguments:
-- limits of requests and tokens ('' is none), tokens. Answers as reserve_permit.lua.

local max_requests, max_tokens = tonumber(ARGV[ARG + 1]), tonumber(ARGV[ARG + 2])
local tokens = tonumber(ARGV[ARG + 3])

local function answer(limit, wait)
  return {limit, wait, used(REQUESTS, max_requests), used(TOKENS, max_tokens)}
end

local permit = load_permit(REQUEST)
if not (permit and permit.tokens and max_tokens) then
  return answer('', 0)
end

refund(TOKENS, permit.charged, permit.tokens)
local wait = wait_for(load_window(TOKENS), max_tokens, tokens)
if wait > 0 then
  refund(REQUESTS, permit.step, permit.choices)
  let_go(REQUEST, permit)
  end_for_good(REQUEST)
  return answer('tokens', wait)
end
charge(TOKENS, step, tokens)
permit.tokens, permit.charged = tokens, step
redis.call('HSET', PERMITS, REQUEST, cmsgpack.pack(permit))
return answer('', 0)
