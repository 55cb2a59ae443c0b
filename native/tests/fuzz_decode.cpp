// libFuzzer target: whatever the bytes are, `decode` reads none outside them, and what it calls
// decoded lies within its pools.
//
// Built with clang and -fsanitize=fuzzer,address,undefined; its corpus is any payloads of engines.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/decode.hpp"

namespace {

using kvindex::Batch;
using kvindex::ByteRange;
using kvindex::Event;
using kvindex::EventKind;
using kvindex::WireHash;

void require(bool holds) {
  if (!holds) std::abort();
}

bool within(uint64_t begin, uint64_t count, size_t size) { return begin + count <= size; }

void check(const Batch& batch, ByteRange range) {
  require(within(range.offset, range.length, batch.bytes.size()));
}

void check(const Batch& batch, WireHash hash) {
  if (hash.is_bytes()) require(within(hash.value, hash.length, batch.bytes.size()));
  require(hash.length <= 64);
}

void check_stored(const Batch& batch, const Event& event) {
  const size_t tokens = event.wide_tokens ? batch.wide.size() : batch.tokens.size();
  const uint64_t ahead = uint64_t{event.lookahead} * event.lookahead_blocks;
  require(within(event.tokens_begin, event.tokens_count, tokens));
  require(within(event.extras_begin, event.extras_count, batch.extras.size()));
  if (!event.ragged_lookahead) require(within(event.lookahead_begin, ahead, batch.wide.size()));
  require(event.block_size <= INT32_MAX && event.group_idx <= INT32_MAX);
  require(event.has_parent || event.parent.value == 0);
  check(batch, event.parent);
  check(batch, event.lora);
  check(batch, event.spec_kind);
  check(batch, event.salted_first);
  for (uint32_t i = 0; i < event.extras_count; ++i) {
    check(batch, batch.extras[event.extras_begin + i]);
  }
}

void check(const Batch& batch, const Event& event) {
  check(batch, event.medium);
  require(within(event.hashes_begin, event.hashes_count, batch.hashes.size()));
  for (uint32_t i = 0; i < event.hashes_count; ++i) {
    check(batch, batch.hashes[event.hashes_begin + i]);
  }
  if (event.kind == EventKind::stored) check_stored(batch, event);
  if (event.has_copies_left) {
    require(within(event.copies_left_begin, event.hashes_count, batch.tokens.size()));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Batch batch;  // reused, as by the index
  // Of just this size, so that reading one byte too many is seen.
  const std::unique_ptr<uint8_t[]> payload(new uint8_t[size]);
  if (size != 0) std::memcpy(payload.get(), data, size);
  if (kvindex::decode(payload.get(), size, batch) != kvindex::Verdict::decoded) return 0;
  require(std::isfinite(batch.ts) && batch.dp_rank >= -1 && batch.skipped.size() <= 257);
  for (const ByteRange tag : batch.skipped) check(batch, tag);
  for (const Event& event : batch.events) check(batch, event);
  return 0;
}
