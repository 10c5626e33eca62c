-- Prelude of every script that moves jobs: workers, leases, places and lanes.
--
-- KEYS 1-7: workers gateways waiting parked places ages pulse; behind them one pair (stream, held) per lane.
-- ARGV 1-3: stream TTL, record TTL, gateway TTL, in ms. ARG is the offset of a script's own arguments.
--
-- A worker is {epoch, expires, seen, open, total, free, seats, busy, absorbed, former}; `open`: a ready decode worker.
-- A place is {placement, state, ...}: 'waiting' with blocks, gateway and `ends` (its deadline, if any), 'placed' with
-- worker, epoch and entry, or 'withdrawn', the tombstone that refuses a place which arrives later.
-- A lane is a worker's stream as seen by one call: what it has left after the reservations of its entries.

local WORKERS, GATEWAYS, WAITING, PARKED, PLACES, AGES, PULSE = unpack(KEYS, 1, 7)
local FIRST_LANE = 8
local STREAM_TTL, RECORD_TTL, GATEWAY_TTL = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local ARG = 3
local WINDOW = 64 -- waiting jobs that one call looks at
local SWEEP = 16 -- old places that one call forgets; a call makes at most one
local KEEP = 3600000 -- ms that a key outlives its last write

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

local function load_row(key, field)
  local packed = redis.call('HGET', key, field)
  return packed and cmsgpack.unpack(packed)
end

-- Leases ---------------------------------------------------------------------------------------------------------

-- Nobody could beat while Redis was away: leases that ended meanwhile count for one more TTL.
local function keep_pulse()
  local last = tonumber(redis.call('HGET', PULSE, 'last') or now)
  if now - last > GATEWAY_TTL / 2 then
    redis.call('HSET', PULSE, 'grace', now + GATEWAY_TTL)
  end
  redis.call('HSET', PULSE, 'last', now)
  redis.call('PEXPIRE', PULSE, KEEP)
end

local function renew_lease(gateway)
  redis.call('ZADD', GATEWAYS, now + GATEWAY_TTL, gateway)
  redis.call('PEXPIRE', GATEWAYS, KEEP)
end

local function has_lease(gateway)
  local ends = tonumber(redis.call('ZSCORE', GATEWAYS, gateway) or 0)
  return ends > now or tonumber(redis.call('HGET', PULSE, 'grace') or 0) > now
end

-- Places ---------------------------------------------------------------------------------------------------------

-- What waits becomes old at its deadline, so that `sweep` drops it then; everything else after the record's TTL.
local function age_of(place)
  return place.ends and math.min(now, place.ends - RECORD_TTL) or now
end

local function remember(request, place)
  redis.call('HSET', PLACES, request, cmsgpack.pack(place))
  redis.call('ZADD', AGES, age_of(place), request)
  redis.call('PEXPIRE', PLACES, KEEP)
  redis.call('PEXPIRE', AGES, KEEP)
end

local function unpark(request)
  redis.call('ZREM', WAITING, request)
  redis.call('HDEL', PARKED, request)
end

local function forget(request)
  unpark(request)
  redis.call('HDEL', PLACES, request)
  redis.call('ZREM', AGES, request)
end

-- Whether somebody still wants a waiting job: its gateway lives and its deadline has not passed.
local function is_wanted(place)
  return has_lease(place.gateway) and not (place.ends and place.ends <= now)
end

local function sweep()
  local old = redis.call('ZRANGEBYSCORE', AGES, '-inf', now - RECORD_TTL, 'LIMIT', 0, SWEEP)
  for _, request in ipairs(old) do
    local place = load_row(PLACES, request)
    if place and place.state == 'waiting' and is_wanted(place) then
      redis.call('ZADD', AGES, age_of(place), request)
    else
      forget(request)
    end
  end
end

-- Lanes ----------------------------------------------------------------------------------------------------------

local function open_lane(index, name, epoch, cost)
  local lane = {
    worker = name, epoch = epoch, cost = cost,
    stream = KEYS[FIRST_LANE + 2 * index], held = KEYS[FIRST_LANE + 2 * index + 1],
  }
  local worker = load_row(WORKERS, name)
  if not (worker and worker.open and worker.epoch == epoch and worker.expires > now) then
    return lane
  end
  local held = redis.call('HVALS', lane.held)
  local reserved = 0
  for _, blocks in ipairs(held) do
    reserved = reserved + blocks
  end
  lane.open, lane.total = true, worker.total
  lane.free = worker.free - reserved
  lane.seats = worker.seats - #held
  lane.busy = worker.busy + #held
  return lane
end

-- Load is counted in sequences: each costs about one token per step beside the new prompt's `cost` tokens.
local function cheapest(lanes, blocks, weight)
  local best, least
  for _, lane in ipairs(lanes) do
    if lane.open and not lane.contested and lane.free >= blocks and lane.seats > 0 then
      local cost = lane.cost * weight + lane.busy
      if not best or cost < least then
        best, least = lane, cost
      end
    end
  end
  return best
end

local function append(lane, request, placement, blocks, job)
  local entry = redis.call('XADD', lane.stream, '*',
    'job', job, 'request', request, 'placement', placement, 'blocks', blocks)
  redis.call('HSET', lane.held, entry, blocks)
  redis.call('PEXPIRE', lane.stream, STREAM_TTL)
  redis.call('PEXPIRE', lane.held, STREAM_TTL)
  lane.free, lane.seats, lane.busy = lane.free - blocks, lane.seats - 1, lane.busy + 1
  remember(request, {
    placement = placement, state = 'placed', worker = lane.worker, epoch = lane.epoch, entry = entry,
  })
end

-- Who comes later must not take a lane for which an earlier job waits; a job too big for a lane does not wait for it.
local function contest(lanes, blocks)
  local is_any_left = false
  for _, lane in ipairs(lanes) do
    if lane.open and lane.total >= blocks then
      lane.contested = true
    end
    is_any_left = is_any_left or (lane.open and not lane.contested)
  end
  return is_any_left
end

-- Move waiting jobs, oldest first, into these lanes; mark the lanes that the remaining ones wait for.
local function drain(lanes)
  local requests = redis.call('ZRANGE', WAITING, 0, WINDOW - 1)
  for _, request in ipairs(requests) do
    local place = load_row(PLACES, request)
    local job = redis.call('HGET', PARKED, request)
    if not (place and place.state == 'waiting' and job and is_wanted(place)) then
      forget(request)
    else
      local lane = cheapest(lanes, place.blocks, 0)
      if lane then
        unpark(request)
        append(lane, request, place.placement, place.blocks, job)
      elseif not contest(lanes, place.blocks) then
        return
      end
    end
  end
  if #requests == WINDOW then
    contest(lanes, 0)
  end
end

-- Take a request's present placement out of the waiting set or of its lane. False: that lane is not among these.
local function remove(request, place, lanes)
  if place.state == 'waiting' then
    unpark(request)
    return true
  elseif place.state == 'withdrawn' then
    return true
  end
  for _, lane in ipairs(lanes) do
    if lane.worker == place.worker and lane.epoch == place.epoch then
      local blocks = redis.call('HGET', lane.held, place.entry)
      if blocks then
        redis.call('XDEL', lane.stream, place.entry)
        redis.call('HDEL', lane.held, place.entry)
        if lane.open then
          lane.free, lane.seats, lane.busy = lane.free + blocks, lane.seats + 1, lane.busy - 1
        end
      end
      return true
    end
  end
  return false
end
