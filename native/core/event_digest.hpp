// The content of an event's blocks, unit by unit.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/batch.hpp"
#include "core/prefix_key.hpp"

namespace kvindex {

inline std::string_view extra_of(const Batch& batch, const Event& event, uint32_t block) {
  if (!event.has_extra_keys) return {};
  return batch.text(batch.extras[event.extras_begin + block]);
}

// The digest of one unit of a block; its extra keys belong to its first one.
inline Digest unit_digest(const Batch& batch, const Event& event, uint32_t block, uint32_t start,
                          uint32_t unit, std::string_view extra, const KeyMaker& keys) {
  const size_t begin = event.tokens_begin + size_t{block} * event.block_size + start;
  Digest digest = event.wide_tokens ? keys.tokens(batch.wide.data() + begin, unit)
                                    : keys.tokens(batch.tokens.data() + begin, unit);
  if (event.lookahead != 0) {
    const uint64_t* const after =
        batch.wide.data() + event.lookahead_begin + size_t{block} * event.lookahead;
    if (start + unit == event.block_size) {
      digest = keys.with_lookahead(digest, after, event.lookahead);
    } else {  // the block's own tokens come first
      std::vector<uint64_t> covered;
      for (size_t i = begin + unit; covered.size() < event.lookahead; ++i) {
        const size_t beyond = i - event.tokens_begin - size_t{block} * event.block_size;
        covered.push_back(beyond >= event.block_size ? after[beyond - event.block_size]
                          : event.wide_tokens        ? batch.wide[i]
                                                     : batch.tokens[i]);
      }
      digest = keys.with_lookahead(digest, covered.data(), event.lookahead);
    }
  }
  return start == 0 ? keys.with_extra(digest, extra) : digest;
}

}  // namespace kvindex
