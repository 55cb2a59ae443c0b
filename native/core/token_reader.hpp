// Token ids of an event: most of the bytes of a payload, so the one place with a fast path.
#pragma once

#include <cstdint>
#include <vector>

#include "core/msgpack.hpp"

namespace kvindex {

// Read `count` ints into `narrow` if all are in 0 … 2**32 - 1, else into `wide` modulo 2**64. They
// are appended to what is there; `count` must not exceed the bytes left.
Reader read_tokens(Reader in, uint32_t count, std::vector<uint32_t>& narrow,
                   std::vector<uint64_t>& wide);

// Read `count` pairs [t0, t1], [t1, t2], … likewise: the firsts are the tokens, the second of the
// last pair is `last`, modulo 2**64. Fails if the pairs do not continue each other.
Reader read_bigrams(Reader in, uint32_t count, std::vector<uint32_t>& narrow,
                    std::vector<uint64_t>& wide, uint64_t& last);

// Read one pair of ints.
inline bool read_pair(Reader& in, Int& first, Int& second) {
  uint32_t size = 0;
  return in.read_array(size) && size == 2 && in.read_int(first) && in.read_int(second);
}

}  // namespace kvindex
