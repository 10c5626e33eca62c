-- Withdraw a placement and older ones. Behind the prelude's arguments: request, placement, then (worker, epoch) of the
-- lane named by an earlier answer, if any. Answers {'done'} or {'elsewhere', worker, epoch}: call again with that lane.

local request, placement = ARGV[ARG + 1], tonumber(ARGV[ARG + 2])
local lanes = {}
if ARGV[ARG + 3] then
  lanes[1] = open_lane(0, ARGV[ARG + 3], ARGV[ARG + 4], 0)
end

sweep()
local place = load_row(PLACES, request)
if place and place.placement > placement then
  return {'done'}
elseif place and not remove(request, place, lanes) then
  return {'elsewhere', place.worker, place.epoch}
end
remember(request, {
  placement = placement, state = 'withdrawn', arrival = place and place.arrival, paid = place and place.paid,
})
drain(lanes)
return {'done'}
