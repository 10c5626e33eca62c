-- Second part of the prelude: the order of waiting jobs, what tenants were served, and how fast the waiting set empties.
--
-- A waiting job is one member of WAITING, `<rank>:<tenant>:<arrival in us>:<cost>:<request>`, all with score 0: what one
-- tenant has waiting in one rank, a flow, is one range, oldest first. FLOWS has the flows that are not empty, by rank and
-- by what their tenant was served. Rank 0 is the most urgent.
--
-- Of one rank the tenant goes next that was served least (SHARES, in tokens by its weight, which stands there as
-- `*<tenant>` unless it is 1), of equals the one whose job is older. Who
-- begins to wait is lifted to the least served of those who wait in that rank, or, where nobody does, to what had been
-- served to whoever was placed last (FLOOR): nobody saves up turns. Among the ranks the next job of each compete: a rank
-- is worth AGEING of waiting. Jobs that were served before and lost their worker (tenant PAID) go first in their rank.
--
-- BACKLOG counts the tokens that wait: of every flow, every rank and all.

local SPAN = 2 ^ 48 -- no share is as much: beyond it a flow would stand in another rank
local VAST = SPAN / 2 -- when the floor has come so far, shares are counted anew from it
local PAID, FLOOR, ALL = '!', ':', 'all' -- no tenant is named so
local TIES = 8 -- equally served tenants of which the older job is sought
local WINDOW = 64 -- waiting jobs that one call looks at
local MEMORY = 30000 -- ms after which the past counts 1/e in the rate
local ENOUGH, QUICKEST = 50, 3 -- with more jobs than that to count it fades faster, up to so many times

-- Shares ---------------------------------------------------------------------------------------------------------

local function flow_of(rank, tenant)
  return string.format('%02d:%s', rank, tenant)
end

local function score(rank, share)
  return whole(rank * SPAN + share)
end

local known_ranks -- nil when a flow has come or gone

