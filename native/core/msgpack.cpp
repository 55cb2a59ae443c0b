#include "core/msgpack.hpp"

namespace kvindex {

Reader Reader::skipped(Reader in, int depth) {
  if (in.next_is_array() || in.next_is_map()) {
    uint32_t count = 0;
    const bool has_keys = in.next_is_map();
    if (depth == 0 || !(has_keys ? in.read_map(count) : in.read_array(count))) return {};
    for (uint32_t i = 0; i < count; ++i) {
      std::string_view key;
      if (has_keys && !in.read_text(key)) return {};
      in = skipped(in, depth - 1);
      if (in.failed()) return {};
    }
    return in;
  }
  Int number;
  double real = 0;
  std::string_view bytes;
  switch (in.peek()) {
    case msgpack::kNil:
    case msgpack::kFalse:
    case msgpack::kTrue: ++in.at_; return in;
    case msgpack::kFloat32:
    case msgpack::kFloat64: return in.read_float(real) ? in : Reader();
    case msgpack::kBin8:
    case msgpack::kBin16:
    case msgpack::kBin32: return in.read_bin(bytes) ? in : Reader();
    default: break;
  }
  return (in.next_is_text() ? in.read_text(bytes) : in.read_int(number)) ? in : Reader();
}

}  // namespace kvindex
