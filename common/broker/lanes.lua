-- Third part of the prelude: where placements are, what workers have left, and how waiting jobs get to them.
--
-- A place is {placement, state, arrival, paid, ...}: 'waiting' with member, gateway, blocks, seats, tokens, fingerprint and
-- `ends` (its deadline, if any), 'placed' with worker, epoch and entry, or 'withdrawn', the tombstone that refuses a place
-- which arrives later. `paid`: a placement of the request was given to a worker, and its tenant charged.
-- A lane is a worker's stream as seen by one call: what it has left after the reservations of its entries (held: blocks,
-- seats and tokens of each; sum: of all of them, and of how many).

local SWEEP = 16 -- old places that one call forgets; a call makes at most one
local SEQUENCE_TOKENS = 64 -- a sequence at work weighs as much as so many tokens to compute
local CROWD, CROWD_SEQUENCES = 1.25, 2 -- no prefix draws a job to a worker that is busier than so

-- Places ---------------------------------------------------------------------------------------------------------

-- What waits becomes old at its deadline, so that `sweep` drops it then; everything else after the record's TTL.
local function age_of(place)
  return place.ends and math.min(now, place.ends - RECORD_TTL) or now
end

local function remember(request, place)
  redis.call('HSET', PLACES, request, cmsgpack.pack(place))
  redis.call('ZADD', AGES, age_of(place), request)
  keep(PLACES, AGES)
end

local function unpark(request, place, served)
  redis.call('HDEL', PARKED, request)
  if place and place.member then
    dequeue(place.member, served)
  end
end

local function forget(request, place)
  unpark(request, place, false)
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
      forget(request, place)
    end
  end
end

-- Lanes ----------------------------------------------------------------------------------------------------------

local function note_sum(lane)
  local sum = lane.sum
  redis.call('SET', lane.sum_key, string.format('%d %d %d %d', sum.blocks, sum.seats, sum.tokens, sum.entries),
    'PX', STREAM_TTL)
end

-- Looking at every entry took as long as all the rest of a placement where 200 had come since the worker's last beat. A
-- sum of another number of entries is none of those that are there: a beat has absorbed some, or who wrote them keeps no
-- sum.
local function load_sum(lane)
  local entries = redis.call('HLEN', lane.held)
  local noted = redis.call('GET', lane.sum_key)
  if noted then
    local blocks, seats, tokens, num = string.match(noted, '^(%d+) (%d+) (%d+) (%d+)$')
    if tonumber(num) == entries then
      return {blocks = tonumber(blocks), seats = tonumber(seats), tokens = tonumber(tokens), entries = entries}
    end
  end
  local sum = {blocks = 0, seats = 0, tokens = 0, entries = entries}
  for _, entry in ipairs(redis.call('HVALS', lane.held)) do
    local blocks, seats, tokens = string.match(entry, '^(%d+) (%d+) (%d+)$')
    sum.blocks, sum.seats, sum.tokens = sum.blocks + blocks, sum.seats + seats, sum.tokens + tokens
  end
  lane.sum = sum
  note_sum(lane)
  return sum
end

local function add_to_sum(lane, sign, blocks, seats, tokens)
  local sum = lane.sum
  sum.blocks, sum.seats = sum.blocks + sign * blocks, sum.seats + sign * seats
  sum.tokens, sum.entries = sum.tokens + sign * tokens, sum.entries + sign
  note_sum(lane)
end

local function open_lane(index, name, epoch, cost)
  local first = FIRST_LANE + KEYS_PER_LANE * index
  local lane = {
    worker = name, epoch = epoch, cost = cost, stream = KEYS[first], held = KEYS[first + 1],
    prefixes = KEYS[first + 2], sum_key = KEYS[first + 3],
  }
  local worker = load_row(WORKERS, name)
  if not (worker and worker.open and worker.epoch == epoch and worker.expires > now) then
    return lane
  end
  local sum = load_sum(lane)
  lane.sum, lane.open, lane.total, lane.fingerprint = sum, true, worker.total, worker.fingerprint
  lane.capacity = worker.seats + worker.busy
  lane.free, lane.seats, lane.busy = worker.free - sum.blocks, worker.seats - sum.seats, worker.busy + sum.seats
  lane.tokens = sum.tokens
  return lane
end

local function is_akin(lane, place)
  return not place.fingerprint or place.fingerprint == lane.fingerprint
end

local function fits(lane, place)
  return lane.open and not lane.contested and lane.free >= place.blocks and lane.seats >= place.seats
    and is_akin(lane, place)
end

