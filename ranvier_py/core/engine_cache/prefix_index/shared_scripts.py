"""What Redis does for the shared index: four scripts in Lua, each one atomic step, and what is kept there.

Keys, P being the operator's prefix and G the generation:

    P meta          hash    generation; cleared: when an operator last cleared; swept: the oldest generation still there
    P G:p:<prefix>  hash    backend -> "<tokens> <h|w|x> <sequence> <end>": hot, warm, or removed
    P G:order       zset    "<prefix> <backend>" by its end, for the bound and for what has expired
    P G:void        hash    backend -> sequence: what was said of it before counts no more

A sequence is the moment at which an event was heard, in microseconds of Redis's own clock: routers' clocks never meet.
An end is in milliseconds of it. Rules:

- The later sequence wins, whoever comes later. What was removed is remembered for a while, so that a claim that was
  on its way does not bring it back. A sequence far in the future is none.
- Nothing is written or read in a generation that is not the current one. Who lost touch with Redis while it was current
  ends it (HELLO), since what he could not say is missing there; a clear ends it too.
- What can't be read, by type, size or form, is counted and left out; what stands where we write is replaced.
- At the bound what ends first goes. What no script comes by, its keys' own expiry removes.

Source: Continuum Router, «KV cache optimization», tier 4; resolutions CX19, CX20. Needs Redis 5 or Valkey, no cluster.
Cost with Redis 7.0, client included, in full calls: 7 us a write, 16 us a question.
"""

from __future__ import annotations

from collections.abc import Mapping

AHEAD_US = 5_000_000
"""A router's idea of Redis's time is off by half a round trip, hence at most by this; more is garbage."""

CALL_STEPS_MAX = 256
"""Entries that one call sweeps beyond its own: under a millisecond, in which Redis serves nobody else."""

COMMON = """
local root, meta = KEYS[1], KEYS[1] .. 'meta'
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local now_ms = math.floor(now / 1000)
local garbage = 0
local function digits(number) return string.format('%.0f', number) end
local function kind(key) return redis.call('TYPE', key)['ok'] end
local function whole(text)
  if text and #text <= 16 and string.find(text, '^%d+$') then return tonumber(text) end
end
local function said(name, most)
  local number = kind(meta) == 'hash' and whole(redis.call('HGET', meta, name)) or 0
  return number <= most and number or 0
end
local function generation_said() return said('generation', 1e15) end
local function cleared_said() return said('cleared', now) end
local function state() return {digits(generation_said()), digits(cleared_said()), digits(now)} end
local function fit(key, wanted)
  local found = kind(key)
  if found ~= wanted and found ~= 'none' then
    redis.call('UNLINK', key)
    garbage = garbage + 1
  end
end
"""

CURRENT = """
local generation = generation_said()
if generation ~= tonumber(ARGV[1]) then return {state()} end
local cleared = cleared_said()
local data = root .. digits(generation) .. ':'
local order, void = data .. 'order', data .. 'void'
local void_is_one = kind(void) == 'hash'
local voids = {}
local function voided(name)
  if not void_is_one then return 0 end
  if voids[name] == nil then
    local seq = whole(redis.call('HGET', void, name)) or 0
    voids[name] = seq <= now + AHEAD and seq or 0
  end
  return voids[name]
end
local function entry(key, name)
  local size = redis.call('HSTRLEN', key, name)
  if size == 0 then return nil end
  local tokens, tier, seq, ends
  if size <= 64 then
    tokens, tier, seq, ends = string.match(redis.call('HGET', key, name), '^(%d+) ([hwx]) (%d+) (%d+)$')
  end
  if not tokens or tonumber(seq) > now + AHEAD then
    garbage = garbage + 1
    return nil
  end
  return tonumber(tokens), tier, tonumber(seq), tonumber(ends)
end
local function drop(member)
  local prefix, name = string.match(member, '^(%x+) (.+)$')
  if prefix and kind(data .. 'p:' .. prefix) == 'hash' then redis.call('HDEL', data .. 'p:' .. prefix, name) end
end
local function expire(most)
  local gone = redis.call('ZRANGEBYSCORE', order, '-inf', now_ms, 'LIMIT', 0, most)
  for _, member in ipairs(gone) do
    drop(member)
    redis.call('ZREM', order, member)
  end
  return #gone
end
"""

HELLO = """
local believed, clear = tonumber(ARGV[1]), ARGV[2] == '1'
fit(meta, 'hash')
local generation = generation_said()
local ours = 0
if clear or generation == 0 or (believed > 0 and generation <= believed) then
  generation = math.max(generation, believed) + 1
  ours = 1
  redis.call('HSET', meta, 'generation', digits(generation))
  if clear then redis.call('HSET', meta, 'cleared', digits(now)) end
end
return {state(), {ours, garbage}}
"""

