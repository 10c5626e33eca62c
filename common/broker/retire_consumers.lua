-- Remove consumers that are gone. KEYS: stream. ARGV: own consumer, idle in ms at which one is gone.
-- Removing a consumer drops its pending entries, so one that has any stays until they are taken over.

local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], 'prefill')
if consumers.err then
  return 0
end
local removed = 0
for _, row in ipairs(consumers) do
  local consumer = {}
  for index = 1, #row, 2 do
    consumer[row[index]] = row[index + 1]
  end
  if consumer.name ~= ARGV[1] and consumer.pending == 0 and consumer.idle >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], 'prefill', consumer.name)
    removed = removed + 1
  end
end
return removed
