-- A worker's heartbeat. KEYS behind the prelude's: its lane, records, loads, card.
-- Behind the prelude's arguments: worker, epoch, record, load, worker TTL in ms, open (0/1), total and free blocks, free
-- seats, busy sequences, absorbed entry or '', card TTL in ms, fingerprint. Answers {'superseded'} or {'beaten', card exists (0/1)}.

local name, epoch, record, load = ARGV[ARG + 1], ARGV[ARG + 2], ARGV[ARG + 3], ARGV[ARG + 4]
local ttl, is_open = tonumber(ARGV[ARG + 5]), ARGV[ARG + 6] == '1'
local total, free = tonumber(ARGV[ARG + 7]), tonumber(ARGV[ARG + 8])
local seats, busy = tonumber(ARGV[ARG + 9]), tonumber(ARGV[ARG + 10])
local absorbed, card_ttl = ARGV[ARG + 11], tonumber(ARGV[ARG + 12])
local stream, held, prefixes = unpack(KEYS, FIRST_LANE, FIRST_LANE + 2)
local RECORDS, LOADS, CARD = unpack(KEYS, FIRST_LANE + KEYS_PER_LANE, FIRST_LANE + KEYS_PER_LANE + 2)

local function parts(entry)
  local ms, seq = string.match(entry, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

local function is_behind(entry, other)
  local ms, seq = parts(entry)
  local other_ms, other_seq = parts(other)
  return ms > other_ms or (ms == other_ms and seq > other_seq)
end

-- Entries up to `absorbed` are part of the load from now on: their reservations end in the same step.
local function absorb()
  for _, entry in ipairs(redis.call('HKEYS', held)) do
    if not is_behind(entry, absorbed) then
      redis.call('HDEL', held, entry)
    end
  end
  local ms, seq = parts(absorbed)
  if redis.call('EXISTS', stream) == 1 then
    redis.call('XTRIM', stream, 'MINID', '=', string.format('%.0f-%.0f', ms, seq + 1))
  elseif ms + seq > 0 then
    -- Redis lost the stream: new entries must come behind those read, whatever its clock says now.
    redis.call('XADD', stream, absorbed, 'floor', '')
    redis.call('XDEL', stream, absorbed)
  end
end

local before = load_row(WORKERS, name)
local former
if before and before.epoch == epoch then
  former = before.former
elseif before then
  if before.former == epoch and before.expires > now then
    return {'superseded'}
  end
  former, before = before.epoch, nil
end

if absorbed ~= '' and before and before.absorbed and is_behind(before.absorbed, absorbed) then
  -- An outdated beat, overtaken on its way: its figures know less than those stored.
  free, seats, busy, absorbed = before.free, before.seats, before.busy, before.absorbed
elseif absorbed ~= '' then
  absorb()
end

redis.call('HSET', WORKERS, name, cmsgpack.pack({
  epoch = epoch, expires = now + ttl, seen = now, open = is_open, total = total, free = free, seats = seats,
  busy = busy, absorbed = absorbed ~= '' and absorbed or nil, former = former,
  fingerprint = ARGV[ARG + 13],
}))
redis.call('HSET', RECORDS, name, record)
redis.call('HSET', LOADS, name, load)
keep(WORKERS, RECORDS, LOADS)
for _, key in ipairs({stream, held, prefixes, KEYS[FIRST_LANE + 3]}) do
  redis.call('PEXPIRE', key, STREAM_TTL)
end

keep_pulse()
sweep()
drain({open_lane(0, name, epoch, 0)})
return {'beaten', redis.call('PEXPIRE', CARD, card_ttl)}
