// UTF-8 as CPython's strict decoder accepts it: no surrogates, nothing overlong, up to U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvindex {

bool is_ascii(std::string_view text);
bool is_utf8(std::string_view text);
// Likewise, surrogates included: what CPython makes of any of its strings by "surrogatepass".
bool is_utf8_or_surrogates(std::string_view text);

// The number of characters of valid UTF-8.
size_t count_characters(std::string_view text);

// The first characters of valid UTF-8, at most `limit` of them.
std::string_view first_characters(std::string_view text, size_t limit);

}  // namespace kvindex
