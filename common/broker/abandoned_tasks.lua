-- Take over one page of tasks claimed too long ago. KEYS: stream. ARGV: consumer, min idle in ms, cursor, max deliveries.
-- Answers {cursor, entries taken, ids dropped}: a task delivered more often than that kills its workers.

local page = redis.pcall('XAUTOCLAIM', KEYS[1], 'prefill', ARGV[1], ARGV[2], ARGV[3], 'COUNT', 16)
if page.err then
  return {'0-0', {}, {}} -- no stream or no group: nothing was claimed
end
local taken, dropped = {}, {}
for _, entry in ipairs(page[2]) do
  if entry then -- false: deleted from the stream but never acknowledged (before Redis 7)
    local pending = redis.call('XPENDING', KEYS[1], 'prefill', entry[1], entry[1], 1)
    if pending[1] and pending[1][4] > tonumber(ARGV[4]) then
      redis.call('XACK', KEYS[1], 'prefill', entry[1])
      redis.call('XDEL', KEYS[1], entry[1])
      dropped[#dropped + 1] = entry[1]
    else
      taken[#taken + 1] = entry
    end
  end
end
return {page[1], taken, dropped}
