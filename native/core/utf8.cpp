#include "core/utf8.hpp"

#include <algorithm>
#include <cstring>

namespace kvindex {
namespace {

uint8_t byte_at(std::string_view text, size_t at) { return static_cast<uint8_t>(text[at]); }

bool continues(uint8_t byte) { return (byte & 0xc0) == 0x80; }

bool within(uint8_t byte, uint8_t low, uint8_t high) { return low <= byte && byte <= high; }

// The length of the character of several bytes that the text starts with, or 0 if it is none.
size_t wide_character(std::string_view text, bool surrogates) {
  const uint8_t lead = byte_at(text, 0);
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (!within(lead, 0xc2, 0xf4) || text.size() < length) return 0;
  // The second byte's range rules out overlong forms, what lies past U+10FFFF, and surrogates.
  const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xed && !surrogates ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (!within(byte_at(text, 1), low, high)) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (!continues(byte_at(text, i))) return 0;
  }
  return length;
}

bool is_text(std::string_view text, bool surrogates) {
  if (is_ascii(text)) return true;
  while (!text.empty()) {
    const size_t length = byte_at(text, 0) < 0x80 ? 1 : wide_character(text, surrogates);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace

bool is_ascii(std::string_view text) {
  uint64_t seen = 0;
  size_t at = 0;
  for (uint64_t word; text.size() - at >= sizeof word; at += sizeof word) {
    std::memcpy(&word, text.data() + at, sizeof word);
    seen |= word;
  }
  for (; at < text.size(); ++at) seen |= byte_at(text, at);
  return (seen & 0x8080808080808080u) == 0;
}

bool is_utf8(std::string_view text) { return is_text(text, false); }

bool is_utf8_or_surrogates(std::string_view text) { return is_text(text, true); }

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return !continues(static_cast<uint8_t>(c));
  }));
}

std::string_view first_characters(std::string_view text, size_t limit) {
  for (size_t at = 0; at < text.size(); ++at) {
    if (!continues(byte_at(text, at)) && limit-- == 0) return text.substr(0, at);
  }
  return text;
}

}  // namespace kvindex
