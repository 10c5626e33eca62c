-- End a permit. Behind the prelude's arguments: tokens used, '' if the request was not served.

local tokens = tonumber(ARGV[ARG + 1])

local permit = load_permit(REQUEST)
if permit then
  let_go(REQUEST, permit)
  if not tokens then
    refund(REQUESTS, permit.step, permit.choices)
  end
  if permit.tokens then
    local more = (tokens or 0) - permit.tokens
    if more > 0 then
      add(TOKENS, step, more) -- an answer longer than was foreseen
    else
      refund(TOKENS, permit.charged, -more)
    end
  end
end
end_for_good(REQUEST)
return 1
