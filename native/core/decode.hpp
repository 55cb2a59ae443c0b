// msgpack payloads of every engine to batches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/batch.hpp"

namespace kvindex {

enum class Verdict : uint8_t {
  decoded,  // the batch holds exactly what kvindex.wire.decode_batch would have given
  unusual,  // malformed or rare: ask kvindex.wire.decode_batch, which has the last word
};

// Decode a payload into a batch (cleared first). Reads no byte outside [data, data + size) and
// throws only std::bad_alloc, whatever the bytes are. O(size).
Verdict decode(const uint8_t* data, size_t size, Batch& batch);

}  // namespace kvindex