-- How many of a prompt's tokens the worker has in its cache; `prefixes` is {grain, names of ever shorter prefixes}.
local function cached(lane, prefixes)
  for index, has in ipairs(redis.call('SMISMEMBER', lane.prefixes, unpack(prefixes.names))) do
    if has == 1 then
      return prefixes.grain * (#prefixes.names - index + 1)
    end
  end
  return 0
end

-- The cheapest lane that fits, in tokens to compute; the first of equals.
local function cheapest(lanes, place, prefixes)
  local fitting, num_busy = {}, 0
  for _, lane in ipairs(lanes) do
    if fits(lane, place) then
      fitting[#fitting + 1] = lane
      num_busy = num_busy + lane.busy
    end
  end
  local crowd = CROWD * num_busy / #fitting + CROWD_SEQUENCES
  local best, least
  for _, lane in ipairs(fitting) do
    lane.uncached = place.tokens
    if prefixes and #fitting > 1 and lane.busy <= crowd then
      lane.uncached = math.max(0, place.tokens - cached(lane, prefixes))
    end
    local cost = lane.cost + lane.uncached + lane.tokens + SEQUENCE_TOKENS * lane.busy
    if not best or cost < least then
      best, least = lane, cost
    end
  end
  return best
end

local given = {} -- request -> lane, of this call

local function append(lane, request, place, job)
  given[request] = lane
  local entry = redis.call('XADD', lane.stream, '*',
    'job', job, 'request', request, 'placement', place.placement, 'blocks', place.blocks)
  redis.call('HSET', lane.held, entry, string.format('%d %d %d', place.blocks, place.seats, lane.uncached))
  redis.call('PEXPIRE', lane.stream, STREAM_TTL)
  redis.call('PEXPIRE', lane.held, STREAM_TTL)
  add_to_sum(lane, 1, place.blocks, place.seats, lane.uncached)
  lane.free, lane.seats, lane.busy = lane.free - place.blocks, lane.seats - place.seats, lane.busy + place.seats
  lane.tokens = lane.tokens + lane.uncached
  remember(request, {
    placement = place.placement, state = 'placed', worker = lane.worker, epoch = lane.epoch, entry = entry,
    arrival = place.arrival, paid = true,
  })
end

-- Who comes later must not take a lane for which an earlier job waits; a job that a lane can never hold does not wait
-- for it.
local function contest(lanes, place)
  local is_any_left = false
  for _, lane in ipairs(lanes) do
    if lane.open and lane.total >= place.blocks and lane.capacity >= place.seats and is_akin(lane, place) then
      lane.contested = true
    end
    is_any_left = is_any_left or (lane.open and not lane.contested)
  end
  return is_any_left
end

local function has_any_seat(lanes)
  for _, lane in ipairs(lanes) do
    if lane.open and lane.seats > 0 then
      return true
    end
  end
  return false
end

-- Move waiting jobs, in their order, into these lanes; mark the lanes that the remaining ones wait for. The prefixes are
-- those of the job of `own`.
local function drain(lanes, own, prefixes)
  if not has_any_seat(lanes) then
    return
  end
  for _ = 1, WINDOW do
    local item = next_job()
    if not item then
      return
    end
    local place = load_row(PLACES, item.request)
    local job = redis.call('HGET', PARKED, item.request)
    if not (place and place.member == item.member and job and is_wanted(place)) then
      go_on(item)
      if place and place.member ~= item.member then
        dequeue(item.member, false)
      else
        forget(item.request, place or item)
      end
    else
      local lane = cheapest(lanes, place, item.request == own and prefixes)
      if lane then
        unpark(item.request, place, true)
        go_on(item)
        append(lane, item.request, place, job)
        if not place.paid then
          charge(item.tenant, item.cost, true)
        end
      elseif contest(lanes, place) then
        pass(item)
      else
        return
      end
    end
  end
  if next_job() then
    contest(lanes, {blocks = 0, seats = 0}) -- whoever they are
  end
end

-- Take a request's present placement out of the waiting set or of its lane. False: that lane is not among these.
local function remove(request, place, lanes)
  if place.state == 'waiting' then
    unpark(request, place, false)
    return true
  elseif place.state == 'withdrawn' then
    return true
  end
  for _, lane in ipairs(lanes) do
    if lane.worker == place.worker and lane.epoch == place.epoch then
      local held = redis.call('HGET', lane.held, place.entry)
      if held then
        redis.call('XDEL', lane.stream, place.entry)
        redis.call('HDEL', lane.held, place.entry)
        if lane.open then
          local blocks, seats, tokens = string.match(held, '^(%d+) (%d+) (%d+)$')
          lane.free, lane.seats, lane.busy = lane.free + blocks, lane.seats + seats, lane.busy - seats
          lane.tokens = lane.tokens - tokens
          add_to_sum(lane, -1, blocks, seats, tokens)
        end
      end
      return true
    end
  end
  return false
end
