-- KEYS: records version. ARGV: the version that is known already. Answers {version} if it is still that one, else
-- {version, records}.

local version = redis.call('GET', KEYS[2]) or ''
if version == ARGV[1] then
  return {version}
end
return {version, redis.call('HVALS', KEYS[1])}
