#include "core/event_reader.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "core/content_hash.hpp"
#include "core/extra_keys.hpp"
#include "core/token_reader.hpp"
#include "core/utf8.hpp"

namespace kvindex {
namespace {

using std::string_view;

constexpr size_t kMaxSkipped = 256;  // these four are limits of the Python decoder
constexpr size_t kMaxTag = 64;
constexpr size_t kMaxText = 1024;
constexpr size_t kMaxHashBytes = 64;

constexpr uint32_t kRequired =
    bit(Field::block_hashes) | bit(Field::token_ids) | bit(Field::block_size);

// Copied faster than an event is made anew, which GCC does with a slow instruction.
constexpr Event kBlank = [] {
  Event event;
  event.medium = kGpu;
  return event;
}();

bool is_short(string_view text) {
  return text.size() <= kMaxText || count_characters(text) <= kMaxText;
}

template <typename Item>
uint32_t size_of(const std::vector<Item>& pool) {
  return static_cast<uint32_t>(pool.size());
}

ByteRange append(string_view text, std::vector<uint8_t>& pool) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
  const ByteRange range{size_of(pool), static_cast<uint32_t>(text.size())};
  pool.insert(pool.end(), bytes, bytes + text.size());
  return range;
}

inline bool read_small_int(Reader& in, uint32_t& value) {
  Int number;
  if (!in.read_int(number) || number.value > std::numeric_limits<int32_t>::max()) return false;
  value = static_cast<uint32_t>(number.value);
  return true;
}

bool read_optional_text(Reader& in, string_view& text) {
  return in.take_nil() || (in.read_text(text) && is_short(text));
}

// Read an int, or 1 to `kMaxHashBytes` bytes, which are copied to `pool`.
inline bool read_hash(Reader& in, WireHash& hash, std::vector<uint8_t>& pool) {
  Int label;
  if (in.next_is_bin()) {
    string_view digest;
    if (!in.read_bin(digest) || digest.empty() || digest.size() > kMaxHashBytes) return false;
    const ByteRange range = append(digest, pool);
    hash = {range.offset, range.length};
    return true;
  }
  if (!in.read_int(label)) return false;
  hash = {label.value, 0};
  return true;
}

// Find the tag of a map that does not begin with it, as those of all engines do.
bool find_tag(Reader in, uint32_t count, string_view& tag) {
  for (uint32_t i = 0; i < count; ++i) {
    string_view name;
    if (!in.read_raw_text(name)) return false;
    if (equals(name, "type")) return in.read_raw_text(tag);
    if (!in.skip()) return false;
  }
  return false;
}

}  // namespace

void begin_bytes(Batch& batch) { append("GPU", batch.bytes); }

// ---- which fields there are ---------------------------------------------------------------------

[[gnu::flatten]] Reader EventReader::read(Reader in) {
  uint32_t count = 0;
  string_view tag;
  is_map_ = in.next_is_map();
  if (!(is_map_ ? in.read_map(count) : in.read_array(count))) return {};
  in = read_tag(in, count, tag);
  if (in.failed()) return {};
  tag_ = tag_named(tag);
  if (tag_ == Tag::unknown) {
    if (!is_utf8(tag)) return {};
  } else {
    event_ = &out_.events.emplace_back(kBlank);
    event_->kind = kind_of(tag_);
  }
  for (uint32_t i = (seen_ & bit(Field::type)) != 0; i < count; ++i) {
    Field field = Field::other;
    if (is_map_) {
      in = read_name(in, field);
      if (in.failed()) return {};
    } else {
      field = next_position(in, i + 1 == count);
    }
    in = read_field(in, field);
    if (in.failed()) return {};
  }
  return finish(tag) ? in : Reader();
}

// Read the tag if it comes first; else only look where it is.
Reader EventReader::read_tag(Reader in, uint32_t count, string_view& tag) {
  if (is_map_) {
    Reader ahead = in;
    string_view name;
    if (!ahead.read_raw_text(name)) return {};
    if (!equals(name, "type")) return find_tag(in, count, tag) ? in : Reader();
    in = ahead;
  }
  seen_ = bit(Field::type);
  return count != 0 && in.read_raw_text(tag) ? in : Reader();
}