local function ranks_waiting()
  if not known_ranks then
    known_ranks = {}
    local flow = redis.call('ZRANGE', FLOWS, 0, 0)[1]
    while flow do
      known_ranks[#known_ranks + 1] = tonumber(string.sub(flow, 1, 2))
      local from = score(known_ranks[#known_ranks] + 1, 0)
      flow = redis.call('ZRANGEBYSCORE', FLOWS, from, '+inf', 'LIMIT', 0, 1)[1]
    end
  end
  return known_ranks
end

local function share_of(tenant)
  local row = redis.call('HMGET', SHARES, tenant, FLOOR)
  return tonumber(row[1] or 1), tonumber(row[2] or 1)
end

local function weight_of(tenant)
  return tonumber(redis.call('HGET', SHARES, '*' .. tenant) or 1)
end

local function set_weight(tenant, weight)
  if weight ~= weight_of(tenant) then
    redis.call('HSET', SHARES, '*' .. tenant, weight)
    keep(SHARES)
  end
end

-- The least that any of those who wait was served, `floor` if nobody waits.
local function least_waiting(floor)
  local least = floor
  for _, rank in ipairs(ranks_waiting()) do
    local first = redis.call('ZRANGEBYSCORE', FLOWS, score(rank, 1), '(' .. score(rank + 1, 0), 'WITHSCORES', 'LIMIT', 0, 1)
    least = math.min(least, first[2] and first[2] - rank * SPAN or floor)
  end
  return least
end

-- Take from every share what all who wait have been served. Who has no more than that is forgotten: whoever begins to
-- wait is lifted so far.
local function count_anew(floor)
  local base = least_waiting(floor) - 1
  local flat = redis.call('HGETALL', SHARES)
  for index = 1, #flat, 2 do
    local tenant, rest = flat[index], tonumber(flat[index + 1]) - base
    local is_weight = string.sub(tenant, 1, 1) == '*'
    if not is_weight and rest > 0 then
      redis.call('HSET', SHARES, tenant, whole(rest))
    elseif not is_weight then
      redis.call('HDEL', SHARES, tenant, '*' .. tenant)
    end
  end
  for _, flow in ipairs(redis.call('ZRANGE', FLOWS, 0, -1)) do
    local rank, tenant = string.match(flow, '^(%d+):(.*)$')
    if tenant ~= PAID then
      redis.call('ZADD', FLOWS, 'XX', score(tonumber(rank), (share_of(tenant))), flow)
    end
  end
end

local function set_share(tenant, share, floor)
  share = math.min(share, SPAN - 1)
  redis.call('HSET', SHARES, tenant, whole(share), FLOOR, whole(floor))
  keep(SHARES)
  for _, rank in ipairs(ranks_waiting()) do
    redis.call('ZADD', FLOWS, 'XX', score(rank, share), flow_of(rank, tenant))
  end
  if floor > VAST then
    count_anew(floor)
  end
end

local function is_tenant_waiting(tenant)
  for _, rank in ipairs(ranks_waiting()) do
    if redis.call('ZSCORE', FLOWS, flow_of(rank, tenant)) then
      return true
    end
  end
  return false
end

-- Who waits is as far as it is; who did not wait had no right to what others were served meanwhile.
local function charge(tenant, cost, has_waited)
  local share, floor = share_of(tenant)
  if not has_waited and not is_tenant_waiting(tenant) then
    share = math.max(share, floor)
  end
  set_share(tenant, share + cost / weight_of(tenant), math.max(floor, share))
end

local function lift(rank, tenant)
  local first, behind = score(rank, 1), '(' .. score(rank + 1, 0)
  local least = redis.call('ZRANGEBYSCORE', FLOWS, first, behind, 'WITHSCORES', 'LIMIT', 0, 1)[2]
  local share, floor = share_of(tenant)
  set_share(tenant, math.max(share, least and least - rank * SPAN or floor), floor)
end

-- Rate -----------------------------------------------------------------------------------------------------------

-- Time counts only while somebody waits: then what is placed is what the workers can do.
local function load_rate()
  local row = redis.call('HMGET', PULSE, 'ticked', 'waits', 'busy', 'tokens', 'jobs')
  local passed = math.max(0, now - tonumber(row[1] or now))
  local fade = math.exp(-passed / MEMORY * math.max(1, math.min(QUICKEST, tonumber(row[5] or 0) / ENOUGH)))
  return {
    busy = tonumber(row[3] or 0) * fade + (row[2] == '1' and passed or 0),
    tokens = tonumber(row[4] or 0) * fade,
    jobs = tonumber(row[5] or 0) * fade,
  }
end

-- Somebody begins to wait, nobody waits any longer, or a job has left the waiting set for a worker.
local function tick(waits, tokens, jobs)
  local rate = load_rate()
  redis.call('HSET', PULSE, 'ticked', now, 'waits', waits and 1 or 0,
    'busy', tostring(rate.busy), 'tokens', tostring(rate.tokens + tokens), 'jobs', tostring(rate.jobs + jobs))
  keep(PULSE)
end

-- Waiting jobs ---------------------------------------------------------------------------------------------------

local function parse(member)
  local rank, tenant, arrival, cost, request = string.match(member, '^(%d+):([^:]*):(%d+):(%d+):(.*)$')
  return {
    member = member, flow = rank .. ':' .. tenant, rank = tonumber(rank), tenant = tenant, arrival = tonumber(arrival),
    cost = tonumber(cost), request = request,
  }
end

local function count_backlog(item, sign)
  for _, field in ipairs({item.flow, string.format('%02d', item.rank), ALL}) do
    redis.call('HINCRBY', BACKLOG, field, sign * item.cost)
  end
end

-- Later than whatever waits in its flow, even if the clock steps back.
local function arrival_behind(flow)
  local last = redis.call('ZREVRANGEBYLEX', WAITING, '(' .. flow .. ';', '[' .. flow .. ':', 'LIMIT', 0, 1)[1]
  return math.max(now_us, last and parse(last).arrival + 1 or 0)
end

-- `has_waited`: an older placement of the request stood here until just now.
local function enqueue(rank, tenant, arrival, cost, request, has_waited)
  if not has_waited and tenant ~= PAID and not is_tenant_waiting(tenant) then
    lift(rank, tenant)
  end
  local flow = flow_of(rank, tenant)
  local member = string.format('%s:%016.0f:%.0f:%s', flow, arrival, cost, request)
  redis.call('ZADD', WAITING, 0, member)
  if redis.call('ZADD', FLOWS, score(rank, tenant == PAID and 0 or share_of(tenant)), flow) == 1 then
    if redis.call('ZCARD', FLOWS) == 1 then
      tick(true, 0, 0)
    end
    known_ranks = nil
  end
  count_backlog({flow = flow, rank = rank, cost = cost}, 1)
  keep(WAITING, FLOWS, BACKLOG)
  return member
end

local function first_of(flow, from)
  return redis.call('ZRANGEBYLEX', WAITING, from or '[' .. flow .. ':', '(' .. flow .. ';', 'LIMIT', 0, 1)[1]
end

-- `served` tokens: the job was given to a worker.
local function dequeue(member, served)
  if redis.call('ZREM', WAITING, member) == 0 then
    return
  end
  local item = parse(member)
  count_backlog(item, -1)
  local waits = true
  if not first_of(item.flow) then
    redis.call('ZREM', FLOWS, item.flow)
    redis.call('HDEL', BACKLOG, item.flow)
    known_ranks, waits = nil, redis.call('ZCARD', FLOWS) > 0
  end
  if served or not waits then
    tick(waits, served and item.cost or 0, served and 1 or 0)
  end
end

-- Redis has lost one of these keys and not the others, or the last job went in a way that nobody saw.
local function mend()
  if redis.call('ZCARD', WAITING) == 0 then
    redis.call('DEL', FLOWS, BACKLOG)
  elseif redis.call('ZCARD', FLOWS) == 0 then
    local member = redis.call('ZRANGEBYLEX', WAITING, '-', '+', 'LIMIT', 0, 1)[1]
    while member do
      local item = parse(member)
      redis.call('ZADD', FLOWS, score(item.rank, item.tenant == PAID and 0 or share_of(item.tenant)), item.flow)
      member = redis.call('ZRANGEBYLEX', WAITING, '(' .. item.flow .. ';', '+', 'LIMIT', 0, 1)[1]
    end
  end
end

-- Turns ----------------------------------------------------------------------------------------------------------

-- Where this call is in each flow: the next job, or behind the last one that was passed over.
local looks, num_closed = {}, 0

local function next_of(flow)
  local look = looks[flow]
  if not look then
    look = {}
    looks[flow] = look
  end
  if not look.closed and not look.item then
    local member = first_of(flow, look.from)
    look.item = member and parse(member)
    look.closed = not member
    num_closed = num_closed + (member and 0 or 1)
  end
  return look.item
end

-- No lane of this call can hold the job: it keeps its place, and this call goes on behind it.
local function pass(item)
  looks[item.flow] = {from = '(' .. item.member}
end

-- The job waits no longer.
local function go_on(item)
  looks[item.flow].item = nil
end

local function next_of_rank(rank)
  local first, behind = score(rank, 0), '(' .. score(rank + 1, 0)
  while true do
    local limit, best, least = num_closed + TIES, nil, nil
    local rows = redis.call('ZRANGEBYSCORE', FLOWS, first, behind, 'WITHSCORES', 'LIMIT', 0, limit)
    for index = 1, #rows, 2 do
      if best and rows[index + 1] ~= least then
        break
      end
      local item = next_of(rows[index])
      if item and (not best or item.arrival < best.arrival) then
        best, least = item, rows[index + 1]
      end
    end
    if best or #rows < 2 * limit then
      return best
    end
  end
end

local function next_job()
  local best, most
  for _, rank in ipairs(ranks_waiting()) do
    local item = next_of_rank(rank)
    if item then
      local urgency = (now_us - item.arrival) / 1000 / AGEING - rank
      if not best or urgency > most then
        best, most = item, urgency
      end
    end
  end
  return best
end
