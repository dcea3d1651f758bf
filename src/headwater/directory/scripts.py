"""The directory as Lua: each script is a verb of `core.directory.Records`, and a server runs one at a time.

Everything is under one prefix, `KEYS[1]`, whose hash tag keeps it on one server:

    meta            hash    generation, last number, version of the members, when a life ended, how far the sweep is
    names           hash    a member's name -> number, epoch (20 digits)
    awake, silent   zset    number, by its last beat in the server's milliseconds
    life:NUMBER     hash    member (JSON), name, serial, standing, report
    chunks          hash    a chunk's name -> its holders

A number is 6 bytes, big-endian, and the time in it keeps it unique even where a replica that lagged behind takes over.
A holder is a number and a byte of tiers. One hash for all chunks costs less memory than a key for each, and one command
a call instead of hundreds; servers grow it in small steps, as they do their own table of keys. They keep a small hash
as a list that each lookup walks along, but not one in which there ever was a long value: each batch brings one along.

What another program wrote there must do no harm: chunks of the wrong type are dropped, an entry of the wrong length
counts as empty, numbers are read with a default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1

from headwater.core.directory import MOST_HOLDERS, TICKS_A_SECOND
from headwater.types import NAME_BYTES

NUMBER_BYTES = 6
MOST_NUMBER = (1 << 48) - (1 << 20)
HOLDER_BYTES = NUMBER_BYTES + 1
PRESENT = 4
"""The bit of a change that says that the chunk is there now; the others are `core.directory.bit_of`."""
_LONG_BYTES = 1024
"""Of a value: more than any server keeps in a list, which is 64 unless it was told otherwise."""

_CLOCK = """
local P = KEYS[1]
local call, pcall = redis.call, redis.pcall
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local silent_at, forgotten_at = now - tonumber(ARGV[1]), now - tonumber(ARGV[2])
"""

_ALIVE = """
local known = {}
local function alive(number)
  local answer = known[number]
  if answer == nil then
    local heard = call('ZSCORE', P..'awake', number) or call('ZSCORE', P..'silent', number)
    answer = heard and tonumber(heard) > forgotten_at or false
    known[number] = answer
  end
  return answer
end
"""

_MEMBERS = """
local function stamp(what)
  local value = tonumber(call('HGET', P..'meta', what)) or 0
  value = (value >= now and value < 2 ^ 52) and value + 1 or now
  call('HSET', P..'meta', what, string.format('%.0f', value))
end
local function bump() stamp('version') end
-- What others must hear of comes first: whatever fails after it will not fail unseen.
local function finish(number)
  bump()
  stamp('ended')
  local life = P..'life:'..number
  local name = call('HGET', life, 'name')
  if name then
    local entry = call('HGET', P..'names', name)
    if entry and entry:sub(1, 6) == number then call('HDEL', P..'names', name) end
  end
  call('DEL', life)
  call('ZREM', P..'awake', number)
  call('ZREM', P..'silent', number)
end
-- Beats of the future are those of a server whose clock was ahead. Who was silent by it stays silent.
local function settle()
  for set, latest in pairs({awake = now, silent = silent_at}) do
    local at = string.format('%.0f', latest)
    for _, number in ipairs(call('ZRANGEBYSCORE', P..set, '('..at, '+inf')) do call('ZADD', P..set, at, number) end
  end
  local late = call('ZRANGEBYSCORE', P..'awake', '-inf', string.format('%.0f', silent_at), 'WITHSCORES')
  for i = 1, #late, 2 do
    call('ZREM', P..'awake', late[i])
    call('ZADD', P..'silent', late[i + 1], late[i])
    bump()
  end
  for _, number in ipairs(call('ZRANGEBYSCORE', P..'silent', '-inf', string.format('%.0f', forgotten_at))) do
    finish(number)
  end
end
local function heard(number)
  if call('ZREM', P..'silent', number) == 1 then bump() end
  call('ZADD', P..'awake', string.format('%.0f', now), number)
end
"""

# One HMGET for all chunks of a call: a command for each would cost four times as much.
_ENTRIES = f"""
local chunks = P..'chunks'
local function entries_of(first)
  if #ARGV < first then return {{}} end
  local entries = pcall('HMGET', chunks, unpack(ARGV, first))
  if not entries.err then return entries end
  if not entries.err:find('WRONGTYPE', 1, true) then error(entries) end
  return {{}}, true
