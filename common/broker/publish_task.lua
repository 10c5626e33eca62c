-- Append a prefill task and delete the try it replaces. KEYS: stream. ARGV: task, replaced entry or '', TTL in ms.

if ARGV[2] ~= '' then
  redis.call('XACK', KEYS[1], 'prefill', ARGV[2])
  redis.call('XDEL', KEYS[1], ARGV[2])
end
local entry = redis.call('XADD', KEYS[1], '*', 'task', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return entry
