-- List the models that had a worker lately. KEYS: models. ARGV: TTL in ms.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now - tonumber(ARGV[1])), '+inf')