WRITE = """
local entries_max, kept_ms, ttl_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local applied, refused, longest = 0, 0, 0
local function lasts(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end
fit(order, 'zset')
fit(void, 'hash')
void_is_one = true
for _, one in ipairs(cjson.decode(ARGV[5])) do
  local prefix, name, seq, verb, tokens, left = unpack(one)
  local key = data .. 'p:' .. prefix
  if seq > now + AHEAD then seq = now end
  if verb == 'v' then
    if seq > voided(name) then
      redis.call('HSET', void, name, digits(seq))
      lasts(void, ttl_ms)
      voids[name] = seq
    end
    applied = applied + 1
  else
    fit(key, 'hash')
    local known, tier, last, ends = entry(key, name)
    local alive = known and tier ~= 'x' and ends > now_ms and last > voided(name) and last > cleared
    if (last and seq <= last) or seq <= voided(name) or seq <= cleared then
      refused = refused + 1
    else
      applied = applied + 1
      if verb ~= 'c' or alive then
        if verb == 'x' then
          tokens, left = 0, kept_ms
        elseif tokens < 0 then
          tokens = alive and known or 0
        end
        tier = verb == 'c' and 'w' or verb
        ends = now_ms + left
        redis.call('HSET', key, name, digits(tokens) .. ' ' .. tier .. ' ' .. digits(seq) .. ' ' .. digits(ends))
        redis.call('ZADD', order, ends, prefix .. ' ' .. name)
        lasts(key, left)
        longest = math.max(longest, left)
      end
    end
  end
end
if longest > 0 then lasts(order, longest) end
local gone = expire(STEPS)
local over = redis.call('ZCARD', order) - entries_max
local evicted = over > 0 and redis.call('ZPOPMIN', order, math.min(over, STEPS)) or {}
for at = 1, #evicted, 2 do drop(evicted[at]) end
return {state(), {applied, refused, garbage, gone, #evicted / 2}}
"""

ASK = """
local answers = {}
for at, prefix in ipairs(cjson.decode(ARGV[2])) do
  local found, key = {}, data .. 'p:' .. prefix
  local sort = kind(key)
  if sort == 'hash' and redis.call('HLEN', key) <= 1024 then
    for _, name in ipairs(redis.call('HKEYS', key)) do
      if #name <= 256 then
        local tokens, tier, seq, ends = entry(key, name)
        if tokens and tier ~= 'x' and ends > now_ms and seq > voided(name) and seq > cleared then
          table.insert(found, name)
          table.insert(found, digits(tokens) .. ' ' .. tier .. ' ' .. digits(seq) .. ' ' .. digits(ends))
        end
      else
        garbage = garbage + 1
      end
    end
  elseif sort ~= 'none' then
    garbage = garbage + 1
  end
  answers[at] = found
end
return {state(), {garbage}, answers}
"""

TICK = """
local gone, swept, rows = 0, said('swept', 1e15), 0
if kind(order) == 'zset' then
  gone = expire(STEPS)
  rows = redis.call('ZCARD', order)
end
swept = math.max(swept, 1, generation - 1000)
for _ = 1, 8 do
  if swept >= generation then break end
  local old = root .. digits(swept) .. ':'
  local members = kind(old .. 'order') == 'zset' and redis.call('ZPOPMIN', old .. 'order', STEPS) or {}
  for at = 1, #members, 2 do
    local prefix = string.match(members[at], '^(%x+) ')
    if prefix then redis.call('UNLINK', old .. 'p:' .. prefix) end
  end
  if #members > 0 then break end
  redis.call('UNLINK', old .. 'order', old .. 'void')
  swept = swept + 1
end
redis.call('HSET', meta, 'swept', digits(swept))
local all = {}
if void_is_one and redis.call('HLEN', void) <= 1024 then
  for _, name in ipairs(redis.call('HKEYS', void)) do
    if #name <= 256 then
      table.insert(all, name)
      table.insert(all, digits(voided(name)))
    end
  end
end
return {state(), {rows, gone, garbage}, all}
"""


def whole_script(*parts: str) -> str:
    return "\n".join(parts).replace("STEPS", str(CALL_STEPS_MAX)).replace("AHEAD", str(AHEAD_US))


SCRIPTS: Mapping[str, str] = {
    "hello": whole_script(COMMON, HELLO),
    "write": whole_script(COMMON, CURRENT, WRITE),
    "ask": whole_script(COMMON, CURRENT, ASK),
    "tick": whole_script(COMMON, CURRENT, TICK),
}
"""Script by name. Each has P as its one key; the arguments are those of `shared_words`."""
