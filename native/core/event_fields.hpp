// Names and positions of events' fields on the wire (the twin of `kvindex.wire.decode`'s tables).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "core/batch.hpp"

namespace kvindex {

enum class Tag : uint8_t { stored, removed, cleared, unknown };

// The kind of event with this tag, which must be known.
inline EventKind kind_of(Tag tag) {
  return tag == Tag::stored    ? EventKind::stored
         : tag == Tag::removed ? EventKind::removed
                               : EventKind::cleared;
}

enum class Field : uint8_t {
  block_hashes,
  parent_block_hash,
  token_ids,
  block_size,
  lora_id,
  medium,
  lora_name,
  extra_keys,
  group_idx,
  spec_kind,
  spec_window,
  lookahead_token_ids,
  cache_salt,
  copies_left,
  images,  // of TensorRT-LLM, under either of two names
  type,
  other,  // whose value does not matter
};

constexpr uint32_t bit(Field field) { return 1u << static_cast<uint32_t>(field); }

template <size_t kSize>
bool equals(std::string_view text, const char (&literal)[kSize]) {
  return text.size() == kSize - 1 && std::memcmp(text.data(), literal, kSize - 1) == 0;
}

inline Tag tag_named(std::string_view name) {
  if (equals(name, "BlockStored")) return Tag::stored;
  if (equals(name, "BlockRemoved")) return Tag::removed;
  return equals(name, "AllBlocksCleared") ? Tag::cleared : Tag::unknown;
}

inline Field field_named(std::string_view name) {
  const auto either = [&](const auto& literal, Field field) {
    return equals(name, literal) ? field : Field::other;
  };
  switch (name.size()) {  // then few are left to compare with, of a length known when compiled
    case 4: return either("type", Field::type);
    case 6: return either("medium", Field::medium);
    case 7: return equals(name, "lora_id") ? Field::lora_id : either("mm_keys", Field::images);
    case 9:
      if (equals(name, "token_ids")) return Field::token_ids;
      if (equals(name, "lora_name")) return Field::lora_name;
      return either("group_idx", Field::group_idx);
    case 10:
      if (equals(name, "block_size")) return Field::block_size;
      if (equals(name, "extra_keys")) return Field::extra_keys;
      return either("cache_salt", Field::cache_salt);
    case 12: return either("block_hashes", Field::block_hashes);
    case 14: return either("block_mm_infos", Field::images);
    case 17: return either("parent_block_hash", Field::parent_block_hash);
    case 18: return either("kv_cache_spec_kind", Field::spec_kind);
    case 19: return either("lookahead_token_ids", Field::lookahead_token_ids);
    case 21: return either("remaining_copy_counts", Field::copies_left);
    case 28: return either("kv_cache_spec_sliding_window", Field::spec_window);
    default: return Field::other;
  }
}

// The fields that matter in an event's map form.
inline uint32_t fields_of(Tag tag) {
  if (tag == Tag::stored) return (bit(Field::other) - 1) & ~bit(Field::copies_left);
  if (tag != Tag::removed) return bit(Field::type);
  return bit(Field::type) | bit(Field::block_hashes) | bit(Field::medium) |
         bit(Field::group_idx) | bit(Field::copies_left);
}

// The fields that matter in an event's array form, in their order after the tag.
inline std::span<const Field> positions_of(Tag tag) {
  static constexpr std::array kStored{
      Field::block_hashes, Field::parent_block_hash, Field::token_ids, Field::block_size,
      Field::lora_id, Field::medium, Field::lora_name, Field::extra_keys, Field::group_idx,
      Field::spec_kind, Field::spec_window,
  };
  static constexpr std::array kRemoved{Field::block_hashes, Field::medium, Field::group_idx};
  if (tag == Tag::stored) return kStored;
  if (tag == Tag::removed) return kRemoved;
  return {};
}

}  // namespace kvindex
