-- What the picker learns of an answer as it passes through Envoy: when its content begins, on which
-- engine, and what its last events say. The rest stays in Envoy. What is set in the metadata
-- "kvindex" is in the request's access log.

local find, match, sub, byte = string.find, string.match, string.sub, string.byte

local CONTENT = {  -- what stands in an event with content, of each API; most tokens have the first
  '"content":%s*"[^"]', '"text":%s*"[^"]', '"reasoning_content":%s*"[^"]', '"reasoning":%s*"[^"]',
  '"tool_calls":%s*%[%s*{', '"function_call":%s*{', '"refusal":%s*"[^"]',
  '"content_block_delta"', '"response%.[%a_]+%.delta"',
}
-- Where an error begins: in the object of an event itself, before any other in it, since those
-- repeat what clients have sent. No string within JSON has a line end.
local ERRORS = {
  '\ndata: *{[^{\n]-"error":%s*()[^n%s]', '\ndata: *{()[^{\n]-"type":%s*"error"',
  '\nevent: *response%.failed\r?\ndata:[^\n]-"error":%s*()[^n%s]',
}
local MOST_KEPT = 1048576  -- bytes of an event without an end
local MOST_USAGE = 4096  -- bytes of a usage
local MOST_USAGES = 64  -- that are looked at in one piece
local MOST_ID = 256  -- bytes within which the id of a response stands
local MOST_WORD = 64  -- bytes of an error's type, or code

local function has_content(events)
  for _, pattern in ipairs(CONTENT) do
    if find(events, pattern) then return true end
  end
  return false
end

-- Whether a stream ends with these events. Plain searches are quick, most so if they begin with a
-- character that is rare.
local function is_last(events)
  return find(events, '[DONE]', 1, true) or find(events, 'message_stop"', 1, true)
    or (find(events, 'response.', 1, true) and (find(events, 'response.completed"', 1, true)
      or find(events, 'response.incomplete"', 1, true) or find(events, 'response.failed"', 1, true)))
end

-- Where the last whole event ends; 0 if none does.
local function end_of_events(data)
  local before, last = byte(data, -2, -1)
  if last == 10 and (before == 10 or (before == 13 and byte(data, -3) == 10)) then return #data end
  local found, from = 0, 1
  while true do
    local _, stop = find(data, '\n\r?\n', from)
    if not stop then return found end
    found, from = stop, stop
  end
end

-- An event with the fingerprint of the model's server, if there is one.
local function stamped(event, fingerprint)
  local stop = fingerprint and find(event, '}[^}]*$')
  if not stop then return event end
  return sub(event, 1, stop - 1) .. ',"system_fingerprint":' .. fingerprint .. sub(event, stop)
end

