// Reads the entries of a fan-out's message as kvindex/replicas/messages.py encodes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvindex {

struct Entry {
  enum class Kind : uint8_t { batch, status, other };

  Kind kind = Kind::other;
  std::string_view whole;    // as encoded
  std::string_view rank;     // of a batch, as encoded
  std::string_view payload;  // of a batch
};

// Read all entries; false if they cannot be read. They refer to [data, data + size). O(size).
bool read_entries(const uint8_t* data, size_t size, std::vector<Entry>& entries);

}  // namespace kvindex
