-- List the live workers. KEYS: workers records loads. ARGV: worker TTL in ms.
-- Answers record, load and age in ms per worker, flat; rows that ended ten TTLs ago are removed.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local rows = redis.call('HGETALL', KEYS[1])
local alive = {}
for index = 1, #rows, 2 do
  local name, worker = rows[index], cmsgpack.unpack(rows[index + 1])
  if worker.expires > now then
    alive[#alive + 1] = redis.call('HGET', KEYS[2], name)
    alive[#alive + 1] = redis.call('HGET', KEYS[3], name)
    alive[#alive + 1] = now - worker.seen
  elseif worker.expires < now - 10 * tonumber(ARGV[1]) then
    for _, key in ipairs(KEYS) do
      redis.call('HDEL', key, name)
    end
  end
end
return alive
