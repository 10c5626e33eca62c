-- First part of the prelude of every script that moves jobs: keys, clock and leases. `order` and `lanes` follow.
--
-- KEYS 1-10: workers gateways waiting parked places ages pulse flows shares backlog; behind them four per lane: stream,
-- held, prefixes, sum.
-- ARGV 1-4: stream TTL, record TTL, gateway TTL, ageing, in ms. ARG is the offset of a script's own arguments.
--
-- A worker is {epoch, expires, seen, open, total, free, seats, busy, absorbed, former, fingerprint}; `open`: a ready
-- decode worker.

local WORKERS, GATEWAYS, WAITING, PARKED, PLACES, AGES, PULSE, FLOWS, SHARES, BACKLOG = unpack(KEYS, 1, 10)
local FIRST_LANE, KEYS_PER_LANE = 11, 4
local STREAM_TTL, RECORD_TTL, GATEWAY_TTL = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local AGEING = tonumber(ARGV[4])
local ARG = 4
local KEEP = 3600000 -- ms that a key outlives its last write

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

local function load_row(key, field)
  local packed = redis.call('HGET', key, field)
  return packed and cmsgpack.unpack(packed)
end

local function keep(...)
  for _, key in ipairs({...}) do
    redis.call('PEXPIRE', key, KEEP)
  end
end

local function whole(number)
  return string.format('%.0f', number)
end

-- Nobody could beat while Redis was away: leases that ended meanwhile count for one more TTL.
local function keep_pulse()
  local last = tonumber(redis.call('HGET', PULSE, 'last') or now)
  if now - last > GATEWAY_TTL / 2 then
    redis.call('HSET', PULSE, 'grace', now + GATEWAY_TTL)
  end
  redis.call('HSET', PULSE, 'last', now)
  keep(PULSE)
end

local function renew_lease(gateway)
  redis.call('ZADD', GATEWAYS, now + GATEWAY_TTL, gateway)
  keep(GATEWAYS)
end

local function has_lease(gateway)
  local ends = tonumber(redis.call('ZSCORE', GATEWAYS, gateway) or 0)
  return ends > now or tonumber(redis.call('HGET', PULSE, 'grace') or 0) > now
end
