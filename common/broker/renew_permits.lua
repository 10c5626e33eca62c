-- Renew leases. Behind the prelude's arguments (its request is ''): pairs of request and choices.

for i = ARG + 1, #ARGV, 2 do
  local request = ARGV[i]
  if not is_over(request) then
    hold(request, load_permit(request) or {choices = tonumber(ARGV[i + 1]), step = step})
  end
end
return 1