// Read the next name of a map.
Reader EventReader::read_name(Reader in, Field& field) {
  string_view name;
  if (!in.read_raw_text(name)) return {};
  field = field_named(name);
  if (field == Field::other) return is_utf8(name) ? in : Reader();
  if ((bit(field) & fields_of(tag_)) == 0) {
    field = Field::other;
    return in;
  }
  const bool repeated = (seen_ & bit(field)) != 0;
  seen_ |= bit(field);
  return repeated ? Reader() : in;
}

// Tell what the next value of an array is.
Field EventReader::next_position(Reader in, bool is_last) {
  const std::span<const Field> positions = positions_of(tag_);
  if (position_ >= positions.size()) return Field::other;
  const Field field = positions[position_];
  if (tag_ == Tag::stored && field == Field::group_idx && !is_last && in.take_nil() &&
      in.next_is_int()) {
    // Dynamo's TensorRT-LLM wrapper has its images here, before group_idx: here are none.
    return Field::other;
  }
  ++position_;
  seen_ |= bit(field);
  return field;
}

Reader EventReader::read_field(Reader in, Field field) {
  bool good = false;
  switch (field) {
    case Field::block_hashes: return read_hashes(in);
    case Field::parent_block_hash: return read_parent(in);
    case Field::token_ids: return read_token_ids(in);
    case Field::block_size: good = read_small_int(in, event_->block_size); break;
    case Field::lora_id: good = in.take_nil() || in.read_int(lora_id_); break;
    case Field::medium: return read_medium(in);
    case Field::lora_name: return read_lora_name(in);
    case Field::extra_keys: return read_extra_keys_later(in);
    case Field::group_idx:
      event_->has_group = !in.take_nil();
      good = !event_->has_group || read_small_int(in, event_->group_idx);
      break;
    case Field::spec_kind: return read_spec_kind(in);
    case Field::spec_window: return read_spec_window(in);
    case Field::lookahead_token_ids: return read_lookahead(in);
    case Field::cache_salt: good = read_optional_text(in, salt_); break;
    case Field::copies_left: return read_copies_left(in);
    case Field::images: good = in.take_nil(); break;
    case Field::type:
    case Field::other: good = in.skip(); break;
  }
  return good ? in : Reader();
}

// ---- one field ----------------------------------------------------------------------------------

Reader EventReader::read_hashes(Reader in) {
  if (!in.read_array(event_->hashes_count)) return {};
  event_->hashes_begin = size_of(out_.hashes);
  out_.hashes.resize(out_.hashes.size() + event_->hashes_count);
  WireHash* const hashes = out_.hashes.data() + event_->hashes_begin;
  for (uint32_t i = 0; i < event_->hashes_count; ++i) {
    if (!read_hash(in, hashes[i], out_.bytes)) return {};
  }
  return in;
}

Reader EventReader::read_parent(Reader in) {
  event_->has_parent = !in.take_nil();
  if (!event_->has_parent) return in;
  return read_hash(in, event_->parent, out_.bytes) ? in : Reader();
}

Reader EventReader::read_token_ids(Reader in) {
  const uint32_t narrow_begin = size_of(out_.tokens);
  const uint32_t wide_begin = size_of(out_.wide);
  uint32_t& count = event_->tokens_count;
  if (!in.read_array(count)) return {};
  tokens_ = in;
  bigrams_ = count != 0 && in.next_is_array();
  in = bigrams_ ? read_bigrams(in, count, out_.tokens, out_.wide, bigrams_end_)
                : read_tokens(in, count, out_.tokens, out_.wide);
  event_->wide_tokens = size_of(out_.wide) != wide_begin;
  event_->tokens_begin = event_->wide_tokens ? wide_begin : narrow_begin;
  return in;
}

