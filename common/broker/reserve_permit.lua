-- Charge a request to its tenant. Behind the prelude's arguments: limits of requests, tokens, concurrency ('' is none),
-- choices, tokens. Answers {'' or the limit that refuses, ms until there is room, requests used, tokens used}; what is
-- used is {amount, ms until nothing is} or {}.

local max_requests, max_tokens = tonumber(ARGV[ARG + 1]), tonumber(ARGV[ARG + 2])
local max_concurrent = tonumber(ARGV[ARG + 3])
local choices, tokens = tonumber(ARGV[ARG + 4]), tonumber(ARGV[ARG + 5])

local function answer(limit, wait)
  return {limit, wait, used(REQUESTS, max_requests), used(TOKENS, max_tokens)}
end

sweep()
if is_over(REQUEST) then
  return answer('concurrency', 0)
elseif load_permit(REQUEST) then
  return answer('', 0)
end

local wait_requests = max_requests and wait_for(load_window(REQUESTS), max_requests, choices) or 0
local wait_tokens = max_tokens and wait_for(load_window(TOKENS), max_tokens, tokens) or 0
if wait_requests > 0 and wait_requests >= wait_tokens then
  return answer('requests', wait_requests)
elseif wait_tokens > 0 then
  return answer('tokens', wait_tokens)
elseif max_concurrent and redis.call('ZCARD', LEASES) + choices > max_concurrent then
  return answer('concurrency', 0)
end

if max_requests then
  charge(REQUESTS, step, choices)
end
if max_tokens then
  charge(TOKENS, step, tokens)
end
hold(REQUEST, {choices = choices, step = step, tokens = max_tokens and tokens, charged = step})
return answer('', 0)
