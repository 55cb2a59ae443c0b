// One event of any dialect to a batch (the twin of `kvindex.wire.decode._event` and its fields).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/batch.hpp"
#include "core/event_fields.hpp"
#include "core/msgpack.hpp"

namespace kvindex {

// Where a batch's bytes hold the commonest medium, once `begin_bytes` has been called.
inline constexpr ByteRange kGpu{0, 3};

void begin_bytes(Batch& batch);

// Reads one event. Every function that takes a reader returns it behind what was read; it has
// failed if that was malformed or rare.
class EventReader {
 public:
  explicit EventReader(Batch& out) : out_(out) {}

  // Append the event to the batch, or its tag if nobody knows it.
  Reader read(Reader in);

 private:
  Reader read_tag(Reader in, uint32_t count, std::string_view& tag);
  Reader read_name(Reader in, Field& field);
  Field next_position(Reader in, bool is_last);
  Reader read_field(Reader in, Field field);

  Reader read_hashes(Reader in);
  Reader read_parent(Reader in);
  Reader read_token_ids(Reader in);
  Reader read_lookahead(Reader in);
  Reader read_extra_keys_later(Reader in);
  Reader read_lora_name(Reader in);
  Reader read_metadata(Reader in);
  Reader read_medium(Reader in);
  Reader read_spec_kind(Reader in);
  Reader read_spec_window(Reader in);
  Reader read_copies_left(Reader in);

  bool finish(std::string_view tag);
  bool finish_stored();
  bool finish_removed() const;
  void finish_lora();
  void finish_bigrams();
  void finish_content_hash();
  bool finish_extra_keys();

  Batch& out_;
  Event* event_ = nullptr;  // the last of the batch, if its tag is known
  Tag tag_ = Tag::unknown;
  bool is_map_ = false;
  bool bigrams_ = false;
  uint32_t seen_ = 0;    // bits of fields
  size_t position_ = 0;  // of the next value of an array, after the tag

  // What only means something once all fields are known.
  Int lora_id_;
  std::string_view lora_name_;
  std::string_view salt_;
  Reader extra_keys_;         // before the first block's; failed if no block has some
  Reader tokens_;             // before the first
  uint64_t bigrams_end_ = 0;  // the second token of the last pair
};

}  // namespace kvindex
