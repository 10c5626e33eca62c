-- Charge the tokens that a request really wants in place of those of its reservation. Behind the prelude's arguments:
-- limits of requests and tokens ('' is none), tokens. Answers as reserve_permit.lua.

local max_requests, max_tokens = tonumber(ARGV[ARG + 1]), tonumber(ARGV[ARG + 2])
local tokens = tonumber(ARGV[ARG + 3])

local permit = load_permit(REQUEST)
local is_charged = permit and permit.tokens and max_tokens
if is_charged then
  refund(TOKENS, permit.charged, permit.tokens)
end
local requests, spent = load_window(REQUESTS, max_requests), load_window(TOKENS, max_tokens)

local function answer(limit, wait)
  return {limit, wait, used(requests), used(spent)}
end

if not is_charged then
  return answer('', 0)
end
local wait = wait_for(spent, tokens)
if wait > 0 then
  refund(REQUESTS, permit.step, permit.choices)
  let_go(REQUEST, permit)
  end_for_good(REQUEST)
  return answer('tokens', wait)
end
charge(spent, tokens)
permit.tokens, permit.charged = tokens, step
redis.call('HSET', PERMITS, REQUEST, cmsgpack.pack(permit))
return answer('', 0)