Reader EventReader::read_lookahead(Reader in) {
  if (in.take_nil()) return in;
  if (!in.read_array(event_->lookahead_blocks)) return {};
  event_->has_lookahead = true;
  event_->lookahead_begin = size_of(out_.wide);
  for (uint32_t i = 0; i < event_->lookahead_blocks; ++i) {
    uint32_t count = 0;
    if (!in.read_array(count)) return {};
    if (i == 0) event_->lookahead = count;
    event_->ragged_lookahead |= count != event_->lookahead;
    for (uint32_t j = 0; j < count; ++j) {
      Int token;
      if (!in.read_int(token)) return {};
      out_.wide.push_back(token.value);
    }
  }
  return in;
}

// Note where the extra keys are: their canonical form depends on fields that may come later.
Reader EventReader::read_extra_keys_later(Reader in) {
  if (in.take_nil()) return in;
  Reader blocks = in;
  if (!blocks.read_array(event_->extras_count)) return {};
  event_->has_extra_keys = true;
  const uint8_t* const end = blocks.at() + event_->extras_count;
  if (std::all_of(blocks.at(), end, [](uint8_t lead) { return lead == msgpack::kNil; })) {
    return {end, in.end()};
  }
  extra_keys_ = blocks;
  return in.skip() ? in : Reader();
}

Reader EventReader::read_lora_name(Reader in) {
  if (!is_map_ && in.next_is_map()) return read_metadata(in);
  return read_optional_text(in, lora_name_) ? in : Reader();
}

// Read the map {"cache_salt": …} that SGLang 0.5.18-0.5.19 put where vLLM has lora_name.
Reader EventReader::read_metadata(Reader in) {
  uint32_t count = 0;
  if (!in.read_map(count)) return {};
  bool has_salt = false;
  for (uint32_t i = 0; i < count; ++i) {
    string_view name;
    if (!in.read_text(name)) return {};
    const bool is_salt = equals(name, "cache_salt");
    if (is_salt && has_salt) return {};
    if (!(is_salt ? read_optional_text(in, salt_) : in.skip())) return {};
    has_salt |= is_salt;
  }
  return in;
}

// Read a medium in the spelling of `fold_medium`.
Reader EventReader::read_medium(Reader in) {
  static constexpr std::array<string_view, 8> kKnown{"GPU",      "CPU",     "CPU_PINNED", "DISK",
                                                     "EXTERNAL", "STORAGE", "FS",         "OBJ"};
  string_view text;
  if (in.take_nil()) return in;
  if (!in.read_raw_text(text)) return {};
  if (equals(text, "GPU")) return in;
  if (text.size() > kMaxText || !is_ascii(text)) return {};
  std::array<char, 16> upper{};
  if (text.size() <= upper.size()) {
    std::transform(text.begin(), text.end(), upper.begin(), [](char c) {
      return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    });
    const string_view folded(upper.data(), text.size());
    if (std::find(kKnown.begin(), kKnown.end(), folded) != kKnown.end()) text = folded;
  }
  event_->medium = append(text, out_.bytes);
  return in;
}

Reader EventReader::read_spec_kind(Reader in) {
  string_view kind;
  if (!in.next_is_text()) return in.skip() ? in : Reader();
  if (!in.read_text(kind)) return {};
  event_->has_kind = is_short(kind);
  if (event_->has_kind) event_->spec_kind = append(kind, out_.bytes);
  return in;
}

Reader EventReader::read_spec_window(Reader in) {
  Int window;
  if (!in.next_is_int()) return in.skip() ? in : Reader();
  if (!in.read_int(window)) return {};
  event_->spec_window = static_cast<int64_t>(window.value);
  event_->has_window = window.negative == (event_->spec_window < 0);  // else beyond 63 bits
  return in;
}

Reader EventReader::read_copies_left(Reader in) {
  uint32_t count = 0;
  if (in.take_nil()) return in;
  if (!in.read_array(count)) return {};
  event_->has_copies_left = true;
  event_->copies_left_begin = size_of(out_.tokens);
  for (uint32_t i = 0; i < count; ++i) {
    if (!read_small_int(in, out_.tokens.emplace_back())) return {};
  }
  return in;
}

// ---- the event as a whole -----------------------------------------------------------------------

