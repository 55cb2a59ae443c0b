// The native twin of `kvindex.wire.decode`: it accepts less, never more, and reads the same.
#include "core/decode.hpp"

#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "core/event_reader.hpp"
#include "core/msgpack.hpp"

namespace kvindex {
namespace {

using std::string_view;

constexpr size_t kMaxPayload = size_t{1} << 30;  // so that offsets into all pools have 32 bits

bool read_ts(Reader& in, double& ts) {
  if (!in.next_is_int()) return in.read_float(ts) && std::isfinite(ts);
  Int number;
  if (!in.read_int(number)) return false;
  ts = number.negative ? static_cast<double>(static_cast<int64_t>(number.value))
                       : static_cast<double>(number.value);
  return true;
}

bool read_events(Reader& in, Batch& batch) {
  uint32_t count = 0;
  if (!in.read_array(count)) return false;
  for (uint32_t i = 0; i < count; ++i) {
    in = EventReader(batch).read(in);
    if (in.failed()) return false;
  }
  return true;
}

// An int from 0 to 2**31 - 1, or nil.
bool read_dp_rank(Reader& in, int64_t& dp_rank) {
  Int rank;
  if (in.take_nil()) return true;
  if (!in.read_int(rank) || rank.value > std::numeric_limits<int32_t>::max()) return false;
  dp_rank = static_cast<int64_t>(rank.value);
  return true;
}

// The same by names, in any order.
bool read_named_batch(Reader in, Batch& batch) {
  uint32_t count = 0;
  if (!in.read_map(count)) return false;
  bool has_ts = false;
  bool has_events = false;
  bool has_rank = false;
  for (uint32_t i = 0; i < count; ++i) {
    string_view name;
    if (!in.read_text(name)) return false;
    bool is_repeated = false;
    bool good = false;
    if (equals(name, "ts")) {
      is_repeated = std::exchange(has_ts, true);
      good = read_ts(in, batch.ts);
    } else if (equals(name, "events")) {
      is_repeated = std::exchange(has_events, true);
      good = read_events(in, batch);
    } else if (equals(name, "data_parallel_rank") || equals(name, "attn_dp_rank")) {
      is_repeated = std::exchange(has_rank, true);
      good = read_dp_rank(in, batch.dp_rank);
    } else {
      good = in.skip();
    }
    if (!good || is_repeated) return false;
  }
  return has_ts && has_events && in.left() == 0;
}

// [ts, events, dp_rank, …]; vLLM 0.9.0 has no dp_rank.
bool read_batch(Reader in, Batch& batch) {
  if (in.next_is_map()) return read_named_batch(in, batch);
  uint32_t count = 0;
  if (!in.read_array(count) || count < 2) return false;
  if (!read_ts(in, batch.ts) || !read_events(in, batch)) return false;
  if (count > 2 && !read_dp_rank(in, batch.dp_rank)) return false;
  for (uint32_t i = 3; i < count; ++i) {
    if (!in.skip()) return false;
  }
  return in.left() == 0;
}

}  // namespace

Verdict decode(const uint8_t* data, size_t size, Batch& batch) {
  batch.clear();
  if (size >= kMaxPayload) return Verdict::unusual;
  begin_bytes(batch);
  return read_batch(Reader(data, data + size), batch) ? Verdict::decoded : Verdict::unusual;
}

}  // namespace kvindex
