// A decoded batch as Python holds it, and the typed way to make one.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "core/batch.hpp"

namespace kvindex {

// A batch of events in native form: what `decode` makes of a payload, or kvindex.index.native of an
// `EventBatch`, event by event.
//
// The memory of batches that are gone is used again by the thread: decoding a message then
// allocates nothing.
class PackedBatch {
 public:
  PackedBatch();
  PackedBatch(PackedBatch&&) = default;
  PackedBatch& operator=(PackedBatch&&) = default;
  ~PackedBatch();

  Batch batch;

  // Add a BlockStored. Hashes are ints modulo 2**64 or bytes; `tokens` are packed 64-bit ints;
  // `lookahead` is one bytes object a block, of the same; `extras` the canonical extra keys.
  void stored(nanobind::list hashes, nanobind::object parent, nanobind::bytes tokens,
              uint32_t block_size, nanobind::bytes lora, nanobind::bytes medium,
              std::optional<uint32_t> group_idx, nanobind::object spec_kind, std::optional<int64_t> spec_window,
              nanobind::object lookahead, nanobind::object extras, nanobind::object salted_first,
              bool content_hash);
  void removed(nanobind::list hashes, nanobind::bytes medium, uint32_t group_idx,
               const std::optional<std::vector<uint32_t>>& copies_left);
  void cleared();
  void skipped(nanobind::bytes tag);

 private:
  ByteRange text(nanobind::bytes value);
  WireHash hash(nanobind::handle value);
  void add_hashes(Event& event, nanobind::list hashes);
  void add_tokens(Event& event, nanobind::bytes tokens);
  void add_lookahead(Event& event, nanobind::list lookahead);
};

void bind_packed_batch(nanobind::module_& module);

}  // namespace kvindex
