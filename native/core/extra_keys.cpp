#include "core/extra_keys.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>

namespace kvindex {
namespace {

// Of `kvindex.wire.decode`; the block's own array counts.
constexpr int kMaxDepth = 4;
constexpr size_t kMaxValues = 4096;  // of one block, likewise

using Pool = std::vector<uint8_t>;

uint32_t size_of(const Pool& pool) { return static_cast<uint32_t>(pool.size()); }

void put(Pool& pool, uint8_t byte) { pool.push_back(byte); }

template <typename Unsigned>
void put(Pool& pool, uint8_t lead, Unsigned value) {
  std::array<uint8_t, sizeof value + 1> bytes{lead};
  store_big_endian(bytes.data() + 1, value);
  pool.insert(pool.end(), bytes.begin(), bytes.end());
}

// A length or a number in the smallest of the forms that follow `lead8` on the wire.
void put_smallest(Pool& pool, uint8_t lead8, uint64_t value) {
  const auto lead = [&](int step) { return static_cast<uint8_t>(lead8 + step); };
  if (value <= 0xff) return put(pool, lead(0), static_cast<uint8_t>(value));
  if (value <= 0xffff) return put(pool, lead(1), static_cast<uint16_t>(value));
  if (value <= 0xffffffff) return put(pool, lead(2), static_cast<uint32_t>(value));
  put(pool, lead(3), value);
}

void put_negative(Pool& pool, int64_t value) {
  if (value >= -32) return put(pool, static_cast<uint8_t>(value));
  if (value >= INT8_MIN) return put(pool, msgpack::kInt8, static_cast<uint8_t>(value));
  if (value >= INT16_MIN) return put(pool, msgpack::kInt16, static_cast<uint16_t>(value));
  if (value >= INT32_MIN) return put(pool, msgpack::kInt32, static_cast<uint32_t>(value));
  put(pool, msgpack::kInt64, static_cast<uint64_t>(value));
}

void put_int(Pool& pool, Int number) {
  if (number.negative) return put_negative(pool, static_cast<int64_t>(number.value));
  if (number.value < 0x80) return put(pool, static_cast<uint8_t>(number.value));
  put_smallest(pool, msgpack::kUint8, number.value);
}

void put_raw(Pool& pool, std::string_view bytes) {
  pool.insert(pool.end(), bytes.begin(), bytes.end());
}

void put_text(Pool& pool, std::string_view text) {
  if (text.size() < 32) {
    put(pool, static_cast<uint8_t>(msgpack::kFixText | text.size()));
  } else {
    put_smallest(pool, msgpack::kText8, text.size());
  }
  put_raw(pool, text);
}

void put_array(Pool& pool, uint32_t count) {
  if (count < 16) return put(pool, static_cast<uint8_t>(msgpack::kFixArray | count));
  if (count <= 0xffff) return put(pool, msgpack::kArray16, static_cast<uint16_t>(count));
  put(pool, msgpack::kArray32, count);
}

bool copy_leaf(Reader& in, Pool& pool) {
  const uint8_t lead = in.peek();
  std::string_view bytes;
  if (in.next_is_text()) {
    if (!in.read_text(bytes)) return false;
    put_text(pool, bytes);
  } else if (in.next_is_int()) {
    Int number;
    if (!in.read_int(number)) return false;
    put_int(pool, number);
  } else if (in.next_is_bin()) {
    if (!in.read_bin(bytes)) return false;
    put_smallest(pool, msgpack::kBin8, bytes.size());
    put_raw(pool, bytes);
  } else if (lead == msgpack::kNil || lead == msgpack::kFalse || lead == msgpack::kTrue) {
    in.move_to(in.at() + 1);
    put(pool, lead);
  } else {
    double real = 0;
    if (!in.read_float(real) || std::isnan(real)) return false;
    put(pool, msgpack::kFloat64, std::bit_cast<uint64_t>(real));
  }
  return true;
}

// Append the next value in its smallest form; `depth` is how deep arrays may be nested, `room` how
// many values may come.
bool copy_item(Reader& in, Pool& pool, int depth, size_t& room) {
  if (room == 0) return false;
  --room;
  if (!in.next_is_array()) return copy_leaf(in, pool);
  uint32_t count = 0;
  if (depth == 0 || !in.read_array(count)) return false;
  put_array(pool, count);
  for (uint32_t i = 0; i < count; ++i) {
    if (!copy_item(in, pool, depth - 1, room)) return false;
  }
  return true;
}

// Bring the last bytes of the pool, which `items` divide, into the order of the items.
void sort_items(Pool& pool, std::span<ByteRange> items) {
  const auto bytes = [&](ByteRange item) {
    return std::string_view(reinterpret_cast<const char*>(pool.data()) + item.offset, item.length);
  };
  const auto less = [&](ByteRange a, ByteRange b) { return bytes(a) < bytes(b); };
  if (std::is_sorted(items.begin(), items.end(), less)) return;

  const uint32_t begin = items.front().offset;
  const uint32_t length = size_of(pool) - begin;
  std::sort(items.begin(), items.end(), less);
  pool.resize(pool.size() + length);
  uint8_t* out = pool.data() + begin + length;
  for (const ByteRange item : items) {
    std::memcpy(out, pool.data() + item.offset, item.length);
    out += item.length;
  }
  std::memcpy(pool.data() + begin, pool.data() + begin + length, length);
  pool.resize(begin + length);
}

// Whether text that equals `name` comes next; it is read then.
bool take_text(Reader& in, std::string_view name) {
  Reader ahead = in;
  std::string_view text;
  if (!ahead.read_raw_text(text) || text != name) return false;
  in = ahead;
  return true;
}

}  // namespace

bool read_extra_keys(Reader& in, std::string_view lora_name, std::string_view salt,
                     std::vector<uint8_t>& pool, ByteRange& out) {
  thread_local std::vector<ByteRange> items;
  items.clear();
  size_t room = kMaxValues;
  uint32_t count = 0;
  const uint32_t begin = size_of(pool);
  if (!in.take_nil() && !in.read_array(count)) return false;
  if (count > kMaxValues) return false;
  for (uint32_t i = 0; i < count; ++i) {
    if (!lora_name.empty() && take_text(in, lora_name)) {
      lora_name = {};  // only once
      if (room-- == 0) return false;
      continue;
    }
    const uint32_t offset = size_of(pool);
    if (!copy_item(in, pool, kMaxDepth - 1, room)) return false;
    items.push_back({offset, size_of(pool) - offset});
  }
  if (!salt.empty()) {
    const uint32_t offset = size_of(pool);
    put_text(pool, salt);
    items.push_back({offset, size_of(pool) - offset});
  }
  sort_items(pool, items);
  out = {begin, size_of(pool) - begin};
  return true;
}

ByteRange salt_only(std::string_view salt, std::vector<uint8_t>& pool) {
  const uint32_t begin = size_of(pool);
  put_text(pool, salt);
  return {begin, size_of(pool) - begin};
}

bool only_texts(std::string_view extra_keys) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(extra_keys.data());
  Reader in(begin, begin + extra_keys.size());
  while (in.at() != in.end()) {
    std::string_view text;
    if (!in.next_is_text() || !in.read_raw_text(text)) return false;
  }
  return true;
}

}  // namespace kvindex
