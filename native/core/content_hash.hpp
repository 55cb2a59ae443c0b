// The label that SGLang 0.4.6-0.5.5 gives a page: CPython's hash of the tuple of its tokens.
//
// As of CPython 3.8 and later on 64-bit machines (Objects/tupleobject.c and PyLong's hash).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvindex {

// The hash of a tuple of ints, item by item.
class TupleHash {
 public:
  void add(uint32_t item) { add_lane(item); }
  void add(uint64_t item) { add_lane(item % kIntModulus); }
  void add(int64_t item) {
    if (item >= 0) return add(static_cast<uint64_t>(item));
    const uint64_t lane = (uint64_t{0} - static_cast<uint64_t>(item)) % kIntModulus;
    add_lane(uint64_t{0} - (lane == 1 ? 2 : lane));  // -1 means an error to CPython: it is -2
  }

  // The hash of the items so far, modulo 2**64.
  uint64_t value() const {
    const uint64_t hash = lanes_ + (count_ ^ kPrime5 ^ 3527539u);
    return hash == ~uint64_t{0} ? 1546275796u : hash;
  }

 private:
  static constexpr uint64_t kIntModulus = (uint64_t{1} << 61) - 1;
  static constexpr uint64_t kPrime1 = 11400714785074694791u;
  static constexpr uint64_t kPrime2 = 14029467366897019727u;
  static constexpr uint64_t kPrime5 = 2870177450012600261u;

  void add_lane(uint64_t lane) {
    lanes_ = std::rotl(lanes_ + lane * kPrime2, 31) * kPrime1;
    ++count_;
  }

  uint64_t lanes_ = kPrime5;
  uint64_t count_ = 0;
};

// The label of a page of tokens, modulo 2**64. `Token` is uint32_t, uint64_t or int64_t.
template <typename Token>
inline uint64_t content_hash(const Token* tokens, size_t count) {
  TupleHash hash;
  for (size_t i = 0; i < count; ++i) hash.add(tokens[i]);
  return hash.value();
}

}  // namespace kvindex
