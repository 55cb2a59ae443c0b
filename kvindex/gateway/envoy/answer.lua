-- What the picker learns of an answer as it passes through Envoy: when its content begins, on which
-- engine, and what its last events say. The rest stays in Envoy. What is set in the metadata
-- "kvindex" is in the request's access log.

local CONTENT = {  -- what stands in an event with content, of each API; most tokens have the first
  '"content":%s*"[^"]', '"text":%s*"[^"]', '"reasoning_content":%s*"[^"]', '"reasoning":%s*"[^"]',
  '"tool_calls":%s*%[%s*{', '"function_call":%s*{', '"refusal":%s*"[^"]',
  '"content_block_delta"', '"response%.[%a_]+%.delta"',
}
local LAST = { '[DONE]', '"message_stop"', '"response.completed"', '"response.failed"', '"response.incomplete"' }
local MOST_KEPT = 1048576  -- bytes of an event without an end

local function has_content(events)
  for _, pattern in ipairs(CONTENT) do
    if string.find(events, pattern) then return true end
  end
  return false
end

local function is_last(events)
  for _, word in ipairs(LAST) do
    if string.find(events, word, 1, true) then return true end
  end
  return false
end

-- The usage that stands last in a text.
local function usage_in(text)
  local last = nil
  for usage in string.gmatch(text, '"usage":%s*(%b{})') do last = usage end
  return last
end

-- Where the last whole event ends; 0 if there is none.
local function end_of_events(data)
  local last = string.byte(data, -1)
  if last == 10 then
    local before = string.byte(data, -2)
    if before == 10 or (before == 13 and string.byte(data, -3) == 10) then return #data end
  end
  local found, from = 0, 1
  while true do
    local _, stop = string.find(data, '\n\r?\n', from)
    if not stop then return found end
    found, from = stop, stop
  end
end

-- Events without the one that has the usage and no choices.
local function without_usage(events)
  local kept, from = {}, 1
  while from <= #events do
    local _, stop = string.find(events, '\n\r?\n', from)
    local event = string.sub(events, from, stop or #events)
    if not (string.find(event, '"choices":%s*%[%s*%]') and string.find(event, '"usage":%s*{')) then
      kept[#kept + 1] = event
    end
    from = (stop or #events) + 1
  end
  return table.concat(kept)
end

-- The call of the picker's method "First": the message of a gRPC call is framed by its length.
local function report_first(handle, booking, served)
  local message = booking .. " " .. served
  local frame = string.char(0, 0, 0, 0, #message) .. message
  handle:httpCall("picker", {
    [":method"] = "POST", [":path"] = "/kvindex.Answers/First", [":authority"] = "picker",
    ["content-type"] = "application/grpc", ["te"] = "trailers",
  }, frame, 1000, true)
end

-- Envoy's objects do not outlive the wait for a chunk: the metadata is looked up each time.
local function note(handle, name, text)
  handle:streamInfo():dynamicMetadata():set("kvindex", name, text)
end

local function read_events(handle, booking, served, hides)
  local has_begun, rest = false, ""
  for chunk in handle:bodyChunks() do
    local data = chunk:getBytes(0, chunk:length())
    local is_changed, stop = rest ~= "", #data
    if is_changed then data = rest .. data end
    if stop > 0 then stop = end_of_events(data) else stop = #data end  -- an empty one ends the answer
    if stop == 0 and #data > MOST_KEPT then stop = #data end
    local events = stop == #data and data or string.sub(data, 1, stop)
    rest = stop == #data and "" or string.sub(data, stop + 1)
    local forwarded = events
    if events ~= "" then
      if not has_begun and has_content(events) then
        has_begun = true
        report_first(handle, booking, served)
      end
      if string.find(events, '"usage":', 1, true) then
        local usage = usage_in(events)
        if usage then
          note(handle, "usage", usage)
          if hides then forwarded = without_usage(events) end
        end
      end
      if string.find(events, '{"error":', 1, true) then note(handle, "error", "yes") end
      if is_last(events) then note(handle, "last", "yes") end
    end
    is_changed = is_changed or rest ~= "" or #forwarded ~= #events
    if hides and is_changed then chunk:setBytes(forwarded) end
  end
end

local function read_whole(handle)
  local tail = ""
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then tail = string.sub(tail .. chunk:getBytes(0, size), -4096) end
  end
  local usage = usage_in(tail)
  if usage then note(handle, "usage", usage) end
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local served = headers:get("x-kvindex-served") or ""
  headers:remove("x-kvindex-served")
  local notes = handle:streamInfo():dynamicMetadata():get("kvindex")
  if not notes or not notes["booking"] then return end
  if string.find(headers:get("content-type") or "", "text/event-stream", 1, true) == 1 then
    read_events(handle, notes["booking"], served, notes["hides"] ~= nil)
  else
    read_whole(handle)
  end
end
