-- KEYS: records version. ARGV: a new version, id, then the record; without one the id is removed. Answers whether
-- there was such an id.

local was_there = redis.call('HEXISTS', KEYS[1], ARGV[2])
if ARGV[3] then
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[2])
end
redis.call('SET', KEYS[2], ARGV[1])
return was_there
