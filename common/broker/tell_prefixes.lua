-- What has come into a worker's prefix cache and what has left it. KEYS: prefixes. ARGV: TTL in ms, entries that the worker
-- believes to be there, number of added ones, then the added and the removed ones.
-- Answers 1, or 0: others are there than the worker believes. All of them are gone now, and it begins anew.

if redis.call('SCARD', KEYS[1]) ~= tonumber(ARGV[2]) then
  redis.call('DEL', KEYS[1])
  return 0
end
local border = 3 + ARGV[3]
if border > 3 then
  redis.call('SADD', KEYS[1], unpack(ARGV, 4, border))
end
if #ARGV > border then
  redis.call('SREM', KEYS[1], unpack(ARGV, border + 1))
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
