-- Remove a worker if its seat still belongs to this epoch. KEYS: workers records loads, its lane. ARGV: worker, epoch.

local packed = redis.call('HGET', KEYS[1], ARGV[1])
if packed and cmsgpack.unpack(packed).epoch == ARGV[2] then
  for index = 1, 3 do
    redis.call('HDEL', KEYS[index], ARGV[1])
  end
end
return redis.call('DEL', unpack(KEYS, 4))
