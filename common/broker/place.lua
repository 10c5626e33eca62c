-- Place a job, or let it wait. Behind the prelude's arguments: job, demand (packed, below), number of candidates, number
-- of prefixes, their names (the longest prefix first), then (worker, epoch, cost) per lane. Lanes behind the candidates
-- only lose older placements.
-- A demand is {request, placement, gateway, blocks, seats, tokens, cost, rank, tenant, fingerprint, time_left (ms, to the
-- deadline), age (ms), grain (by how many tokens each prefix is longer than the next), max_foreseen (ms that it may have
-- to wait as far as can be foreseen), max_requests, max_tokens, known_after (ms), known_jobs}.
-- Answers {'placed', worker, epoch}, {'waiting', ahead}, {'stale'}, {'crowded', ms}, {'heavy', ms}, {'late', ms} (ms: when
-- to come again, '' if nobody knows) or {'elsewhere', worker, epoch}: call again with that lane.

local job, demand = ARGV[ARG + 1], cmsgpack.unpack(ARGV[ARG + 2])
local num_candidates, num_prefixes = tonumber(ARGV[ARG + 3]), tonumber(ARGV[ARG + 4])
local LANES = ARG + 5 + num_prefixes
local prefixes = num_prefixes > 0 and {grain = demand.grain, names = {unpack(ARGV, ARG + 5, LANES - 1)}}
local request, placement, rank = demand.request, demand.placement, demand.rank

renew_lease(demand.gateway)
sweep()

local former = load_row(PLACES, request)

-- Jobs that stand before it for sure: more urgent ones, and earlier ones of its own flow.
local function num_ahead(member)
  local item = parse(member)
  return redis.call('ZLEXCOUNT', WAITING, '-', '(' .. string.format('%02d', item.rank))
    + redis.call('ZLEXCOUNT', WAITING, '[' .. item.flow .. ':', '(' .. member)
end

if former and placement == former.placement and former.state == 'placed' then
  return {'placed', former.worker, former.epoch}
elseif former and placement == former.placement and former.state == 'waiting' then
  return {'waiting', num_ahead(former.member)}
elseif former and placement <= former.placement then
  return {'stale'}
end

set_weight(demand.tenant, demand.weight)

local lanes, candidates = {}, {}
for first = LANES, #ARGV, 3 do
  local lane = open_lane(#lanes, ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2]))
  lanes[#lanes + 1] = lane
  if #lanes <= num_candidates then
    candidates[#candidates + 1] = lane
  end
end

local is_waiting = former and former.state == 'waiting'
if former then
  if not remove(request, former, lanes) then
    return {'elsewhere', former.worker, former.epoch}
  end
  remember(request, {placement = former.placement, state = 'withdrawn', arrival = former.arrival, paid = former.paid})
end

-- Without a record it was placed so long ago that the record is forgotten, if not for the first time.
local is_paid = former and former.paid or (not former and placement > 1)
local tenant = is_paid and PAID or demand.tenant
local place = {
  placement = placement, state = 'waiting', gateway = demand.gateway, paid = is_paid or nil,
  blocks = demand.blocks, seats = demand.seats, tokens = demand.tokens, fingerprint = demand.fingerprint,
  ends = demand.time_left and now + demand.time_left,
}

local num_waiting = redis.call('ZCARD', WAITING)
if num_waiting == 0 then
  local lane = cheapest(candidates, place, prefixes)
  if lane then
    place.arrival = former and former.arrival or now_us - 1000 * demand.age
    append(lane, request, place, job)
    if not is_paid then
      charge(demand.tenant, demand.cost, is_waiting)
    end
    return {'placed', lane.worker, lane.epoch}
  end
end

-- Tokens that are served before it, as far as that can be foreseen: other tenants get as much as its own.
local function tokens_ahead()
  local higher, fields = 0, {}
  for _, other in ipairs(ranks_waiting()) do
    if other < rank then
      higher = higher + tonumber(redis.call('HGET', BACKLOG, string.format('%02d', other)) or 0)
    end
  end
  local row = redis.call('HMGET', BACKLOG, flow_of(rank, tenant), string.format('%02d', rank))
  local equal = redis.call('ZCOUNT', FLOWS, score(rank, 0), '(' .. score(rank + 1, 0))
  return higher + math.min(tonumber(row[2] or 0), tonumber(row[1] or 0) * equal)
end

-- What the proposed workers do at once, all together.
local function num_seats()
  local seats = 0
  for _, lane in ipairs(candidates) do
    seats = seats + (lane.capacity or 0)
  end
  return seats
end

-- Why it must not wait, and after how many ms it should come again. Whose client has read a part is never refused.
-- While nobody knows how fast the waiting set empties, those who must not wait long wait for one turnover of the seats.
local function refusal()
  if is_waiting or is_paid then
    return nil
  end
  local rate = load_rate()
  local per_ms = rate.busy >= demand.known_after and rate.jobs >= demand.known_jobs and rate.tokens / rate.busy
  local tokens = tonumber(redis.call('HGET', BACKLOG, ALL) or 0)
  local all_gone = per_ms and whole(tokens / per_ms) or ''
  if num_waiting >= demand.max_requests then
    return {'crowded', all_gone}
  elseif num_waiting > 0 and tokens + demand.cost > demand.max_tokens then
    return {'heavy', all_gone}
  end
  if demand.max_foreseen and not per_ms and num_waiting >= num_seats() and num_seats() > 0 then
    return {'crowded', ''}
  end
  local longest = math.min(demand.time_left or math.huge, demand.max_foreseen or math.huge)
  local wait = per_ms and longest < math.huge and tokens_ahead() / per_ms
  if wait and wait > longest then
    return {'late', whole(wait - longest)}
  end
end

local refused = refusal()
if refused then
  return refused
end
place.arrival = former and former.arrival
  or (demand.age > 0 and now_us - 1000 * demand.age or arrival_behind(flow_of(rank, tenant)))
place.member = enqueue(rank, tenant, place.arrival, demand.cost, request, is_waiting)
redis.call('HSET', PARKED, request, job)
keep(PARKED)
remember(request, place)
if num_waiting > 0 then -- the order decides, also who is first of all now
  drain(candidates, request, prefixes)
end
local lane = given[request]
return lane and {'placed', lane.worker, lane.epoch} or {'waiting', num_ahead(place.member)}
