-- Chats that go on: every request repeats one of 64 histories and adds a message nobody has seen.
-- wrk … -s chat_fresh.lua URL -- HISTORY_BYTES [stream | greedy | repeated | completions | messages | responses]
-- greedy: at temperature 0. repeated: the same, with the question of that history each time. The last three: chats
-- that grow by TURNS answers and questions and begin anew, by these APIs, as their clients spell them: the mark of a cache
-- on the last message, ids that items keep. HISTORY_BYTES are those of the messages as they are spelled.
local HISTORIES, TURN_BYTES, NEW_BYTES, TURNS = 64, 300, 200, 8
local WORDS = { "water", "ledger", "copper", "winter", "signal", "garden", "orbit", "timber", "violin", "harbour" }
local APIS = {
  completions = { member = "messages", item = '{"role":"%s","content":"%s"}' },
  messages = { member = "messages", item = '{"role":"%s","content":"%s"}' },
  responses = {
    member = "input",
    item = '{"type":"message","id":"msg_%d","role":"%s","content":[{"type":"input_text","text":"%s"}]}',
  },
}
local MARKED = '{"role":"user","content":[{"type":"text","text":"%s","cache_control":{"type":"ephemeral"}}]}'
local prefixes, grown, sent, repeated, api, turns, items = {}, {}, 0, false, "completions", false, 0

local function prose(bytes)
  local words, length = {}, 0
  while length < bytes do
    local word = WORDS[math.random(#WORDS)] .. math.random(1000)
    words[#words + 1] = word
    length = length + #word + 1
  end
  return table.concat(words, " ")
end

local function message(role, text)
  items = items + 1
  if api == "responses" then return string.format(APIS[api].item, items, role, text) end
  return string.format(APIS[api].item, role, text)
end

local function history(number, bytes)
  local messages = { message("system", "You are assistant " .. number .. ". " .. prose(TURN_BYTES)) }
  local length, user = #messages[1], true
  while length < bytes or user == turns do
    messages[#messages + 1] = message(user and "user" or "assistant", prose(TURN_BYTES))
    length, user = length + #messages[#messages], not user
  end
  return table.concat(messages, ",")
end

function init(arguments)
  local bytes = tonumber(arguments[1] or "3000")
  local kinds = { stream = '"stream":true,', greedy = '"temperature":0,', repeated = '"temperature":0,' }
  local kind = kinds[arguments[2]] or ""
  repeated = arguments[2] == "repeated"
  turns = APIS[arguments[2]] ~= nil
  api = turns and arguments[2] or api
  math.randomseed(20)
  for number = 1, HISTORIES do
    prefixes[number] = '{"model":"m",' .. kind .. '"' .. APIS[api].member .. '":[' .. history(number, bytes)
  end
  math.randomseed(os.time())
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
end

function request()
  sent = sent + 1
  local question = repeated and string.rep("the same words ", NEW_BYTES / 15) or prose(NEW_BYTES)
  local asked = "Question " .. (repeated and sent % HISTORIES or sent) .. ": " .. question
  local new = api == "messages" and string.format(MARKED, asked) or message("user", asked)
  local chat = sent % HISTORIES + 1
  if not turns then return wrk.format(nil, nil, nil, prefixes[chat] .. "," .. new .. "]}") end
  local round = math.floor(sent / HISTORIES) % TURNS
  if round == 0 or not grown[chat] then
    grown[chat] = prefixes[chat]
    return wrk.format(nil, nil, nil, grown[chat] .. "]}")
  end
  local before = grown[chat] .. "," .. message("assistant", "Answer " .. sent .. ": " .. prose(NEW_BYTES)) .. ","
  grown[chat] = before .. (api == "messages" and message("user", asked) or new)
  return wrk.format(nil, nil, nil, before .. new .. "]}")
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\nRESULT {"requests": %d, "seconds": %.6f, "p50_us": %d, "p99_us": %d, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout
  ))
end
