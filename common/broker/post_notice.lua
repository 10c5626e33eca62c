-- Append a notice; the oldest ones go. KEYS: stream. ARGV: notice, number of notices to keep, TTL in ms.

local entry = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'notice', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return entry