end
local function survivors(entry)
  local kept = {{}}
  if #entry % {HOLDER_BYTES} == 0 and #entry <= {HOLDER_BYTES * MOST_HOLDERS} then
    for at = 1, #entry, {HOLDER_BYTES} do
      local tiers = entry:byte(at + {NUMBER_BYTES})
      if tiers >= 1 and tiers <= 3 and alive(entry:sub(at, at + {NUMBER_BYTES - 1})) then
        kept[#kept + 1] = entry:sub(at, at + {NUMBER_BYTES})
      end
    end
  end
  return kept
end
"""

_JOIN = f"""
local name, epoch, member, generation = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
settle()
call('HSETNX', P..'meta', 'generation', generation)
local entry = call('HGET', P..'names', name)
if entry and #entry == 26 then
  local number, before = entry:sub(1, 6), entry:sub(7)
  if call('ZSCORE', P..'awake', number) or call('ZSCORE', P..'silent', number) then
    if before > epoch then return {{'older', before}} end
    if before == epoch then
      if call('HGET', P..'life:'..number, 'member') ~= member then
        call('HSET', P..'life:'..number, 'member', member)
        bump()
      end
      heard(number)
      return {{'number', number}}
    end
  end
  finish(number)
end
local last = tonumber(call('HGET', P..'meta', 'last')) or 0
local tick = time[1] * {TICKS_A_SECOND} + math.floor(time[2] * {TICKS_A_SECOND} / 1000000)
last = (last >= tick and last < {MOST_NUMBER}) and last + 1 or tick
call('HSET', P..'meta', 'last', string.format('%.0f', last))
local digits, rest = {{}}, last
for at = 6, 1, -1 do
  digits[at] = string.char(rest % 256)
  rest = math.floor(rest / 256)
end
local number = table.concat(digits)
call('DEL', P..'life:'..number)
call('HSET', P..'life:'..number, 'member', member, 'name', name, 'serial', '0', 'standing', 'serving', 'report', '')
call('HSET', P..'names', name, number..epoch)
call('ZADD', P..'awake', string.format('%.0f', now), number)
bump()
return {{'number', number}}
"""

_BEAT = """
local number, standing, report, generation = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
settle()
local life = P..'life:'..number
if not (call('ZSCORE', P..'awake', number) or call('ZSCORE', P..'silent', number)) then return {} end
if call('HGET', life, 'standing') ~= standing then bump() end
call('HSET', life, 'standing', standing, 'report', report)
heard(number)
call('HSETNX', P..'meta', 'generation', generation)
local meta = call('HMGET', P..'meta', 'generation', 'version')
return {meta[1], call('HGET', life, 'serial') or '0', meta[2] or '0'}
"""

# The same change of the same entry gives the same: of a batch most are alike. Slices, because Lua passes no more than
# 8,000 values at once.
_ANNOUNCE = f"""
local me, serial, kinds = ARGV[3], tonumber(ARGV[4]), ARGV[5]
local life = P..'life:'..me
if not alive(me) then return -1 end
local last = tonumber(call('HGET', life, 'serial')) or 0
if serial > last + 1 then return last end
local function change(entry, tiers, present)
  local kept, mine, place = survivors(entry), 0, nil
  for at, holder in ipairs(kept) do
    if holder:sub(1, {NUMBER_BYTES}) == me then place, mine = at, holder:byte({HOLDER_BYTES}) end
  end
  local others = place and #kept - 1 or #kept
  if present then
    if mine % (2 * tiers) < tiers then mine = mine + tiers end
    if place or others < {MOST_HOLDERS} then kept[place or others + 1] = me..string.char(mine) end
  elseif place then
    if mine % (2 * tiers) >= tiers then mine = mine - tiers end
    if mine == 0 then table.remove(kept, place) else kept[place] = me..string.char(mine) end
  end
  return {{table.concat(kept), string.char(others)}}
end
local entries, is_wrong = entries_of(6)
local before, after, counts, done = {{}}, {{}}, {{}}, {{}}
for at = 1, #kinds do
  local kind, name = kinds:byte(at), ARGV[at + 5]
  local entry = after[name]
  if not entry then
    entry = entries[at] or ''
    before[name] = entry
  end
  local alike = done[kind] or {{}}
  done[kind] = alike
  local result = alike[entry]
  if not result then
    result = change(entry, kind % {PRESENT}, kind >= {PRESENT})
    alike[entry] = result
  end
  after[name], counts[at] = result[1], result[2]
end
if serial == last + 1 then
  if is_wrong then call('DEL', chunks) end
  local put, drop = {{'', string.rep(' ', {_LONG_BYTES})}}, {{''}}
  for name, entry in pairs(after) do
    if entry == '' then
      if before[name] ~= '' then drop[#drop + 1] = name end
    elseif entry ~= before[name] then
      put[#put + 1] = name
      put[#put + 1] = entry
    end
  end
  if #put > 2 then
    for at = 1, #put, 4000 do call('HSET', chunks, unpack(put, at, math.min(at + 3999, #put))) end
  end
  if #put > 2 or #drop > 1 then call('HDEL', chunks, unpack(drop)) end
  call('HSET', life, 'serial', string.format('%.0f', serial))
end
return table.concat(counts)
"""

_LOCATE = """
local entries, done, found = entries_of(3), {}, {}
for at = 1, #ARGV - 2 do
  local entry = entries[at] or ''
  local result = done[entry]
  if not result then
    local kept = survivors(entry)
    result = string.char(#kept)..table.concat(kept)
    done[entry] = result
  end
  found[at] = result
end
return table.concat(found)
"""

_LIST = """
local found = {}
for _, set in ipairs({'awake', 'silent'}) do
  local scores = call('ZRANGEBYSCORE', P..set, '('..string.format('%.0f', forgotten_at), '+inf', 'WITHSCORES')
  for i = 1, #scores, 2 do
    local it = call('HMGET', P..'life:'..scores[i], 'member', 'standing', 'report')
    local silent = set == 'silent' or tonumber(scores[i + 1]) <= silent_at
    local standing = silent and 'silent' or it[2] or ''
    found[#found + 1] = {scores[i], now - tonumber(scores[i + 1]), it[1] or '', standing, it[3] or ''}
  end
end
return found
"""

_LEAVE = """
local number = ARGV[3]
settle()
if call('ZSCORE', P..'awake', number) or call('ZSCORE', P..'silent', number) then finish(number) end
return 1
"""

# All who sweep share one round: `place` is where it is, `begun` what had ended when it began.
_SWEEP = f"""
settle()
local meta = call('HMGET', P..'meta', 'ended', 'swept', 'place', 'begun')
local ended, place, begun = meta[1] or '0', meta[3] or '0', meta[4] or ''
if not place:find('^%d+$') then place = '0' end
if place == '0' then
  if (meta[2] or '0') == ended then return 0 end
  call('HSET', P..'meta', 'begun', ended)
  begun = ended
end
local found = pcall('HSCAN', chunks, place, 'COUNT', ARGV[3])
if found.err then
  if not found.err:find('WRONGTYPE', 1, true) then error(found) end
  call('DEL', chunks)
  found = {{'0', {{}}}}
end
local entries = found[2]
for at = 1, #entries, 2 do
  local kept = table.concat(survivors(entries[at + 1]))
  if kept == '' or #entries[at] ~= {NAME_BYTES} then
    call('HDEL', chunks, entries[at])
  elseif kept ~= entries[at + 1] then
    call('HSET', chunks, entries[at], kept)
  end
end
call('HSET', P..'meta', 'place', found[1])
if found[1] ~= '0' then return 1 end
call('HSET', P..'meta', 'swept', begun)
return begun == ended and 0 or 1
"""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the digest by which a server calls it."""

    body: bytes
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", sha1(self.body, usedforsecurity=False).hexdigest().encode())


def _script(flags: str, *parts: str) -> Script:
    """`allow-oom`: a full server still hears who is alive and what has gone. `no-writes`: replicas answer, too."""
    shebang = f"#!lua flags={flags}" if flags else "#!lua"
    return Script(shebang.encode() + _CLOCK.encode() + "".join(parts).encode())


JOIN = _script("", _MEMBERS, _JOIN)
BEAT = _script("allow-oom", _MEMBERS, _BEAT)
ANNOUNCE = _script("", _ALIVE, _ENTRIES, _ANNOUNCE)
LOCATE = _script("no-writes", _ALIVE, _ENTRIES, _LOCATE)
LIST = _script("no-writes", _LIST)
LEAVE = _script("allow-oom", _MEMBERS, _LEAVE)
SWEEP = _script("allow-oom", _ALIVE, _MEMBERS, _ENTRIES, _SWEEP)
