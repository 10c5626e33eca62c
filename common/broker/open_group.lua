-- Make the consumer group, and the stream with it, if they are missing. KEYS: stream. ARGV: TTL in ms.

local answer = redis.pcall('XGROUP', 'CREATE', KEYS[1], 'prefill', '0', 'MKSTREAM')
if type(answer) == 'table' and answer.err and not string.find(answer.err, 'BUSYGROUP', 1, true) then
  return answer
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