-- Events without the one that has the usage and no choices: nobody but us has asked for it. vLLM
-- puts its fingerprint there and not into the event before, which waits for it in `shown.last`.
local function without_usage(events, shown)
  local kept, from = {}, 1
  while from <= #events do
    local _, stop = find(events, '\n\r?\n', from)
    local event = sub(events, from, stop or #events)
    local has_choices = find(event, '"choices":%s*%[%s*{')
    local has_usage = find(event, '"usage":%s*{')
    -- Usage with each piece was not asked for: the engine sends it to all, and this client, too.
    if has_usage and has_choices then shown.hides = false end
    local last = shown.last
    shown.last = ""
    if shown.hides and has_usage and find(event, '"choices":%s*%[%s*%]')
      and not find(event, '"error":%s*[^n%s]') then
      kept[#kept + 1] = stamped(last, match(event, '"system_fingerprint":%s*("[^"\\]*")'))
    elseif shown.hides and has_choices and find(event, '"finish_reason":%s*"')
      and not find(event, '"system_fingerprint":%s*"') then
      kept[#kept + 1] = last
      shown.last = event
    else
      kept[#kept + 1] = last
      kept[#kept + 1] = event
    end
    from = (stop or #events) + 1
  end
  return table.concat(kept)
end

-- Report that content has begun. By HTTP/1.1, since a call of gRPC takes the picker 0.5 ms.
local function report_first(handle, booking, served)
  handle:httpCall("answers", {
    [":method"] = "POST", [":path"] = "/first", [":authority"] = "localhost",
  }, booking .. " " .. served, 1000, true)
end

-- Envoy's objects do not outlive the wait for a chunk: the metadata is looked up each time.
local function note(handle, name, text)
  handle:streamInfo():dynamicMetadata():set("kvindex", name, text)
end

-- Note the id of a response that begins where no client can have written it.
local function note_id(handle, text, before)
  if not handle:streamInfo():dynamicMetadata():get("kvindex")["makes"] then return end
  local id = match(text, before .. '{%s*"id":%s*"([%w_.:-]+)"')
  if id and #id <= 128 then note(handle, "made", id) end
end

-- Note the usage that stands first in an answer, and the last one; return whether there is one here.
local function note_usage(handle, text)
  local has_some = false
  local from = 1
  -- Bounded: one that has no end would be searched to the end of the text, each time.
  for _ = 1, MOST_USAGES do
    local begin, brace = find(text, '"usage":%s*{', from)
    if not begin then break end
    has_some, from = true, brace
    local usage = match(sub(text, brace, brace + MOST_USAGE), '^%b{}')
    if usage then
      from = brace + #usage
      if #usage <= MOST_USAGE and not find(usage, '[\128-\255]') then  -- what the log can carry
        local notes = handle:streamInfo():dynamicMetadata():get("kvindex")
        note(handle, notes["usage"] and "usage_at_end" or "usage", usage)
      end
    end
  end
  return has_some
end

-- What the log can carry of an engine's words.
local function plain(text)
  return (string.gsub(sub(text, 1, MOST_USAGE), '[\128-\255]', '?'))
end

-- A field of an error that is one word.
local function word_of(said, name)
  return sub(match(said, '"' .. name .. '":%s*"([^"\\%c\128-\255]*)"') or "", 1, MOST_WORD)
end

-- Note the type and code of an error: they tell whether the engine has failed.
local function note_error(handle, text)
  for _, form in ipairs(ERRORS) do
    local at = match(text, form)
    if at then
      local said = sub(text, at, (find(text, '\n\r?\n', at)))
      local code = match(said, '"code":%s*(%d%d%d)[%s,}]') or "null"
      local kind = word_of(said, "type") .. " " .. word_of(said, "code")
      return note(handle, "error", '{"type":"' .. kind .. '","code":' .. code .. '}')
    end
  end
end

-- Note what events say; return those that are forwarded.
local function read(handle, events, shown)
  if find(events, '"error"', 1, true) then note_error(handle, "\n" .. events) end
  if is_last(events) then note(handle, "last", "yes") end
  local has_usage = find(events, 'usage":', 1, true) and note_usage(handle, events)
  if not shown.hides then return events end
  local is_plain = not has_usage and shown.last == "" and not find(events, '"finish_reason":%s*"')
  return is_plain and events or without_usage(events, shown)
end

local function read_events(handle, request)
  local has_begun, is_empty, shown = false, true, {hides = request.hides, last = ""}
  local parts, size, tail = {}, 0, ""  -- of an event without its end, and its last bytes
  for chunk in handle:bodyChunks() do
    local data = chunk:getBytes(0, chunk:length())
    local is_changed, stop = size > 0, #data
    if stop > 0 then  -- an empty chunk ends the answer
      stop = end_of_events(is_changed and tail .. data or data) - #tail
      if stop <= 0 then stop = size + #data > MOST_KEPT and #data or 0 end
    end
    local events = data
    if stop < #data then
      is_changed, events = true, sub(data, 1, stop)
    end
    if size > 0 and (stop > 0 or data == "") then
      events = table.concat(parts) .. events
      parts, size, tail = {}, 0, ""
    end
    if stop < #data then
      parts[#parts + 1] = sub(data, stop + 1)
      size = size + #data - stop
      tail = sub(tail .. parts[#parts], -3)
    end
    if events ~= "" then
      -- Comments are no events, nor is the end.
      local first = is_empty and find(events, 'data: *[^%s%[]')
      if first then
        is_empty = false
        note_id(handle, sub(events, first, first + MOST_ID), '^data: *{[^{\n]-"response":%s*')
      end
      if not has_begun then
        has_begun = has_content(events)
        if has_begun then report_first(handle, request.booking, request.served) end
      end
      local forwarded = read(handle, events, shown)
      is_changed = is_changed or #forwarded ~= #events
      events = forwarded
    end
    if data == "" and shown.last ~= "" then  -- nothing came that could have had the fingerprint
      events, is_changed, shown.last = events .. shown.last, true, ""
    end
    if request.hides and is_changed then chunk:setBytes(events) end
  end
  if is_empty then note(handle, "empty", "yes") end
end

local function read_whole(handle, request)
  local begin, tail = "", ""
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    local data = size > 0 and chunk:getBytes(0, size) or ""
    if #begin < MOST_ID then begin = begin .. sub(data, 1, MOST_ID) end
    if tail == "" and request.status == "200" and find(data, '"error"', 1, true) then
      note_error(handle, "\ndata:" .. string.gsub(data, '\n', ' '))
    end
    tail = sub(tail .. data, -4096)
  end
  note_id(handle, begin, "^%s*")
  note_usage(handle, tail)
  if request.status == "400" then note(handle, "refusal", plain(tail)) end
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local served = headers:get("x-kvindex-served") or ""
  headers:remove("x-kvindex-served")
  local notes = handle:streamInfo():dynamicMetadata():get("kvindex")
  if not notes or not notes["booking"] then return end
  local request = {
    booking = notes["booking"], served = served, status = headers:get(":status"),
    hides = notes["hides"] ~= nil,
  }
  if notes["explains"] == served then
    for _, name in ipairs({"x-kvindex-rank", "x-kvindex-held", "x-kvindex-reason"}) do
      headers:add(name, notes[name])
    end
  end
  -- Compressed by something before the engine: nothing can be read of it.
  if string.lower(headers:get("content-encoding") or "identity") ~= "identity" then return end
  if find(headers:get("content-type") or "", "text/event-stream", 1, true) == 1 then
    read_events(handle, request)
  else
    read_whole(handle, request)
  end
end
