-- The consumer that has claimed an entry, nothing if nobody has. KEYS: stream. ARGV: entry.

local pending = redis.pcall('XPENDING', KEYS[1], 'prefill', ARGV[1], ARGV[1], 1)
if pending.err then
  if string.find(pending.err, 'NOGROUP', 1, true) then
    return false
  end
  return pending
end
return pending[1] and pending[1][2] or false
