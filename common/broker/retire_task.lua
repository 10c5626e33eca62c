-- Acknowledge and delete entries: XACK alone frees no memory. KEYS: stream. ARGV: entries.

for _, entry in ipairs(ARGV) do
  redis.call('XACK', KEYS[1], 'prefill', entry)
  redis.call('XDEL', KEYS[1], entry)
end
return #ARGV
