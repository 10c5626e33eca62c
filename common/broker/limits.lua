-- Prelude of every script that counts what a tenant uses.
--
-- KEYS 1-5: requests tokens permits leases over. ARGV 1-4: length of a step of the window and TTL of a lease in ms,
-- 1 while Redis was away lately (then no lease counts as ended), the request. ARG is the offset of a script's own
-- arguments.
--
-- A window is a hash: number of a step -> what was charged in it. A permit is {choices, step, tokens, charged}: `tokens`
-- were charged in step `charged` (nil: they have no limit), the request itself in `step`. A lease is a member per
-- choice: "<request>", "<request>#1", ... `over` holds requests that were released lately: what arrives late for them is
-- ignored.

local REQUESTS, TOKENS, PERMITS, LEASES, OVER = unpack(KEYS)
local STEP, LEASE_TTL, IS_GRACE, REQUEST = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1', ARGV[4]
local ARG = 4
local NUM_STEPS = 60

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local step = math.floor(now / STEP)

-- Windows --------------------------------------------------------------------------------------------------------

local function leaves_in(charged_at)
  return (charged_at + NUM_STEPS + 1) * STEP - now
end

-- What counts now of a limit; nil without a limit. `newest`: the last step in which anything was charged.
local function load_window(key, limit)
  if not limit then
    return nil
  end
  local window = {key = key, limit = limit, total = 0, charges = {}, newest = nil}
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local charge = {step = tonumber(flat[i]), amount = tonumber(flat[i + 1])}
    if math.abs(charge.step - step) > NUM_STEPS or charge.amount <= 0 then -- ahead: the clock was set back
      redis.call('HDEL', key, flat[i])
    else
      window.total = window.total + charge.amount
      window.charges[#window.charges + 1] = charge
      window.newest = math.max(charge.step, window.newest or 0)
    end
  end
  return window
end

-- Milliseconds until `amount` fits: 0 is now. Nothing always fits, also where more was used than allowed.
local function wait_for(window, amount)
  local excess = window and amount > 0 and window.total + amount - window.limit or 0
  if excess <= 0 then
    return 0
  end
  table.sort(window.charges, function(a, b) return a.step < b.step end)
  for _, charge in ipairs(window.charges) do
    excess = excess - charge.amount
    if excess <= 0 then
      return leaves_in(charge.step)
    end
  end
  return leaves_in(step) -- never, if nothing changes
end

-- Change what was charged in a step.
local function add(key, charged_at, amount)
  redis.call('HINCRBY', key, charged_at, string.format('%.0f', amount))
  redis.call('PEXPIRE', key, 2 * NUM_STEPS * STEP)
end

local function charge(window, amount)
  if window and amount > 0 then
    add(window.key, step, amount)
    window.total, window.newest = window.total + amount, math.max(step, window.newest or 0)
  end
end

-- Take back what was charged in an earlier step, unless it counts no more.
local function refund(key, charged_at, amount)
  local there = tonumber(redis.call('HGET', key, charged_at) or 0)
  if amount > 0 and there > 0 then
    add(key, charged_at, -math.min(there, amount))
  end
end

-- {what is charged, ms until nothing is}, {} without a limit.
local function used(window)
  if not window then
    return {}
  end
  return {window.total, window.newest and leaves_in(window.newest) or 0}
end

-- Permits --------------------------------------------------------------------------------------------------------

local function load_permit(request)
  local packed = redis.call('HGET', PERMITS, request)
  return packed and cmsgpack.unpack(packed)
end

local function member(request, choice)
  return choice == 0 and request or request .. '#' .. choice
end

local function hold(request, permit)
  redis.call('HSET', PERMITS, request, cmsgpack.pack(permit))
  for choice = 0, permit.choices - 1 do
    redis.call('ZADD', LEASES, now + LEASE_TTL, member(request, choice))
  end
  redis.call('PEXPIRE', PERMITS, 10 * LEASE_TTL)
  redis.call('PEXPIRE', LEASES, 10 * LEASE_TTL)
end

local function let_go(request, permit)
  redis.call('HDEL', PERMITS, request)
  for choice = 0, permit.choices - 1 do
    redis.call('ZREM', LEASES, member(request, choice))
  end
end

-- Forget whose gateway renews no more; while Redis was away nobody could.
local function sweep()
  if IS_GRACE then
    return
  end
  for _, ended in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do
    redis.call('ZREM', LEASES, ended)
    redis.call('HDEL', PERMITS, ended)
  end
end

local function is_over(request)
  return redis.call('ZSCORE', OVER, request) ~= false
end

local function end_for_good(request)
  redis.call('ZREMRANGEBYSCORE', OVER, '-inf', now)
  redis.call('ZADD', OVER, now + LEASE_TTL, request)
  redis.call('PEXPIRE', OVER, LEASE_TTL)
end
