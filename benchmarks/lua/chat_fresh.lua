-- Chats that go on: every request repeats one of 64 histories and adds a message nobody has seen.
-- wrk … -s chat_fresh.lua URL -- HISTORY_BYTES [stream | greedy | repeated]
-- greedy: at temperature 0. repeated: the same, with the question of that history each time.
local HISTORIES, TURN_BYTES, NEW_BYTES = 64, 300, 200
local WORDS = { "water", "ledger", "copper", "winter", "signal", "garden", "orbit", "timber", "violin", "harbour" }
local prefixes, sent, repeated = {}, 0, false

local function prose(bytes)
  local words, length = {}, 0
  while length < bytes do
    local word = WORDS[math.random(#WORDS)] .. math.random(1000)
    words[#words + 1] = word
    length = length + #word + 1
  end
  return table.concat(words, " ")
end

local function message(role, text) return '{"role":"' .. role .. '","content":"' .. text .. '"}' end

local function history(number, bytes)
  local messages, length, user = { message("system", "You are assistant " .. number .. ". " .. prose(TURN_BYTES)) }, TURN_BYTES, true
  while length < bytes or not user do
    messages[#messages + 1] = message(user and "user" or "assistant", prose(TURN_BYTES))
    length, user = length + TURN_BYTES, not user
  end
  return table.concat(messages, ",")
end

function init(arguments)
  local bytes = tonumber(arguments[1] or "3000")
  local kinds = { stream = '"stream":true,', greedy = '"temperature":0,', repeated = '"temperature":0,' }
  local kind = kinds[arguments[2]] or ""
  repeated = arguments[2] == "repeated"
  math.randomseed(20)
  for number = 1, HISTORIES do
    prefixes[number] = '{"model":"m",' .. kind .. '"messages":[' .. history(number, bytes)
  end
  math.randomseed(os.time())
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
end

function request()
  sent = sent + 1
  local question = repeated and string.rep("the same words ", NEW_BYTES / 15) or prose(NEW_BYTES)
  local new = message("user", "Question " .. (repeated and sent % HISTORIES or sent) .. ": " .. question)
  return wrk.format(nil, nil, nil, prefixes[sent % HISTORIES + 1] .. "," .. new .. "]}")
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\nRESULT {"requests": %d, "seconds": %.6f, "p50_us": %d, "p99_us": %d, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout
  ))
end
