// The extra keys of a block in the form of `kvindex.index.tokens.pack_extra`.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/batch.hpp"
#include "core/msgpack.hpp"

namespace kvindex {

// Read one block's keys, an array or nil, and append their canonical form to `pool`: each item
// encoded as msgspec does, without the LoRA's name, with the salt, in the order of their bytes.
// An empty name or salt is none. Returns false if the keys are malformed or rare: not of nil, bool,
// int, float, text, bin and arrays of those, nested deeper than `MAX_DEPTH`, NaN, very many.
bool read_extra_keys(Reader& in, std::string_view lora_name, std::string_view salt,
                     std::vector<uint8_t>& pool, ByteRange& out);

// The same for a block without keys.
ByteRange salt_only(std::string_view salt, std::vector<uint8_t>& pool);

// Whether canonical extra keys are nothing but texts.
bool only_texts(std::string_view extra_keys);

}  // namespace kvindex
