-- Place a job, or let it wait. Behind the prelude's arguments: job, request, placement, gateway, blocks, max_waiting,
-- ms until its deadline or '' for none, number of candidates, then (worker, epoch, cost) per lane. Lanes behind the
-- candidates only lose older placements.
-- Answers {'placed', worker, epoch}, {'waiting', ahead}, {'stale'}, {'full'} or {'elsewhere', worker, epoch}: call
-- again with that lane.

local job, request, placement = ARGV[ARG + 1], ARGV[ARG + 2], tonumber(ARGV[ARG + 3])
local gateway, blocks, max_waiting = ARGV[ARG + 4], tonumber(ARGV[ARG + 5]), tonumber(ARGV[ARG + 6])
local time_left, num_candidates = tonumber(ARGV[ARG + 7]), tonumber(ARGV[ARG + 8])

renew_lease(gateway)
sweep()

local place = load_row(PLACES, request)
if place and placement == place.placement and place.state == 'placed' then
  return {'placed', place.worker, place.epoch}
elseif place and placement == place.placement and place.state == 'waiting' then
  return {'waiting', redis.call('ZRANK', WAITING, request) or 0}
elseif place and placement <= place.placement then
  return {'stale'}
end

local lanes, candidates = {}, {}
for first = ARG + 9, #ARGV, 3 do
  local lane = open_lane(#lanes, ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2]))
  lanes[#lanes + 1] = lane
  if #lanes <= num_candidates then
    candidates[#candidates + 1] = lane
  end
end

local arrival = redis.call('ZSCORE', WAITING, request) -- a later placement keeps its age
if place then
  if not remove(request, place, lanes) then
    return {'elsewhere', place.worker, place.epoch}
  end
  remember(request, {placement = place.placement, state = 'withdrawn'})
end

local function park()
  if not arrival then
    local last = redis.call('ZREVRANGE', WAITING, 0, 0, 'WITHSCORES')[2]
    arrival = math.max(now_us, tonumber(last or 0) + 1) -- the clock may step back
  end
  redis.call('ZADD', WAITING, arrival, request)
  redis.call('HSET', PARKED, request, job)
  redis.call('PEXPIRE', WAITING, KEEP)
  redis.call('PEXPIRE', PARKED, KEEP)
  remember(request, {
    placement = placement, state = 'waiting', blocks = blocks, gateway = gateway, ends = time_left and now + time_left,
  })
end

if arrival then -- it stands in the queue already: let the queue decide
  park()
  drain(candidates)
  place = load_row(PLACES, request)
  if place and place.state == 'placed' then
    return {'placed', place.worker, place.epoch}
  end
  return {'waiting', redis.call('ZRANK', WAITING, request) or 0}
end

drain(candidates)
local lane = cheapest(candidates, blocks, 1)
if lane then
  append(lane, request, placement, blocks, job)
  return {'placed', lane.worker, lane.epoch}
end
if redis.call('ZCARD', WAITING) >= max_waiting then
  return {'full'}
end
park()
return {'waiting', redis.call('ZRANK', WAITING, request)}
