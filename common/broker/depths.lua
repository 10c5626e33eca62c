-- How much of a prompt each worker has in its cache. KEYS: prefixes of workers. ARGV: names of ever shorter prefixes.
-- Answers for each worker the number of the longest one from the end of that list, 0 for none.

local depths = {}
for index, key in ipairs(KEYS) do
  depths[index] = 0
  for position, has in ipairs(redis.call('SMISMEMBER', key, unpack(ARGV))) do
    if has == 1 then
      depths[index] = #ARGV - position + 1
      break
    end
  end
end
return depths
