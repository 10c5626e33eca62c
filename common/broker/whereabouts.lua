-- Where is a placement? KEYS: workers places. ARGV: request, placement.
-- Answers {'waiting'}, {'placed', worker, epoch, entry} while that incarnation is alive, or {'unknown'}.

local packed = redis.call('HGET', KEYS[2], ARGV[1])
local place = packed and cmsgpack.unpack(packed)
if not place or place.placement ~= tonumber(ARGV[2]) or place.state == 'withdrawn' then
  return {'unknown'}
elseif place.state == 'waiting' then
  return {'waiting'}
end
local clock = redis.call('TIME')
packed = redis.call('HGET', KEYS[1], place.worker)
local worker = packed and cmsgpack.unpack(packed)
if worker and worker.epoch == place.epoch and worker.expires > clock[1] * 1000 + clock[2] / 1000 then
  return {'placed', place.worker, place.epoch, place.entry}
end
return {'unknown'}
