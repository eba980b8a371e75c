"""The steps that a Redis server does as one. The same contract as the Rust side's: each may run twice and gives the same
answer, and all keys of a script are in one slot.
"""

CHANNEL = "triptych:ec:events"
"""Channel of notifications that a key's object was stored or its lease released; the message is the key's bytes."""

PUBLISH = """
local is_set = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[2])
if not is_set and redis.pcall('STRLEN', KEYS[1]) == 0 then
  is_set = redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
if is_set then
  redis.pcall('PUBLISH', ARGV[3], ARGV[4])
  return 1
end
local n = tonumber(ARGV[5])
if redis.pcall('GETRANGE', KEYS[1], 0, n - 1) == string.sub(ARGV[1], 1, n) then return 1 end
return 0"""

REMOVE_IF_SAME = """
if redis.call('GETRANGE', KEYS[1], 0, string.len(ARGV[1]) - 1) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end
return 0"""

ACQUIRE = """
local held, left = redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])
if held and left > 0 then
  local token, asker = string.match(held, '^(%d+):(%x+)$')
  if asker == ARGV[1] then return {token, 0} end
  return {'', left}
end
local time = redis.call('TIME')
local next = (tonumber(redis.call('GET', KEYS[2])) or 0) + 1
local token = string.format('%.0f', math.max(next, time[1] * 1000 + math.floor(time[2] / 1000)))
redis.call('SET', KEYS[2], token, 'EX', ARGV[3])
redis.call('SET', KEYS[1], token .. ':' .. ARGV[1], 'PX', ARGV[2])
return {token, 0}"""

RENEW = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^(%d+):') == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0"""

RELEASE = """
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, '^(%d+):') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1])
redis.pcall('PUBLISH', ARGV[2], ARGV[3])
return 1"""
