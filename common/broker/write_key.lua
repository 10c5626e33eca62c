-- KEYS: records version. ARGV: a new version, id, 'any' or 'known' (nothing is done for an id that is not there), then the
-- record; without one the id is removed. Answers whether there was such an id.

local was_there = redis.call('HEXISTS', KEYS[1], ARGV[2])
if ARGV[3] == 'known' and was_there == 0 then
  return was_there
end
if ARGV[4] then
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
else
  redis.call('HDEL', KEYS[1], ARGV[2])
end
redis.call('SET', KEYS[2], ARGV[1])
return was_there