bool EventReader::finish(string_view tag) {
  switch (tag_) {
    case Tag::stored: return finish_stored();
    case Tag::removed: return finish_removed();
    case Tag::cleared: return true;
    case Tag::unknown: break;
  }
  if (out_.skipped.size() > kMaxSkipped) return true;
  const bool is_full = out_.skipped.size() == kMaxSkipped;
  const string_view reported = is_full ? "(more)" : first_characters(tag, kMaxTag);
  out_.skipped.push_back(append(reported, out_.bytes));
  return true;
}

bool EventReader::finish_removed() const {
  if ((seen_ & bit(Field::block_hashes)) == 0) return false;
  const uint32_t counts = size_of(out_.tokens) - event_->copies_left_begin;
  return !event_->has_copies_left || counts == event_->hashes_count;
}

bool EventReader::finish_stored() {
  if ((seen_ & kRequired) != kRequired) return false;
  finish_lora();
  if (bigrams_) finish_bigrams();
  if (event_->wide_tokens) finish_content_hash();
  return finish_extra_keys();
}

void EventReader::finish_lora() {
  if (!lora_name_.empty()) {
    event_->lora = append("s", out_.bytes);
    event_->lora.length += append(lora_name_, out_.bytes).length;
  } else if (lora_id_.value != 0) {
    std::array<char, 24> text{'i'};
    char* const end = text.data() + text.size();
    const auto number =
        lora_id_.negative
            ? std::to_chars(text.data() + 1, end, static_cast<int64_t>(lora_id_.value))
            : std::to_chars(text.data() + 1, end, lora_id_.value);
    event_->lora = append({text.data(), static_cast<size_t>(number.ptr - text.data())}, out_.bytes);
  }
}

// Make the token after each block its lookahead, if the pairs are whole blocks.
void EventReader::finish_bigrams() {
  const uint64_t whole = uint64_t{event_->hashes_count} * event_->block_size;
  event_->has_lookahead = event_->block_size != 0 && event_->tokens_count == whole;
  event_->ragged_lookahead = false;
  event_->lookahead = event_->has_lookahead ? 1 : 0;
  event_->lookahead_blocks = event_->has_lookahead ? event_->hashes_count : 0;
  event_->lookahead_begin = size_of(out_.wide);
  for (uint32_t block = 1; block < event_->lookahead_blocks; ++block) {
    const size_t next = size_t{event_->tokens_begin} + size_t{block} * event_->block_size;
    const uint64_t token = event_->wide_tokens ? out_.wide[next] : out_.tokens[next];
    out_.wide.push_back(token);
  }
  if (event_->has_lookahead) out_.wide.push_back(bigrams_end_);
}

// See whether the first label is the hash of its own tokens, which are read again for their signs.
void EventReader::finish_content_hash() {
  if (event_->hashes_count == 0 || out_.hashes[event_->hashes_begin].is_bytes()) return;
  Reader in = tokens_;
  TupleHash hash;
  for (uint32_t i = 0; i < std::min(event_->block_size, event_->tokens_count); ++i) {
    Int token, second;
    if (!(bigrams_ ? read_pair(in, token, second) : in.read_int(token))) return;
    token.negative ? hash.add(static_cast<int64_t>(token.value)) : hash.add(token.value);
  }
  event_->content_hash = hash.value() == out_.hashes[event_->hashes_begin].value;
}

bool EventReader::finish_extra_keys() {
  event_->extras_begin = size_of(out_.extras);
  out_.extras.resize(out_.extras.size() + event_->extras_count);
  const bool has_keys = !extra_keys_.failed();
  if (has_keys) {
    Reader in = extra_keys_;
    for (uint32_t i = 0; i < event_->extras_count; ++i) {
      ByteRange& extra = out_.extras[event_->extras_begin + i];
      if (!read_extra_keys(in, lora_name_, {}, out_.bytes, extra)) return false;
    }
  }
  event_->has_salt = !salt_.empty();
  if (!event_->has_salt) return true;
  if (!has_keys) {
    event_->salted_first = salt_only(salt_, out_.bytes);
    return true;
  }
  Reader in = extra_keys_;
  return read_extra_keys(in, lora_name_, salt_, out_.bytes, event_->salted_first);
}

}  // namespace kvindex
