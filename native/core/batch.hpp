// One decoded event batch, flat: what the decoder writes and the index reads.
//
// Everything of variable length lies in four pools of the batch; events refer to ranges of them.
// A batch is reused from payload to payload, so a warm one allocates nothing.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvindex {

// A range of `Batch::bytes`.
struct ByteRange {
  uint32_t offset = 0;
  uint32_t length = 0;
};

// An engine's label of a block: an int modulo 2**64 (`length` 0, the int is `value`), or `length`
// raw bytes at `Batch::bytes[value]`.
struct WireHash {
  uint64_t value = 0;
  uint32_t length = 0;

  bool is_bytes() const { return length != 0; }
};

enum class EventKind : uint8_t { stored, removed, cleared };

struct Event {
  EventKind kind = EventKind::cleared;
  bool has_parent = false;      // parent_block_hash is not nil
  bool wide_tokens = false;     // tokens lie in `Batch::wide`, not in `Batch::tokens`
  bool has_lookahead = false;   // lookahead_token_ids is not nil
  bool ragged_lookahead = false;  // its arrays differ in length
  bool has_extra_keys = false;  // extra_keys is not nil
  bool has_group = false;       // group_idx is not nil
  bool has_kind = false;        // kv_cache_spec_kind is not nil
  bool has_window = false;      // kv_cache_spec_sliding_window is not nil
  bool has_copies_left = false;  // remaining_copy_counts is not nil
  bool content_hash = false;    // wide tokens only: the first label covers its own tokens only

  uint32_t group_idx = 0;  // nil is 0
  uint32_t block_size = 0;
  ByteRange medium;  // folded (`fold_medium`): nil is "GPU"
  ByteRange lora;    // "" none, "s" + name, or "i" + decimal id (name before id; "" and 0 are none)

  WireHash parent;
  uint32_t hashes_begin = 0;  // in Batch::hashes
  uint32_t hashes_count = 0;

  uint32_t tokens_begin = 0;  // in Batch::tokens or Batch::wide
  uint32_t tokens_count = 0;
  uint32_t copies_left_begin = 0;  // in Batch::tokens: for each removed block, copies that are left

  // Lookahead tokens of all blocks one after the other, `lookahead` each, always in Batch::wide.
  uint32_t lookahead = 0;  // tokens after each block (of the first one, when ragged)
  uint32_t lookahead_begin = 0;
  uint32_t lookahead_blocks = 0;  // how many arrays there are

  // Canonical extra keys of each block (`pack_extra` without the salt), in Batch::extras.
  uint32_t extras_begin = 0;
  uint32_t extras_count = 0;
  // The first block's, if it starts a prompt: with the salt, when `cache_salt` is not empty.
  bool has_salt = false;
  ByteRange salted_first;

  ByteRange spec_kind;
  int64_t spec_window = 0;
};

struct Batch {
  double ts = 0.0;
  int64_t dp_rank = -1;  // -1: nil
  std::vector<Event> events;
  std::vector<WireHash> hashes;
  std::vector<uint32_t> tokens;
  std::vector<uint64_t> wide;  // tokens modulo 2**64, where one of an event does not fit 32 bits
  std::vector<ByteRange> extras;
  std::vector<ByteRange> skipped;  // tags of unknown events
  std::vector<uint8_t> bytes;

  void clear() {
    ts = 0.0;
    dp_rank = -1;
    events.clear();
    hashes.clear();
    tokens.clear();
    wide.clear();
    extras.clear();
    skipped.clear();
    bytes.clear();
  }

  // Bytes of memory that a copy takes.
  size_t size() const {
    return sizeof(Batch) + events.size() * sizeof(Event) + hashes.size() * sizeof(WireHash) +
           tokens.size() * sizeof(uint32_t) + wide.size() * sizeof(uint64_t) +
           (extras.size() + skipped.size()) * sizeof(ByteRange) + bytes.size();
  }

  // Bytes of memory that it keeps.
  size_t capacity() const {
    return events.capacity() * sizeof(Event) + hashes.capacity() * sizeof(WireHash) +
           tokens.capacity() * sizeof(uint32_t) + wide.capacity() * sizeof(uint64_t) +
           (extras.capacity() + skipped.capacity()) * sizeof(ByteRange) + bytes.capacity();
  }

  std::string_view text(ByteRange range) const {
    return {reinterpret_cast<const char*>(bytes.data()) + range.offset, range.length};
  }
  std::string_view text(WireHash hash) const {
    return {reinterpret_cast<const char*>(bytes.data()) + hash.value, hash.length};
  }
};

}  // namespace kvindex
