-- Charge a request to its tenant. Behind the prelude's arguments: limits of requests, tokens, concurrency ('' is none),
-- choices, tokens. Answers {'' or the limit that refuses, ms until there is room, requests used, tokens used}; what is
-- used is {amount, ms until nothing is} or {}.

local max_requests, max_tokens = tonumber(ARGV[ARG + 1]), tonumber(ARGV[ARG + 2])
local max_concurrent = tonumber(ARGV[ARG + 3])
local choices, tokens = tonumber(ARGV[ARG + 4]), tonumber(ARGV[ARG + 5])

local requests, spent = load_window(REQUESTS, max_requests), load_window(TOKENS, max_tokens)

local function answer(limit, wait)
  return {limit, wait, used(requests), used(spent)}
end

sweep()
if is_over(REQUEST) then
  return answer('concurrency', 0)
elseif load_permit(REQUEST) then
  return answer('', 0)
end

local wait_requests, wait_tokens = wait_for(requests, choices), wait_for(spent, tokens)
if wait_requests > 0 and wait_requests >= wait_tokens then
  return answer('requests', wait_requests)
elseif wait_tokens > 0 then
  return answer('tokens', wait_tokens)
elseif max_concurrent and redis.call('ZCARD', LEASES) + choices > max_concurrent then
  return answer('concurrency', 0)
end

charge(requests, choices)
charge(spent, tokens)
hold(REQUEST, {choices = choices, step = step, tokens = max_tokens and tokens, charged = step})
return answer('', 0)
